"""Real vLLM replies through a real proxy process, cut at every place: the client gets the same bytes at each cut.

One thread plays both ends in lock-step, so that each part is a read of its own: the rest of a reply is written when the
client has the part before it.
"""

import contextlib
import hashlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparseety.records import Response, StreamDone
from tests.raw_upstream import EVENT_STREAM, LAST_CHUNK, WAIT, RawClient, chunk, chunked, post, records, reply

ROOT = Path(__file__).parent.parent
SOURCE = Path(os.environ.get("SPARSEETY_TEST_SAMPLES", ROOT / "tests" / "data" / "sse"))
SAMPLES = sorted([*SOURCE.glob("*.sse"), *SOURCE.glob("*.body")])
CUTS = 150  # of a sample that is too large to be cut at each byte
EACH_BYTE = 700  # samples up to this size are


class LockStepUpstream:
    """Hands each request's connection to the test, which writes the reply, and takes it back when that is `done`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.waiting: queue.Queue[tuple[socket.socket, threading.Event]] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := connection.recv(1 << 16):
                if b" /health " in head:
                    connection.sendall(reply())
                    continue
                while not head.endswith(b"{}"):
                    head += connection.recv(1 << 16)
                done = threading.Event()
                self.waiting.put((connection, done))
                done.wait()


@contextlib.contextmanager
def running_process(log_dir: Path, upstream: str) -> Iterator[int]:
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", upstream, "--log-dir", str(log_dir)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ) as process:
        try:
            assert process.stderr is not None
            banner = ""
            while "Ready" not in banner:
                banner += process.stderr.readline() or pytest.fail(banner)
            found = re.search(r"listen +http://127\.0\.0\.1:(\d+)", banner)
            assert found
            yield int(found[1])
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT)
            assert process.returncode == 0
        finally:
            process.kill()


def cuts_of(size: int) -> list[int]:
    if size <= EACH_BYTE:
        return list(range(1, size))
    return sorted({1 + (size - 2) * step // (CUTS - 1) for step in range(CUTS)})


def test_real_replies_arrive_byte_for_byte_wherever_the_network_cuts_them(tmp_path):
    assert len(SAMPLES) > 10
    upstream = LockStepUpstream()
    sizes, sums = [], []
    with running_process(tmp_path / "logs", upstream.url) as port, RawClient(port) as client:
        for path in SAMPLES:
            sample = path.read_bytes()
            for cut in cuts_of(len(sample)):
                client.send(post(b"{}"))
                connection, done = upstream.waiting.get(timeout=WAIT)
                stream = path.suffix == ".sse"
                connection.sendall(chunked(EVENT_STREAM) if stream else chunked(b"content-type: application/json"))
                assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
                connection.sendall(chunk(sample[:cut]))
                assert client.read_chunk() == sample[:cut], (path, cut)
                connection.sendall(chunk(sample[cut:]) + LAST_CHUNK)
                got = b""
                while data := client.read_chunk():
                    got += data
                assert got == sample[cut:], (path, cut)
                done.set()
                sizes.append(len(sample))
                sums.append(hashlib.sha256(sample).hexdigest())
    ends = [record for record in records(tmp_path / "logs") if isinstance(record, StreamDone | Response)]
    assert [(end.outcome, end.bytes, end.sha256) for end in ends] == [
        ("complete", size, digest) for size, digest in zip(sizes, sums, strict=True)
    ]
    upstream.listener.close()


_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}'
_GZIP = zlib.compressobj(wbits=31)

# Each part is one read; it must leave before the next one is there. None waits for the end of a line, an event, a
# character, a compressed block or a clump of events.
READS = {
    "A2-01 no space": [_EVENT.replace(b" ", b"") % b"hi" + b"\n\ndata:[DONE]\n\n"],
    "A2-01 two spaces": [b"data:  x\n\n"],
    "A2-01 CRLF, cut inside": [
        _EVENT % b"h" + b"\r",
        b"\n\r",
        b"\n" + _EVENT % b"i" + b"\r\n\r\n",
        b"data: [DONE]\r\n\r\n",
    ],
    "A2-01 lone CR": [_EVENT % b"h" + b"\r\r" + _EVENT % b"i" + b"\r\r", b"data: [DONE]\r\r"],
    "A2-01 several events": [b"\n\n".join([_EVENT % b"h", _EVENT % b"i", b"data: [DONE]", b""])],
    "A2-06 cut inside characters": [b"data: \xe4\xb8", b"\xad\xe6", b"\x96", b"\x87\n\n"],
    "A2-10 gzip, by flush": [_GZIP.compress(b"data: 1\n\n") + _GZIP.flush(zlib.Z_SYNC_FLUSH) for _ in range(3)],
    "A3-03 forty events": [_EVENT % b"%d" % number + b"\n\n" for number in range(40)],
    "comments and blank lines": [b": ping\n\n", b"\n", b"\r\n\r\n", b"event: x\nid: 1\nretry: 5\n\n"],
    "no event at all": [b"\x00\xff\xfe", b"data", b"\xef\xbb\xbfdata: x\n\n"],
}


def test_each_read_goes_on_before_the_next_whatever_it_ends_in(tmp_path):
    upstream = LockStepUpstream()
    with running_process(tmp_path / "logs", upstream.url) as port, RawClient(port) as client:
        for name, parts in READS.items():
            coding = [b"content-encoding: gzip"] if "gzip" in name else []
            client.send(post(b"{}", b"accept-encoding: gzip"))
            connection, done = upstream.waiting.get(timeout=WAIT)
            connection.sendall(chunked(EVENT_STREAM, *coding))
            head = client.read_until(b"\r\n\r\n")
            assert (b"\r\ncontent-encoding: gzip\r\n" in head) == bool(coding)
            for part in parts:
                connection.sendall(chunk(part))
                assert client.read_chunk() == part, name
            connection.sendall(LAST_CHUNK)
            assert client.read_chunk() == b"", name
            done.set()
    ends = [record for record in records(tmp_path / "logs") if isinstance(record, StreamDone)]
    assert [end.reads for end in ends] == [len(parts) for parts in READS.values()]
    upstream.listener.close()


def test_a_character_that_arrives_byte_by_byte_leaves_byte_by_byte(tmp_path):  # A2-06
    event = 'data: {"choices":[{"index":0,"delta":{"content":"世界é🙂"}}]}\r\n\r\n'.encode()
    upstream = LockStepUpstream()
    with running_process(tmp_path / "logs", upstream.url) as port, RawClient(port) as client:
        client.send(post(b"{}"))
        connection, done = upstream.waiting.get(timeout=WAIT)
        connection.sendall(chunked(EVENT_STREAM))
        client.read_until(b"\r\n\r\n")
        for byte in event:
            connection.sendall(chunk(bytes([byte])))
            assert client.read_chunk() == bytes([byte])
        connection.sendall(LAST_CHUNK)
        assert client.read_chunk() == b""
        done.set()
    (end,) = (record for record in records(tmp_path / "logs") if isinstance(record, StreamDone))
    assert (end.reads, end.chunk_count, end.total_text_len) == (len(event), 1, 4)
    upstream.listener.close()
