"""Builds small capture logs for tests: what a proxy and an engine would have written about some requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.records import (
    FORMAT_VERSION,
    AnyRecord,
    Chunk,
    EngineStart,
    LogClose,
    LogOpen,
    RequestParameters,
    RequestStart,
    Scope,
    Source,
    Stamps,
    StreamDone,
    TokenizerIdentity,
    ToolCall,
    Usage,
)
from verifier.tokenizer import load_tokenizer

TOY = Path(__file__).parent / "data" / "toy"
BYTE_LEVEL = TOY / "bytebpe.json"  # 259 "hello", 264 " world", 265 " hello", 272 <|eos|>; 0..255 are those bytes
SENTENCEPIECE = TOY / "spm.json"
EOS = 272


@dataclass
class Logbook:
    """Two logs in the making. `write` puts them into a folder; the records may be changed before."""

    tokenizer: Path = BYTE_LEVEL
    proxy: list[AnyRecord] = field(default_factory=list)
    engine: list[AnyRecord] = field(default_factory=list)
    now: float = 1000.0
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        self.proxy.append(self._opening("proxy"))
        self.engine.append(self._opening("engine"))
        sha256 = load_tokenizer(self.tokenizer).sha256
        identity = TokenizerIdentity(name=str(self.tokenizer), files={"tokenizer.json": sha256}, vocab_size=500)
        self.engine.append(self._engine_start(identity))
        self.recorder = EngineRecorder(self.engine.append, self.tick)
        self._captures = 0

    def _engine_start(self, identity: TokenizerIdentity) -> EngineStart:
        return EngineStart(
            ts=self.tick(),
            vllm="0.32.0",
            model="toy",
            tokenizer=identity,
            reasoning_parser=self.reasoning_parser,
        )

    def tick(self) -> float:
        self.now += 0.01
        return self.now

    def _opening(self, source: Source) -> LogOpen:
        return LogOpen(
            ts=self.now,
            format=FORMAT_VERSION,
            source=source,
            host="h",
            pid=1,
            start=self.now,
            program="test",
            scope=Scope(),
        )

    def engine_request(
        self, response_id: str, ids: Sequence[int], *, finish: str = "stop", stop: int | None = None, **added: Any
    ) -> None:
        """What the engine did: one step a token."""
        engine_id = f"{response_id}-0a1b2c3d"
        defaults: dict[str, Any] = {"prompt_len": 1, "prompt_tail": [104], "eos_ids": [EOS]}
        self.recorder.added(engine_id, external_id=response_id, **(defaults | added))
        for token_id in ids:
            self.recorder.step([Sampled(engine_id, [token_id])])
        self.recorder.finished(engine_id, finish_reason=finish, stop_reason=stop)

    def stream(
        self,
        response_id: str | None,
        pieces: Sequence[str | tuple[Any, str]],
        *,
        finish: str | None = "stop",
        stop_reason: int | str | None = None,
        usage: int | None = None,
        outcome: Any = "complete",
        end_marker: bool = True,
        token_ids: Sequence[list[int]] | None = None,
        **parameters: Any,
    ) -> int:
        """What the proxy saw of one chat stream; returns its capture number. A piece may be (kind, text)."""
        self._captures += 1
        number = self._captures
        wanted = RequestParameters(**({"model": "toy", "stream": True} | parameters))
        self.proxy.append(
            RequestStart(
                ts=self.tick(),
                capture=number,
                uuid=f"uuid-{number}",
                method="POST",
                path="/v1/chat/completions",
                endpoint="chat",
                parameters=wanted,
            )
        )
        length = 0
        for index, item in enumerate(pieces):
            kind, piece = item if isinstance(item, tuple) else ("text", item)
            call = ToolCall(name=None if index else "f", arguments=piece)
            length += len(piece)
            self.proxy.append(
                Chunk(
                    ts=self.tick(),
                    capture=number,
                    wire_index=index + 1,
                    kind=kind,
                    chunk_index=index + 1,
                    delta_text=piece,
                    tool_calls=[call] if kind == "tool_call" else None,
                    accumulated_len=length,
                    token_ids=token_ids[index] if token_ids else None,
                    response_id=response_id if index == 0 else None,
                )
            )
        if finish is not None or not pieces:
            self.proxy.append(
                Chunk(
                    ts=self.tick(),
                    capture=number,
                    wire_index=len(pieces) + 1,
                    kind="finish",
                    finish_reason=finish,
                    stop_reason=stop_reason,
                    response_id=response_id if not pieces else None,
                )
            )
        self.proxy.append(
            StreamDone(
                ts=self.tick(),
                capture=number,
                outcome=outcome,
                status=200,
                chunk_count=len(pieces),
                total_text_len=length,
                events=len(pieces) + 2,
                reads=len(pieces) + 2,
                bytes=100,
                sha256="0" * 64,
                end_marker=end_marker,
                stamps=Stamps(),
                usage=None if usage is None else Usage(completion_tokens=usage),
            )
        )
        return number

    def exchange(
        self, ids: Sequence[int], pieces: Sequence[str | tuple[Any, str]], *, name: str = "chatcmpl-1", **keys: Any
    ) -> None:
        """One request as both sides saw it; keys named `engine_...` go to the engine's side."""
        engine = {key.removeprefix("engine_"): keys.pop(key) for key in list(keys) if key.startswith("engine_")}
        self.engine_request(name, ids, **engine)
        self.stream(name, pieces, **keys)

    def write(self, folder: Path, *, close: bool = True) -> Path:
        folder.mkdir(exist_ok=True)
        for name, records in (("proxy-h-1-1.jsonl", self.proxy), ("engine-h-2-1.jsonl", self.engine)):
            ending = [LogClose(ts=self.tick(), records=len(records), lost=0)] if close else []
            lines = [msgspec.json.encode(record) for record in [*records, *ending]]
            (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return folder
