"""How many bytes the logs take: a chunk's line, and proxy and engine together for each token, packed.

    python -m benchmarks.log_budget [SAMPLES] [STREAMS.jsonl ...]

SAMPLES: a folder of recorded event streams (*.sse), replayed through the proxy's capture. STREAMS: really sampled ids
(the form of deploy/demo/streams.jsonl), served as vLLM words its events, 16 at a time, 20 ms a step, so that both logs
are written as they would be; then packed as closed segments are. Exit code 1 where a budget is exceeded.
"""

import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from uuid import UUID

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from deploy.demo.replay import Stream, load_streams
from proxy.capture import Limits, RequestCapture, RequestHead
from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, Scope
from sparseety.segments import Rotation
from sparseety.sse import SseSplitter
from sparseety.tidy import tidy

ROOT = Path(__file__).parent.parent
LINE_BUDGET = 130  # bytes, of a chunk with four characters of text
TOKEN_BUDGET = 20  # bytes a token, both logs, packed
CAPTURE = 999  # the request number of the replayed streams: each further digit is a byte more

_HEAD = RequestHead("POST", "/v1/chat/completions", [(b"content-type", b"application/json")])
_REPLY = [(b"content-type", b"text/event-stream; charset=utf-8")]
_TOGETHER = 16  # requests that run at the same time
_STEP_SECONDS = 0.02


class Clock:
    """Steps with a jitter of microseconds: the digits of a time stamp do not pack well, and must not do so here."""

    def __init__(self) -> None:
        self.now = 1795973571.0
        self._random = random.Random(1)

    def __call__(self) -> float:
        self.now += self._random.uniform(5e-6, 2e-4)
        return round(self.now, 6)

    def uuid(self) -> str:
        return str(UUID(int=self._random.getrandbits(128), version=4))


def chunk_lines(folder: Path) -> list[tuple[Chunk, int]]:
    """The text chunks of all recorded streams, and the bytes of each one's line."""
    clock, found = Clock(), []
    for path in sorted(folder.glob("*.sse")):
        kind = "completions" if path.name.startswith("completion") else "chat/completions"
        head = RequestHead("POST", f"/v1/{kind}", _HEAD.headers)
        capture = RequestCapture(CAPTURE, clock.uuid(), head, clock(), Limits())
        records = [*capture.request_ended(clock()), *capture.reply_head(200, _REPLY, clock())]
        for event in SseSplitter().feed(path.read_bytes()):
            records += capture.reply_body(event.raw, clock())
        for record in records:
            if isinstance(record, Chunk) and record.chunk_index is not None:
                found.append((record, len(msgspec.json.encode(record)) + 1))
    return found


def of_four_characters(lines: list[tuple[Chunk, int]]) -> list[int]:
    """Their sizes, less those that bear more than text: ids, usage, an ending, a choice that is not the only one."""
    return [size for chunk, size in lines if len(chunk.delta_text) == 4 and _bears_text_alone(chunk)]


def _bears_text_alone(chunk: Chunk) -> bool:
    text = Chunk(
        ts=chunk.ts,
        capture=chunk.capture,
        wire_index=chunk.wire_index,
        chunk_index=chunk.chunk_index,
        delta_text=chunk.delta_text,
        accumulated_len=chunk.accumulated_len,
    )
    return chunk == text


@dataclass
class Served:
    """One request on its way through engine and proxy."""

    stream: Stream
    capture: RequestCapture
    engine_id: str
    detokenizer: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    done: int = 0  # ids sampled


