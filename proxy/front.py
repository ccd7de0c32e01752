"""The side that clients connect to: uvicorn's httptools protocol, put right where it falls short.

What is not one HTTP/1.x request in one unambiguous framing is refused here and never reaches the relay: the parser
(llhttp, in its strict mode) refuses conflicting lengths, bad chunking, bare CR and LF, obs-fold and control characters;
the checks of this module refuse the rest.
"""

import asyncio
import logging
import socket
import time
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.asgi import CLIENT, ClientState
from proxy.front_reply import ReplyCycle
from proxy.headers import get
from proxy.refusal import INTERNAL, Refusal

log = logging.getLogger("sparseety.proxy")


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """None of them touches a body: an upload may be as large and as slow as it likes."""

    head_seconds: float = 15.0  # from a request's first byte to its last header
    head_bytes: int = 64 << 10  # request line and headers; also trailers, and what stands between two chunks' data
    head_fields: int = 1000
    half_closed_seconds: float = 0.5  # see eof_received
    linger_seconds: float = 2.0  # how long a refused client may go on sending before the connection is closed


_BAD_REQUEST = Refusal(400, "bad_request", "this is no valid HTTP/1.1 request")
_HEAD_TOO_LARGE = Refusal(431, "headers_too_large", "the request's line and headers are larger than the proxy accepts")
_HEAD_TOO_LATE = Refusal(408, "request_timeout", "the request's headers did not arrive in time")
_TWO_HOSTS = Refusal(400, "bad_request", "the request has more than one Host header")
_CODING_IN_10 = Refusal(400, "bad_request", "HTTP/1.0 has no Transfer-Encoding")
_CODING = Refusal(501, "not_implemented", "the proxy takes request bodies in no other Transfer-Encoding than chunked")
_METHOD = Refusal(501, "not_implemented", "the proxy does not know this method")
_CONNECT = Refusal(501, "not_implemented", "the proxy opens no tunnels: CONNECT is not for it")
_WEBSOCKET = Refusal(501, "not_implemented", "the proxy does not pass WebSocket connections; connect to the server")
_VERSION = Refusal(505, "http_version", "the proxy speaks HTTP/1.1 and HTTP/1.0")


class _Refused(Exception):
    """Leaves a parser's callback."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


@runtime_checkable
class CountsRefusals(Protocol):
    """An application that wants to know what never reached it."""

    def refused(self, code: str) -> None: ...


def watch_peers(listener: socket.socket) -> None:
    """Let the kernel find out clients that vanished without a word; accepted connections inherit this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if option := getattr(socket, name, None):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


