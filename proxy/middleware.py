"""The capture inside the server: `vllm serve --middleware proxy.middleware.Capture`.

The same records as the proxy's, without a hop, and blind to the network before it: what is recorded is what the
application was given and what it sent. Any ASGI application can be wrapped. SPARSEETY_PROXY_LOG_DIR says where the log
goes; without it nothing is recorded. Imports what the capture needs, and nothing that serves or calls.
"""

import asyncio
import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy.asgi import App, Message, Receive, Scope, Send
from proxy.capture import ENDPOINTS, RequestHead
from proxy.counters import Counters
from proxy.recording import Recorder, Recording
from sparseety import records
from sparseety.clock import Clock, monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import Outcome

log = logging.getLogger("sparseety.proxy")

LOG_DIR = "SPARSEETY_PROXY_LOG_DIR"


class Capture:
    """Wraps an ASGI application. Every message passes unchanged, and what is raised is the application's.

    An application that raises is recorded as broken off: what a server in front may answer then is not seen here.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._clock = monotonic_clock()
        self._counters = Counters()
        self._writer: LogWriter | None = None
        self._recorder: Recorder | None = None
        try:
            _show_our_lines()
            self._open()
        except Exception as error:  # noqa: BLE001 -- the server must come up whatever is wrong with the recording
            reason = str(error) if isinstance(error, SparseetyError) else repr(error)
            log.error("sparseety: nothing is recorded: %s", reason)

    def _open(self) -> None:
        folder = os.environ.get(LOG_DIR)
        if not folder:
            log.warning("sparseety: nothing is recorded: %s is not set", LOG_DIR)
            return
        scope = records.Scope(endpoints=list(ENDPOINTS.values()), mounting="middleware")
        self._writer = LogWriter(Path(folder), "proxy", scope, clock=self._clock)
        self._recorder = Recorder(self._writer, self._clock, self._counters)
        self._pid = os.getpid()
        atexit.register(self._close)  # for a server that is stopped without its lifespan being ended
        log.warning("sparseety: requests and replies, their text included, are recorded in %s", self._writer.path)

    def _close(self) -> None:
        if self._recorder is None or self._writer is None or os.getpid() != self._pid:
            return  # a fork's copy must not end the file of another
        self._recorder.flush()
        self._writer.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._recorder is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(self._recorder, scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, self._closing_after(send))
        else:  # websocket: none of our endpoints
            await self._app(scope, receive, send)

    async def _http(self, recorder: Recorder, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(recorder.begin(_head(scope)), receive, send, self._clock)
        error: str | None = None
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            exchange.cancelled = True
            raise
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            outcome = exchange.outcome
            exchange.recording.ended(outcome, error if outcome == "upstream_broken" else None)

    def _closing_after(self, send: Send) -> Send:
        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await asyncio.to_thread(self._close)
            await send(message)

        return closing


class _Exchange:
    """One request and its reply, as they pass."""

    def __init__(self, recording: Recording, receive: Receive, send: Send, clock: Clock) -> None:
        self.recording = recording
        self._receive, self._send, self._clock = receive, send, clock
        self._body_over = False  # the request's
        self._complete = False  # the reply's last part was sent
        self._gone = False  # the client left before that
        self.cancelled = False

    @property
    def outcome(self) -> Outcome:
        """How it ended. A reply that the application leaves unfinished, the server in front breaks off."""
        if self._gone:
            return "client_gone"
        if self._complete:
            return "complete"
        return "shutdown" if self.cancelled else "upstream_broken"

    async def receive(self) -> Message:
        message = await self._receive()
        self._tap(self._received, message, 0.0)
        return message

    async def send(self, message: Message) -> None:
        at = self._clock()
        try:
            await self._send(message)
        except OSError:  # ASGI 2.4: how a server says that the client has left
            self._gone = True
            raise
        finally:
            self._tap(self._sent, message, at)

    def _tap(self, read: Callable[[Message, float], None], message: Message, at: float) -> None:
        try:
            read(message, at)
        except Exception as error:  # noqa: BLE001 -- an odd message is between the application and its server
            log.error("sparseety: an ASGI message could not be read: %r", error)

    def _received(self, message: Message, at: float) -> None:
        if message["type"] == "http.disconnect":
            self._gone = self._gone or not self._complete  # ASGI says "disconnect" after a complete reply too
        elif message["type"] == "http.request" and not self._body_over:
            if data := message.get("body"):
                self.recording.request_body(bytes(data))
            if not message.get("more_body", False):
                self._body_over = True
                self.recording.request_ended()

    def _sent(self, message: Message, at: float) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            self.recording.reply_head(message["status"], headers, at)
        elif message["type"] == "http.response.body":
            if data := message.get("body"):
                self.recording.reply_body(bytes(data), at)
            self._complete = self._complete or (not message.get("more_body", False) and not self._gone)
        elif message["type"] == "http.response.pathsend":
            self._complete = not self._gone


def _show_our_lines() -> None:
    """vLLM gives handlers to its own logger alone: without them, what we and the log writer have to say is not seen."""
    ours, theirs = logging.getLogger("sparseety"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)


def _head(scope: Scope) -> RequestHead:
    """The path as the application matches it: without the prefix that it is mounted under."""
    path: str = scope["path"]
    root: Any = scope.get("root_path") or ""
    path = path.removeprefix(root) if root else path
    return RequestHead(scope["method"], path, scope["headers"], scope.get("query_string", b""))
