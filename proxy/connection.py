"""One connection to the upstream: an asyncio.Protocol around llhttp, one exchange at a time.

The bytes of a reply are handed on read by read. A reply is complete, or it is an error: a framing that is broken or cut
never looks like an end.
"""

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

import httptools
import httpx

from proxy.headers import HeaderList, get
from proxy.stepping import run

Forward = Callable[[bytes], Coroutine[Any, Any, None]]

HIGH_WATER = 1 << 16  # bytes read and not taken yet, at which reading pauses
MAX_OVERHEAD = 1 << 18  # bytes in a row that carry no body: a reply's head, chunk extensions, trailers, interim replies


class ClosedEarly(httpx.RemoteProtocolError):
    """The upstream closed the connection before its reply was complete."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None: no limit. None is over a whole request, nor by default could a long prefill meet one."""

    connect: float = 5.0  # until TCP and TLS are up
    write: float | None = 30.0  # in which the upstream takes no byte of an upload
    first_byte: float | None = None  # from the request's last byte to the reply's head
    idle: float | None = None  # between two reads of a reply's body
    # vLLM closes an idle connection after 5 s. A request sent at that very moment is lost, and to send it again might
    # generate twice, so connections are given up well before.
    pool: float = 2.0


class Connection(asyncio.Protocol):
    """Used by one request at a time: `send`, `head`, then `read` or `push`, then `reusable` or `abort`."""

    def __init__(self, timeouts: Timeouts, on_lost: Callable[["Connection"], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts, self._on_lost = timeouts, on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._readable = select.poll()
        self._drained: asyncio.Future[None] | None = None  # there while the upstream does not take what is written
        self._reading_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._last_read = 0.0
        self.lost = False
        self.idle_since = 0.0
        self._reset(head_only=False)
        self._complete = True  # no exchange yet: whatever arrives is not ours

    def _reset(self, *, head_only: bool) -> None:
        self._head = b""  # of the request, while it is not written
        self._head_only = head_only  # the request was HEAD: its reply has no body whatever its head says
        self._sent = False  # the request, wholly
        self._uploading: asyncio.Task[None] | None = None
        self.status = 0  # 0: the head is not complete
        self.headers: list[tuple[bytes, bytes]] = []
        self._ends_by_close = False
        self._complete = False
        self._keep_alive = False
        self._error: Exception | None = None
        self._overhead = 0
        self._read: list[bytes] = []  # body parts of the read that is being parsed
        self._parts: deque[bytes] = deque()  # reads nobody has taken yet
        self._queued = 0
        self._forward: Forward | None = None
        self._finishing: asyncio.Task[None] | None = None

    # -------------------------------------------------------------------------------------------- for the transport

    @property
    def alive(self) -> bool:
        """An idle connection on which something can be read has been closed, or is out of step."""
        return not self.lost and not self._transport.is_closing() and not self._readable.poll(0)

    @property
    def reusable(self) -> bool:
        """Only when it is sure that both sides are done with the exchange and nothing is left over."""
        usable = self._complete and self._keep_alive and self._sent
        return usable and not self.lost and not self._transport.is_closing()

    def send(self, head: bytes, body: AsyncIterable[bytes], length: int | None, *, head_only: bool) -> None:
        """Begin a request; its body goes out beside what follows. length: of the body, None: chunked.

        Raises what the beginning of `body` raises.
        """
        self._reset(head_only=head_only)
        self._resume_reading()
        self._head = head
        self._uploading = run(self._upload(body, length), self._loop, self.fail)
        self._write(b"")

    def _write(self, data: bytes) -> None:
        """Write the head together with what is there of the body: usually all of it, in one packet."""
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._transport.write(data)

    async def _upload(self, body: AsyncIterable[bytes], length: int | None) -> None:
        left = length or 0
        async for data in body:
            if self.lost or self._transport.is_closing():
                return  # whoever waits for the reply is told
            if not data:
                continue  # as a chunk it would be the last
            if length is None:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            elif (left := left - len(data)) < 0:
                raise httpx.LocalProtocolError("more body than the content-length says")
            self._write(data)
            if self._drained is not None:
                await self._drained
        if length is None:
            self._write(b"0\r\n\r\n")
        elif left:
            raise httpx.LocalProtocolError("less body than the content-length says")
        self._sent = True
        if self._timeouts.first_byte is not None and not self.status:
            self._watch(self._timeouts.first_byte, "no reply")

    async def head(self) -> None:
        """Wait for status and headers. Raises httpx.TransportError, or what the upload raised."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._news()

    async def read(self) -> bytes | None:
        """The body bytes of the next read; None: the reply is complete. Raises httpx.TransportError."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._complete:
                return None
            await self._news()
        return self._take()

    async def push(self, forward: Forward) -> None:
        """Hand each read's body bytes to `forward`, from within the read itself: no task is woken for it.

        Returns when the reply is complete. Where `forward` has to wait, reading does too. Raises as `read` and
        `forward` do.
        """
        try:
            while True:
                if self._finishing is not None:
                    await self._finishing
                while self._parts:
                    await forward(self._take())
                if self._complete or self._error is not None:
                    break
                self._forward = forward
                await self._news()
                self._forward = None
        finally:
            self._forward = None
            if (finishing := self._finishing) is not None:
                finishing.cancel()
                await asyncio.wait([finishing])  # so that nothing of this exchange happens after its end
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        """The exchange cannot go on."""
        if not self._complete and self._error is None:
            self._error = error
        self.abort()
        self._wake()

    def abort(self) -> None:
        """Close at once; what is not sent yet is not sent any more."""
        if self._uploading is not None:
            self._uploading.cancel()
        self._stop_watching()
        self._transport.abort()

    def drop(self) -> None:
        """The exchange has failed, and whoever began it knows. The error's traceback leads back here: a circle."""
        self.abort()
        self._error = None

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        data = self._parts.popleft()
        self._queued -= len(data)
        if not self._parts:
            self._resume_reading()
        return data

    # ------------------------------------------------------------------------------------------------- from asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        opened = transport.get_extra_info("socket")
        self._readable.register(opened.fileno(), select.POLLIN)
        # There may be no byte for hours, and no limit to it: the kernel has to find out that the other machine is gone.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort()  # belongs to no request, so the reply to the next one could not be trusted
            return
        if self._timer is not None:
            self._last_read = self._loop.time()
        self._overhead += len(data)
        had_head, broken = self.status, None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = _refusal(error)
        if self._read:
            self._overhead = 0
            self._deliver(self._read[0] if len(self._read) == 1 else b"".join(self._read))
            self._read.clear()
        if self._complete:
            self._stop_watching()
            self._keep_alive &= broken is None  # else there was more in this read than the reply
            self._wake()
        elif broken is not None:
            self.fail(broken)
        elif self._overhead > MAX_OVERHEAD:
            self.fail(httpx.RemoteProtocolError(f"more than {MAX_OVERHEAD} bytes of headers"))
        elif not had_head and self.status:
            self._stop_watching()
            if self._timeouts.idle is not None:
                self._watch(self._timeouts.idle, "nothing more")
            self._wake()

    def _deliver(self, data: bytes) -> None:
        if self._forward is None or self._finishing is not None:
            self._parts.append(data)
            self._queued += len(data)
            if self._queued > HIGH_WATER:
                self._pause_reading()
            self._wake()
            return
        try:
            self._finishing = run(self._forward(data), self._loop, self.fail, self._finished)
        except Exception as error:  # noqa: BLE001 -- raised again where `push` is awaited
            self.fail(error)
        else:
            if self._finishing is not None:
                self._pause_reading()

    def _finished(self) -> None:
        self._finishing = None
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._complete and self._transport.get_extra_info("sslcontext") is None:
            self._read_rest()
        self.lost = True
        self._stop_watching()
        if not self._complete and self._error is None:
            if exc is not None:
                self._error = httpx.ReadError(str(exc) or type(exc).__name__)
            elif self.status and self._ends_by_close:
                self._complete = True
            else:
                what = "in the middle of its reply" if self.status else "without a reply"
                self._error = ClosedEarly(f"the upstream closed the connection {what}")
        self.resume_writing()
        self._wake()
        self._on_lost(self)
        del self._parser  # which leads back here; a circle would stay in memory until the collector comes by

    def _read_rest(self) -> None:
        """A write failed, perhaps because the upstream had enough of the request, replied and closed. The kernel still
        holds what it sent; the event loop does not look."""
        with contextlib.suppress(OSError):
            while not self._complete and (data := os.read(self._transport.get_extra_info("socket").fileno(), 1 << 16)):
                self.data_received(data)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()
        if self._timeouts.write is not None:
            left = self._transport.get_write_buffer_size()
            self._write_timer = self._loop.call_later(
                self._timeouts.write, self._check_upload, left, self._timeouts.write
            )

    def _check_upload(self, left_before: int, limit: float) -> None:
        left = self._transport.get_write_buffer_size()
        if left < left_before:
            self._write_timer = self._loop.call_later(limit, self._check_upload, left, limit)
        else:
            self.fail(httpx.WriteTimeout(f"the upstream took no byte of the request for {limit:g} s"))

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None

    def _pause_reading(self) -> None:
        if not self._reading_paused and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _watch(self, limit: float, what: str) -> None:
        self._last_read = self._loop.time()
        self._timer = self._loop.call_later(limit, self._check_silence, limit, what)

    def _check_silence(self, limit: float, what: str) -> None:
        if self._reading_paused:  # it is the client that keeps us waiting
            self._last_read = self._loop.time()
        left = self._last_read + limit - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence, limit, what)
        else:
            self.fail(httpx.ReadTimeout(f"the upstream sent {what} for {limit:g} s, the proxy's limit"))

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------------------------------------- from llhttp

    def on_message_begin(self) -> None:
        if self._complete:
            raise httpx.RemoteProtocolError("bytes after the reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer, which ASGI cannot carry on
            self.headers.append((name.lower(), value.rstrip(b" \t")))  # llhttp strips the left side only

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101:
            raise httpx.RemoteProtocolError("the upstream switched protocols, which nobody asked for")
        if status < 200:
            self.headers.clear()  # 100 Continue and its like: the reply is still to come
            return
        framing = _framing(self.headers)
        self.status = status
        self._ends_by_close = framing is None
        if self._head_only:
            self._complete = True
            raise httpx.RemoteProtocolError("llhttp cannot be told that no body follows")  # so the connection is spent

    def on_body(self, data: bytes) -> None:
        self._read.append(data)

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # afterwards llhttp always says no


def _framing(headers: HeaderList) -> bytes | None:
    """What tells where the body ends; None: the end of the connection. Raises RemoteProtocolError."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        raise httpx.RemoteProtocolError(f"transfer-encoding {b', '.join(codings)!r} is not understood")
    return codings[0] if codings else get(headers, b"content-length")


def _refusal(error: Exception) -> httpx.RemoteProtocolError:
    cause = error.__context__
    return cause if isinstance(cause, httpx.RemoteProtocolError) else httpx.RemoteProtocolError(str(error))
