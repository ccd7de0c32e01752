"""Builds small capture logs for tests: what a proxy and an engine would have written about some requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.records import (
    FORMAT_VERSION,
    AnyRecord,
    Chunk,
    Endpoint,
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

WAIT = 20.0  # seconds, for what comes soon
Pieces = Sequence[str | tuple[Any, str] | None]  # None: an event without text


def captures(found: list[AnyRecord]) -> list[int]:
    return [record.capture for record in found if isinstance(record, Chunk)]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _so_far(count: int) -> Usage:
    return Usage(completion_tokens=count)


@dataclass
class Logbook:
    """Two logs in the making. `write` puts them into a folder; the records may be changed before."""

    tokenizer: Path = BYTE_LEVEL
    proxy: list[AnyRecord] = field(default_factory=list)
    engine: list[AnyRecord] = field(default_factory=list)
    now: float = 1000.0
    reasoning_parser: str | None = None
    max_model_len: int | None = None

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
            max_model_len=self.max_model_len,
            served_names=["toy"],
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
        self,
        response_id: str,
        ids: Sequence[int],
        *,
        finish: str = "stop",
        stop_reason: int | None = None,
        **added: Any,
    ) -> None:
        """What the engine did: one step a token."""
        child = f"{added['child']}_" if added.get("child") else ""
        engine_id = f"{child}{response_id}-0a1b2c3d"
        defaults: dict[str, Any] = {"prompt_len": 1, "prompt_tail": [104], "eos_ids": [EOS]}
        self.recorder.added(engine_id, external_id=response_id, **(defaults | added))
        for token_id in ids:
            self.recorder.step([Sampled(engine_id, [token_id])])
        self.recorder.finished(engine_id, finish_reason=finish, stop_reason=stop_reason)

    def stream(
        self,
        response_id: str | None,
        pieces: Pieces | dict[int, Pieces],
        *,
        endpoint: Endpoint = "chat",
        finish: str | None = "stop",
        stop_reason: int | str | None = None,
        usage: int | None = None,
        outcome: Any = "complete",
        end_marker: bool = True,
        token_ids: Sequence[list[int]] | None = None,
        counts: Sequence[int] | None = None,
        logprobs: Sequence[int] | None = None,
        x_request_id: str | None = None,
        **parameters: Any,
    ) -> int:
        """What the proxy saw of one stream, choice 0 or a dict of choices; returns its capture number.

        A piece may be (kind, text). token_ids, counts (usage so far) and logprobs (entries) stand in its event.
        """
        choices = pieces if isinstance(pieces, dict) else {0: pieces}
        texts = [p[1] if isinstance(p, tuple) else p for some in choices.values() for p in some if p is not None]
        self._captures += 1
        number = self._captures
        wanted = RequestParameters(**({"model": "toy", "stream": True} | parameters))
        self.proxy.append(
            RequestStart(
                ts=self.tick(),
                capture=number,
                uuid=f"uuid-{number}",
                method="POST",
                path="/v1/chat/completions" if endpoint == "chat" else f"/v1/{endpoint}",
                endpoint=endpoint,
                x_request_id=x_request_id,
                parameters=wanted,
            )
        )
        endings = {"finish_reason": finish, "stop_reason": stop_reason} if finish is not None else None
        witness = {"token_ids": token_ids, "logprob_count": logprobs, "usage": counts and list(map(_so_far, counts))}
        events = self._chunks(number, response_id, choices, endings, witness, end_marker)
        self.proxy.append(
            StreamDone(
                ts=self.tick(),
                capture=number,
                outcome=outcome,
                status=200,
                chunk_count=len(texts),
                total_text_len=sum(map(len, texts)),
                events=events,
                reads=events,
                bytes=100,
                sha256="0" * 64,
                end_marker=end_marker,
                stamps=Stamps(),
                usage=None if usage is None else Usage(completion_tokens=usage),
            )
        )
        return number

    def _chunks(
        self,
        capture: int,
        response_id: str | None,
        choices: dict[int, Pieces],
        ending: dict[str, Any] | None,
        witness: dict[str, Sequence[Any] | None],
        end_marker: bool,
    ) -> int:
        """The records of a stream's events; returns how many events those are."""
        events: list[dict[str, Any]] = []
        for choice, pieces in choices.items():
            length = count = 0
            for index, item in enumerate(pieces):
                kind, piece = item if isinstance(item, tuple) else ("text", item)
                event = {"choice": choice, "kind": kind}
                event |= {name: values[index] for name, values in witness.items() if values}
                if piece is not None:
                    count, length = count + 1, length + len(piece)
                    event |= {"chunk_index": count, "delta_text": piece, "accumulated_len": length}
                if kind == "tool_call":
                    event["tool_calls"] = [ToolCall(name=None if index else "f", arguments=piece)]
                events.append(event)
            if ending is not None:
                events.append({"choice": choice, "kind": "finish", **ending})
            elif not pieces and response_id:
                events.append({"choice": choice, "kind": "role"})
        if end_marker:
            events.append({"kind": "done"})
        for wire_index, event in enumerate(events, 1):
            named = response_id if wire_index == 1 else None
            self.proxy.append(Chunk(ts=self.tick(), capture=capture, wire_index=wire_index, response_id=named, **event))
        return len(events)

    def exchange(self, ids: Sequence[int], pieces: Pieces, *, name: str = "chatcmpl-1", **keys: Any) -> None:
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
