"""Write capture logs of any size, from really sampled streams, with the product's own recorder and log writer.

    python -m benchmarks.make_logs FOLDER --tokens 1000000

What the proxy would have written about such streams (one token a chunk), and what the plugin would have: one step for
all requests that run at a time.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from deploy.demo.replay import Stream, load_streams
from proxy.capture import Limits, RequestCapture, RequestHead
from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.clock import monotonic_clock
from sparseety.logwriter import LogWriter
from sparseety.records import EngineStart, Scope, TokenizerIdentity

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "deploy/demo/tokenizer"
EOS = 2
AT_ONCE = 64
_HEADERS = [(b"content-type", b"text/event-stream")]


def events(name: str, stream: Stream, tokenizer: Tokenizer) -> Iterator[bytes]:
    """vLLM's events for one streamed chat, one a token."""
    head = {"id": name, "object": "chat.completion.chunk", "created": 1795973571, "model": "m"}
    detokenizer = DecodeStream(ids=stream.prompt_ids, skip_special_tokens=True)
    ends = stream.finish == "stop"

    def event(delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
        return b"data: " + json.dumps({**head, "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"

    yield event({"role": "assistant", "content": ""}, None)
    for number, token in enumerate(stream.ids, 1):
        last = number == len(stream.ids)
        text = "" if last and ends else detokenizer.step(tokenizer, token) or ""
        yield event({"content": text} if text else {}, stream.finish if last else None)
    usage = {"prompt_tokens": len(stream.prompt_ids), "completion_tokens": len(stream.ids)}
    yield b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def write_logs(folder: Path, tokens: int) -> int:
    """Fill a folder with logs of at least so many tokens; returns how many."""
    clock = monotonic_clock()
    limits = Limits()
    streams = load_streams(ROOT / "deploy/demo/streams.jsonl")
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    sse = {id(stream): list(events("chatcmpl-NAME", stream, tokenizer)) for stream in streams}
    proxy = LogWriter(folder, "proxy", Scope(endpoints=["chat"]), clock=clock, max_queue_bytes=1 << 40)
    engine = LogWriter(folder, "engine", Scope(), clock=clock, max_queue_bytes=1 << 40)
    identity = TokenizerIdentity(name=str(TOKENIZER), vocab_size=49152)
    engine.put(EngineStart(ts=clock(), vllm="0.32.0", model="m", tokenizer=identity))
    recorder = EngineRecorder(engine.put, clock)
    written = number = 0
    while written < tokens:
        batch = []
        for stream in (streams[(number + k) % len(streams)] for k in range(AT_ONCE)):
            number += 1
            name = f"chatcmpl-{number:032x}"
            body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": stream.prompt}]})
            capture = RequestCapture(
                number, f"{number:036x}", RequestHead("POST", "/v1/chat/completions", []), clock(), limits
            )
            records = [*capture.request_body(body.encode(), clock()), *capture.request_ended(clock())]
            records += capture.reply_head(200, _HEADERS, clock())
            for record in records:
                proxy.put(record)
            recorder.added(
                name + "-0a1b2c3d",
                external_id=name,
                prompt_len=len(stream.prompt_ids),
                prompt_tail=stream.prompt_ids,
                eos_ids=[EOS],
            )
            batch.append((name, stream, capture, [e.replace(b"chatcmpl-NAME", name.encode()) for e in sse[id(stream)]]))
        for step in range(max(len(events_) for *_, events_ in batch)):
            rows = [Sampled(name + "-0a1b2c3d", [s.ids[step]]) for name, s, _, _ in batch if step < len(s.ids)]
            recorder.step(rows)
            for name, stream, capture, events_ in batch:
                if step < len(events_):
                    for record in capture.reply_body(events_[step], clock()):
                        proxy.put(record)
                if step == len(stream.ids):
                    recorder.finished(name + "-0a1b2c3d", finish_reason=stream.finish)
                if step == len(events_) - 1:
                    for record in capture.ended("complete", clock()):
                        proxy.put(record)
        written += sum(len(stream.ids) for _, stream, _, _ in batch)
        proxy.flush()
        engine.flush()
    proxy.close()
    engine.close()
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    tokens = write_logs(options.folder, options.tokens)
    size = sum(path.stat().st_size for path in options.folder.glob("*.jsonl"))
    print(f"{tokens} tokens, {size} bytes, {size / tokens:.0f} bytes a token")


if __name__ == "__main__":
    main()