class FrontProtocol(HttpToolsProtocol):
    """One client connection."""

    limits = FrontLimits()
    cycle: ReplyCycle | None  # type: ignore[assignment]  # of the newest request

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self.config.app  # without the wrapping by which uvicorn logs whole messages
        self._in_head = self._in_body = False  # of a request that is arriving
        self._overhead = 0  # bytes received since the last byte of a body, or since the request began
        self._ignore_upgrade = False  # the request asks for another protocol and gets its answer in this one
        self._refusal: Refusal | None = None  # waits for the replies before it
        self._closing = False  # nothing that arrives matters any more
        self._head_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None  # by the loop's clock; None: it is not idle
        self._active: ReplyCycle | None = None  # the request that has been handed on last; newer ones wait

    # ------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        if self._close_timer:
            self._close_timer.cancel()
        if self._active and not self._active.response_complete:  # uvicorn tells the newest request, and no relay
            self._active.leave()
        super().connection_lost(exc)
        # Both lead back here; a circle would stay in memory until the collector comes by.
        self.cycle = self._active = None
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._idle_since = None
        self._in_head = self._in_head or not self._in_body
        self._overhead += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
            return
        if self._overhead > self.limits.head_bytes:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        elif self._idle and not self._in_head:
            self._await_request()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._ignore_upgrade:
                raise  # cannot be: on_headers_complete has refused it
            self._feed_again(data[upgrade.args[0] :])

    def _feed_again(self, rest: bytes) -> None:
        """RFC 9110 7.8: a server may ignore Upgrade. The parser cannot, and would take the body for another protocol.

        Java's HttpClient asks each plain http server for h2c with its first request.
        """
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._ignore_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join([*head, b"", b""]) + rest)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Whether it still reads cannot be told until something is written to it.

        One that closed its socket answers a write with a reset; one that only half-closed it gets its reply. Where
        nothing could be written for a moment, it counts as gone, as it does for vLLM at once: the tokens it asked for
        cost somebody's GPU.
        """
        if self._in_body or self._active is None or self.cycle is None or self._active.response_complete:
            return False
        if not self._refusal:  # which is the last thing to be sent, and closes
            self.cycle.keep_alive = False
        self._closing = True
        self._stop_head_timer()
        self._check_later(self._active, self._active.bytes_sent)
        return True

    def _check_later(self, cycle: ReplyCycle, sent: int) -> None:
        self._close_timer = self.loop.call_later(self.limits.half_closed_seconds, self._check, cycle, sent)

    def _check(self, cycle: ReplyCycle, sent: int) -> None:
        """`sent`: how much of the cycle's reply had been written when the client ended its side."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        nothing_written = self._active is cycle and cycle.bytes_sent == sent
        if nothing_written or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._check_later(cycle, sent)

    @property
    def _idle(self) -> bool:
        """No reply is due."""
        return self._active is None or self._active.response_complete

    def _start(self, cycle: ReplyCycle) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _stop_head_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_request(self) -> None:
        """Close the connection where none comes in time. One timer serves many waits, which spares to set one each."""
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idleness(self.timeout_keep_alive)

    def _watch_idleness(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._check_idleness)

    def _check_idleness(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # busy: the next wait sets a timer again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._watch_idleness(left)
        else:
            self.timeout_keep_alive_handler()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:  # it is this side that does not read
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        else:
            self._refuse(_HEAD_TOO_LATE)

    # ------------------------------------------------------------------------------------- what the parser found

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_head, self._overhead = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: it is no header, and ASGI has no place for it
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._check_head()
        if self._ignore_upgrade:
            return
        self._in_head, self._in_body, self._overhead = False, True, 0
        self._stop_head_timer()
        self.cycle = self._new_cycle()
        if self._idle:
            self._start(self.cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _check_head(self) -> None:
        """Raises _Refused. The order counts: what is said should be the reason that comes first."""
        version = self.parser.get_http_version()
        size, hosts, codings = len(self.url), 0, []
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value.lower())
        if size > self.limits.head_bytes or len(self.headers) > self.limits.head_fields:
            raise _Refused(_HEAD_TOO_LARGE)
        if version not in ("1.0", "1.1"):
            raise _Refused(_VERSION)
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(_CONNECT)
        if self.parser.should_upgrade():
            if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in self.headers):
                raise _Refused(_WEBSOCKET)
            self._ignore_upgrade = True
        if hosts > 1:
            raise _Refused(_TWO_HOSTS)
        if codings and version == "1.0":
            raise _Refused(_CODING_IN_10)
        if codings and codings != [b"chunked"]:
            raise _Refused(_CODING)

    def _new_cycle(self) -> ReplyCycle:
        version = self.parser.get_http_version()
        path, _, query = self.url.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "path": unquote(_path(self.url)),
            # The target as it came is raw_path, and ? and the query where there is one: "/x?" has an empty one, and
            # keeps its question mark in here.
            "raw_path": path if query else self.url,
            "query_string": query,
            "headers": self.headers,
            "state": {**self.app_state, CLIENT: ClientState()},
        }
        expects = (get(self.headers, b"expect") or b"").lower() == b"100-continue"
        return ReplyCycle(
            close_gently=self._close_gently,
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=expects and version == "1.1",
            keep_alive=self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._ignore_upgrade:
            return  # it comes again
        self._in_body, self._overhead = False, 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.client.received = time.monotonic()
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # --------------------------------------------------------------------------------------------------- refusing

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start(self.pipeline.pop()[0])  # type: ignore[arg-type]
        elif self._refusal:
            self._answer(self._refusal)
        else:
            self._await_request()

    def _refuse(self, refusal: Refusal) -> None:
        """Nothing more is read from this client. Its earlier requests get their replies first."""
        log.debug("refused a request: %s", refusal.code)
        if isinstance(self.app, CountsRefusals):
            self.app.refused(refusal.code)
        self._closing = True
        self._stop_head_timer()
        broken = self.cycle if self._in_body else None  # the request that went wrong inside its body
        if broken is not None and broken is self._active:
            self._break(broken, refusal)
            return
        if broken is not None:
            self.pipeline.popleft()  # it waited for its turn
            self._in_body = False
        if self._idle:
            self._answer(refusal)
        else:
            self._refusal = refusal

    def _break(self, cycle: ReplyCycle, refusal: Refusal) -> None:
        if cycle.response_complete:
            self._close_gently()
            return
        cycle.leave()  # for the relay: it must break off what it sent upstream
        if cycle.response_started:
            cycle.flush_head()
            self.transport.close()
        else:
            self._answer(refusal)

    def _answer(self, refusal: Refusal) -> None:
        self.transport.write(refusal.reply())
        self._close_gently()

    def _close_gently(self) -> None:
        """To close a socket with bytes unread resets the connection, and the reply might be lost on its way."""
        self._closing = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._close_timer = self.loop.call_later(self.limits.linger_seconds, self.transport.close)


def _refusal_of(error: httptools.HttpParserError) -> Refusal:
    if isinstance(error.__context__, _Refused):
        return error.__context__.refusal
    if isinstance(error, httptools.HttpParserCallbackError):
        log.error("taking a request failed", exc_info=error.__context__)
        return INTERNAL
    return _METHOD if isinstance(error, httptools.HttpParserInvalidMethodError) else _BAD_REQUEST


def _path(target: bytes) -> str:
    """The part of a request's target by which the server behind finds its endpoint: no query, host or credentials."""
    try:
        return (httptools.parse_url(target).path or b"").decode("latin-1")
    except httptools.HttpParserInvalidURLError:
        return ""