class Server:
    """Engine and proxy in one, as far as their logs show."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._clock, self._tokenizer = Clock(), tokenizer
        rotation = Rotation(min_free_bytes=0, compress=False)
        self._proxy = LogWriter(folder, "proxy", Scope(), clock=self._clock, rotation=rotation)
        self._engine = LogWriter(folder, "engine", Scope(), clock=self._clock, rotation=rotation)
        self._recorder = EngineRecorder(self._engine.put, self._clock)
        self._numbers = itertools.count(1)

    def serve(self, streams: list[Stream]) -> int:
        """Serve all, so many at a time; returns the number of tokens."""
        waiting, running, tokens = list(streams), list[Served](), 0
        while waiting or running:
            while waiting and len(running) < _TOGETHER:
                running.append(self._begin(waiting.pop(0)))
            self._clock.now += _STEP_SECONDS
            self._recorder.step([Sampled(each.engine_id, [each.stream.ids[each.done]]) for each in running])
            for each in running:
                self._token(each)
            tokens += len(running)
            running = [each for each in running if each.done < len(each.stream.ids)]
        self._proxy.close()
        self._engine.close()
        return tokens

    def _begin(self, stream: Stream) -> Served:
        name = f"chatcmpl-{self._clock.uuid().replace('-', '')}"
        capture = RequestCapture(next(self._numbers), self._clock.uuid(), _HEAD, self._clock(), Limits())
        served = Served(stream, capture, f"{name}-{self._clock.uuid()[:8]}")
        request = {"model": "m", "stream": True, "messages": [{"role": "user", "content": stream.prompt}]}
        self._put(capture.request_body(json.dumps(request).encode(), self._clock()))
        self._put(capture.request_ended(self._clock()))
        self._recorder.added(
            served.engine_id,
            external_id=name,
            prompt_len=len(stream.prompt_ids),
            prompt_tail=stream.prompt_ids,
            eos_ids=[2],
            max_tokens=220,
        )
        self._put(capture.reply_head(200, _REPLY, self._clock()))
        self._event(served, {"role": "assistant", "content": ""}, None)
        return served

    def _token(self, served: Served) -> None:
        token_id = served.stream.ids[served.done]
        served.done += 1
        last = served.done == len(served.stream.ids)
        text = served.detokenizer.step(self._tokenizer, token_id)
        if text or last:
            self._event(served, {"content": text or ""}, served.stream.finish if last else None)
        if last:
            self._recorder.finished(served.engine_id, finish_reason=served.stream.finish)
            self._put(served.capture.reply_body(b"data: [DONE]\n\n", self._clock()))
            self._put(served.capture.ended("complete", self._clock()))

    def _event(self, served: Served, delta: dict[str, str], finish: str | None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
        name = served.engine_id.rpartition("-")[0]
        event = {"id": name, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        self._put(served.capture.reply_body(b"data: " + msgspec.json.encode(event) + b"\n\n", self._clock()))

    def _put(self, records: Sequence[AnyRecord]) -> None:
        for record in records:
            self._proxy.put(record)


def packed_sizes(paths: list[Path]) -> Iterator[tuple[str, int, int]]:
    """(source, bytes packed, tokens) of each log, from serving the sampled streams."""
    streams = [stream for path in paths for stream in load_streams(path)]
    tokenizer = Tokenizer.from_file(str(ROOT / "deploy/demo/tokenizer/tokenizer.json"))
    with tempfile.TemporaryDirectory() as name:
        tokens = Server(Path(name), tokenizer).serve(streams)
        for source in ("proxy", "engine"):
            for path in Path(name).glob(f"{source}-*"):
                yield f"{source}, plain", path.stat().st_size, tokens
            tidy(Path(name), source, path.name.split("-")[1], Rotation())
            [packed] = Path(name).glob(f"{source}-*.zst")
            yield source, packed.stat().st_size, tokens


def main(samples: Path, streams: list[Path]) -> int:
    lines = chunk_lines(samples)
    four = of_four_characters(lines)
    print(f"{len(lines)} text chunks of {samples}: {mean(size for _, size in lines):.1f} bytes a line")
    print(f"{len(four)} of four characters: {mean(four):.1f} bytes, at most {max(four)} (budget {LINE_BUDGET})")
    total = 0.0
    for source, size, tokens in packed_sizes(streams):
        print(f"{source + ':':14} {size:9} bytes, {size / tokens:6.2f} a token ({tokens} tokens)")
        total += 0 if "plain" in source else size / tokens
    print(f"both, packed:  {total:.2f} bytes a token (budget {TOKEN_BUDGET})")
    return int(max(four) > LINE_BUDGET or total > TOKEN_BUDGET)


if __name__ == "__main__":
    samples, *streams = sys.argv[1:] or [str(ROOT / "tests/data/sse")]
    sys.exit(main(Path(samples), [Path(path) for path in streams] or [ROOT / "deploy/demo/streams.jsonl"]))
