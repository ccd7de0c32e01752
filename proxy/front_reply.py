"""One reply as it goes out to a client: its head as it came, and the framing that this client's HTTP version needs."""

import asyncio
import functools
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from proxy.asgi import CLIENT, ClientState
from proxy.refusal import INTERNAL

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent

log = logging.getLogger("sparseety.proxy")

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger
_UNSAFE_NAME = re.compile(rb"[\x00-\x20:\x7f]")
_UNSAFE_VALUE = re.compile(rb"[\r\n\x00]")  # would end the field, and let the rest of it be another one


class ReplyCycle(RequestResponseCycle):
    """Replaces how uvicorn sends: nothing is added but the framing, HTTP/1.0 is served as HTTP/1.0."""

    def __init__(self, *, close_gently: Callable[[], None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._close_gently = close_gently
        self.client: ClientState = self.scope["state"][CLIENT]
        self._http10 = self.scope["http_version"] == "1.0"
        self._bodyless = self.scope["method"] == "HEAD"
        self._left: int | None = None  # bytes of the body still to come; None: no length was announced
        self._until_close = False  # the body ends where the connection does
        self._held = b""  # of the head: until the body's first part, or the event loop's next turn
        self.bytes_sent = 0

    async def run_asgi(self, app: "ASGI3Application") -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the server is being stopped
        except Exception as error:
            log.error("serving a request failed", exc_info=error)
        finally:
            if not self.response_complete and not self.disconnected:
                self._break_off()
            self.on_response = lambda: None

    def leave(self) -> None:
        """The client has left, or must be taken for it."""
        self.disconnected = True
        self.message_event.set()
        self.client.leave()

    def _break_off(self) -> None:
        """End the connection so that no client can take the reply for a complete one."""
        self.flush_head()
        if not self.response_started:
            self.transport.write(INTERNAL.reply())
        elif self._until_close:
            # An ordinary close would be this body's clean end.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.close()

    async def receive(self) -> "ASGIReceiveEvent":
        if self.body or not self.more_body:
            self.waiting_for_100_continue = False  # the client did not wait for it
        return await super().receive()

    async def send(self, message: "ASGISendEvent") -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.body" and self.response_started:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == "http.response.start" and not self.response_started:
            self._send_head(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']}")

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        lines = [STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status]
        says_close = False
        for name, value in headers:
            name = _lower(name)
            if _UNSAFE_VALUE.search(value):
                raise RuntimeError("a header of the reply cannot be sent")  # its content stays out of logs
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                says_close = says_close or b"close" in value.lower()
            lines += (name, b": ", value, b"\r\n")
        self._bodyless = self._bodyless or status in (204, 304) or status < 200
        if self._left is None and not self._bodyless:
            self._until_close = self._http10
            self.chunked_encoding = not self._http10
        if says_close or self._until_close or (self.waiting_for_100_continue and self.more_body):
            # A client that still waits to be asked for its body may send it or not: what follows would be ambiguous.
            self.keep_alive = False
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        elif self._http10 and self.keep_alive:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self.response_started = True
        self.waiting_for_100_continue = False
        # Most heads come in one read with the body, or its beginning, and then go out with it in one packet.
        self._held = b"".join(lines)
        asyncio.get_running_loop().call_soon(self.flush_head)

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.response_complete:
            raise RuntimeError("a body after the reply's end")
        if self._bodyless:
            body = b""
        elif self.chunked_encoding:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("a body of another length than was announced")
        if body or not more:
            self._write(body)
        if not more:
            self._finish()

    def flush_head(self) -> None:
        if self._held and not self.transport.is_closing():
            self._write(b"")

    def _write(self, data: bytes) -> None:
        """Together with the head, if that is still here."""
        if self._held:
            data, self._held = self._held + data, b""
        if data:
            self.bytes_sent += len(data)
            self.transport.write(data)

    def _finish(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            if self.more_body:
                self._close_gently()
            else:
                self.transport.close()
        self.on_response()


@functools.lru_cache(maxsize=1024)
def _lower(name: bytes) -> bytes:
    """Of a header. Raises RuntimeError on one that cannot be sent."""
    if _UNSAFE_NAME.search(name):
        raise RuntimeError("a header of the reply cannot be sent")
    return name.lower()
