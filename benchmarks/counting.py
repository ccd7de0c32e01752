"""What counting adds to the capture of a chunk and of a short request, in a warm loop: with a tally, and without.

python -m benchmarks.counting
"""

import gc
import time

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.counters import Counters, ModelNames
from proxy.tally import Book, Tally

ROUNDS, CHUNKS = 25, 2000

IDS = b',"token_ids":[%d]'
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" word"},"logprobs":null,"finish_reason":null%b}]}\n\n'
)
REPLY = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" hello there",'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}'
)
STREAM, JSON = [(b"content-type", b"text/event-stream")], [(b"content-type", b"application/json")]


def begun(book: Book | None, headers: list[tuple[bytes, bytes]]) -> tuple[RequestCapture, Tally | None]:
    tally = None
    if book:
        tally = Tally(book, "chat", 1.0)
        tally.status, tally.sent, tally.headers = 200, 1.0, 1.1
    capture = RequestCapture(1, "", RequestHead("POST", "/v1/chat/completions", []), 1.0, Limits(), tally)
    capture.request_ended(1.0)
    capture.reply_head(200, headers, 1.1)
    return capture, tally


def stream(book: Book | None, events: list[bytes]) -> float:
    """Microseconds a chunk."""
    capture, _ = begun(book, STREAM)
    before, at = time.perf_counter(), 1.1
    for event in events:
        at += 0.02
        capture.reply_body(event, at)
    return (time.perf_counter() - before) / len(events) * 1e6


def short(book: Book | None, count: int = 500) -> float:
    """Microseconds a request."""
    before = time.perf_counter()
    for _ in range(count):
        capture, tally = begun(book, JSON)
        capture.reply_body(REPLY, 1.2)
        capture.ended("complete", 1.3)
        if tally:
            tally.ended("complete", 1.3, "captured")
    return (time.perf_counter() - before) / count * 1e6


def main() -> None:
    gc.disable()
    book = Book(Counters(), ModelNames())
    plain = [EVENT % b""] * CHUNKS
    with_ids = [EVENT % (IDS % number) for number in range(CHUNKS)]
    for name, events in (("a chunk", plain), ("a chunk with ids", with_ids), ("a short request", None)):
        least = [float("inf")] * 2
        for _ in range(ROUNDS):
            for place, used in enumerate((None, book)):
                least[place] = min(least[place], stream(used, events) if events else short(used))
        without, counted = least
        print(f"{name:18} {without:6.2f} µs, counted {counted:6.2f} µs: {counted - without:+.2f}")


if __name__ == "__main__":
    main()
