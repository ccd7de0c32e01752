"""A scripted upstream on raw sockets, a real proxy in front of it, and a client that sees bytes.

The upstream writes exactly what a test tells it to, read by read, and keeps exactly what it received.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from proxy.config import ProxyConfig
from proxy.service import Service
from proxy.values import Address
from proxy.worker import Summary
from sparseety.clock import monotonic_clock
from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord

WAIT = 10.0  # seconds; no test waits so long unless something is wrong


@dataclass
class Received:
    """One request as the upstream got it."""

    head: bytes = b""
    body: bytearray = field(default_factory=bytearray)  # de-chunked
    head_arrived: threading.Event = field(default_factory=threading.Event)
    body_arrived: threading.Event = field(default_factory=threading.Event)
    some_body_arrived: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)  # the proxy closed its connection

    @property
    def request_line(self) -> bytes:
        return self.head.split(b"\r\n")[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.rstrip(b"\r\n").split(b"\r\n")[1:]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


class Reset:
    """A step: break the connection off."""


class Close:
    """A step: close the connection."""


class AwaitHangUp:
    """A step: wait until the other side closes the connection."""


Step = bytes | threading.Event | type[Reset] | type[Close] | type[AwaitHangUp]


def reply(body: bytes = b"", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"transfer-encoding: chunked"]) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8"


class RawUpstream:
    """Serves each request by the script that is next; the last one stays."""

    def __init__(self, *steps: Step, read_body: bool = True) -> None:
        self.scripts: list[tuple[Step, ...]] = [steps]
        self.choose: Callable[[Received], tuple[Step, ...]] | None = None  # instead: the script for a request
        self.read_body = read_body  # False: reply as soon as the head is there
        self.requests: list[Received] = []
        self.arrived = threading.Semaphore(0)
        self.connections = 0  # accepted so far
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next_request(self) -> Received:
        assert self.arrived.acquire(timeout=WAIT), "no request arrived at the upstream"
        return self.requests[-1]

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            try:
                await self._connection(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                writer.close()
                with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                    await writer.wait_closed()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        ready()
        await stop.wait()
        await asyncio.sleep(0.01)  # asyncio leaks a connection that it has accepted and not handed over yet
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            received = Received()
            try:
                received.head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(received)
                received.head_arrived.set()
                self.arrived.release()
                if self.read_body:
                    await self._read_body(reader, received)
                if self.choose:
                    script = self.choose(received)
                else:
                    script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                if not await self._play(script, reader, writer):
                    return
            finally:
                if reader.at_eof() or reader.exception():
                    received.hung_up.set()

    async def _read_body(self, reader: asyncio.StreamReader, received: Received) -> None:
        headers = {name.lower(): value for name, value in received.headers}
        if headers.get(b"transfer-encoding") == b"chunked":
            async for data in _chunks(reader):
                received.body += data
                received.some_body_arrived.set()
        left = int(headers.get(b"content-length", b"0"))
        while left:
            data = await reader.read(min(left, 1 << 16))
            if not data:
                raise ConnectionError
            received.body += data
            received.some_body_arrived.set()
            left -= len(data)
        received.body_arrived.set()

    async def _play(self, script: tuple[Step, ...], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False: the connection is done with."""
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, threading.Event):
                assert await asyncio.to_thread(step.wait, WAIT)
            elif step is Reset:
                writer.transport.abort()
                return False
            elif step is Close:
                return False
            else:
                while await reader.read(1 << 16):
                    pass
                return False
        return True


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        yield data[:-2]


@contextlib.contextmanager
def in_thread(
    work: Callable[[Callable[[], None], asyncio.Event], AsyncIterator[None] | object],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[None]:
    """Run `work(ready, stop)` in a loop of its own, in a thread, until the block ends."""
    ready = threading.Event()
    handles: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    failures: list[BaseException] = []

    async def run() -> None:
        stop = asyncio.Event()
        handles.append((asyncio.get_running_loop(), stop))
        await work(ready.set, stop)

    def body() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(run())
        except BaseException as error:  # noqa: BLE001 -- told to the test, in its own thread
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    assert ready.wait(WAIT)
    try:
        yield
    finally:
        loop, stop = handles[0]
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


@contextlib.contextmanager
def running_upstream(*steps: Step, read_body: bool = True) -> Iterator[RawUpstream]:
    upstream = RawUpstream(*steps, read_body=read_body)
    with in_thread(upstream.serve):
        yield upstream


@dataclass
class RunningProxy:
    service: Service
    log_dir: Path
    registry: CollectorRegistry
    summary: Summary | None = None

    def client(self) -> "RawClient":
        return RawClient(self.service.listen.port)

    def admin(self, path: str) -> tuple[int, bytes]:
        with RawClient(self.service.admin.port) as client:
            client.send(b"GET " + path.encode() + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            return client.read_reply()

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum over the samples that have these labels; None: there is none."""
        found = [
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None


@contextlib.contextmanager
def running_proxy(
    tmp_path: Path, upstream: str, *, drain_seconds: float = 0.0, **settings: Any
) -> Iterator[RunningProxy]:
    """A real proxy on ports of its own. Its log is complete when the block has ended."""
    registry = CollectorRegistry()
    config = ProxyConfig(
        listen=Address("127.0.0.1", 0),
        admin=Address("127.0.0.1", 0),
        upstream=upstream,
        log_dir=tmp_path / "logs",
        drain_seconds=drain_seconds,
        **({"log_min_free_bytes": 0} | settings),  # however little is free where the tests run
    )
    proxy = RunningProxy(Service(config, clock=monotonic_clock(), registry=registry), config.log_dir, registry)

    async def work(ready: Callable[[], None], stop: asyncio.Event) -> None:
        proxy.summary = await proxy.service.run(stop, asyncio.Event(), on_ready=ready)

    with in_thread(work, uvloop.new_event_loop):  # the loop of the command, which differs from asyncio's own
        yield proxy


class RawClient:
    """A client that shows every byte."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
        self.buffer = b""

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_until(self, end: bytes) -> bytes:
        while end not in self.buffer:
            data = self.socket.recv(1 << 16)
            assert data, f"closed before {end!r}; got {self.buffer[-200:]!r}"
            self.buffer += data
        index = self.buffer.index(end) + len(end)
        taken, self.buffer = self.buffer[:index], self.buffer[index:]
        return taken

    def read_exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            data = self.socket.recv(1 << 16)
            assert data, "closed too early"
            self.buffer += data
        taken, self.buffer = self.buffer[:size], self.buffer[size:]
        return taken

    def read_chunk(self) -> bytes:
        """One HTTP chunk's data."""
        size = int(self.read_until(b"\r\n"), 16)
        return self.read_exactly(size + 2)[:-2]

    def read_to_end(self) -> bytes:
        """Whatever arrives until the connection is closed or broken off."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                self.buffer += data
        return self.buffer

    def read_reply(self) -> tuple[int, bytes]:
        head = self.read_until(b"\r\n\r\n")
        status = int(head.split()[1])
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while data := self.read_chunk():
                body += data
            return status, body
        return status, self.read_exactly(int(headers[b"content-length"]))


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"host: here", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def records(log_dir: Path) -> list[AnyRecord]:
    """All records of the one log in the folder, its first and last line left out."""
    (path,) = find_logs([str(log_dir)])
    found = [record for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]
    return found[1:-1]
