"""Relay one request: bytes first, records after. The shell around the capture."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import httpx

from proxy.asgi import CLIENT, ClientState, Message, Receive, Scope, Send
from proxy.capture import RequestHead
from proxy.catalogue import UPSTREAM_ERRORS
from proxy.headers import HeaderList, end_to_end, for_upstream
from proxy.recording import Recorder, Recording
from proxy.transport import ReplyStream
from proxy.upstream import Upstream, error_type, explain
from sparseety.clock import Clock
from sparseety.records import Outcome

log = logging.getLogger("sparseety.proxy")

# What the proxy answers where the upstream gave no reply: status, and the words for it.
_REFUSALS: dict[Outcome, tuple[int, str]] = {
    "upstream_unreachable": (502, "the upstream cannot be reached"),
    "upstream_broken": (502, "the upstream broke off before it replied"),
    "upstream_timeout": (504, "the upstream kept the proxy waiting for too long"),
    "internal_error": (500, "the proxy failed on this request"),
    "shutdown": (503, "the proxy is shutting down"),
}

Ending = tuple[Outcome, str | None]
"""How a request ended, and what broke."""


class ClientGone(Exception):
    pass


class Client:
    """The client's side of one request, as ASGI and the front show it."""

    def __init__(self, state: ClientState, receive: Receive, send: Send) -> None:
        self._state, self._receive, self._send = state, receive, send
        self.replied = False  # the head of a reply has been sent

    @property
    def gone(self) -> bool:
        """It left before its reply was complete."""
        return self._state.left

    @property
    def received(self) -> float | None:
        """When its last byte came, by the monotonic clock."""
        return self._state.received

    def watch(self, on_leave: Callable[[], object]) -> None:
        """Call this as soon as the client leaves, though the upstream may take nothing and send nothing.

        Raises ClientGone where it has left already.
        """
        if self.gone:
            raise ClientGone
        self._state.on_leave = on_leave

    def unwatch(self) -> None:
        self._state.on_leave = None

    async def next_part(self) -> Message:
        """The next part of the request's body. Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def start(self, status: int, headers: HeaderList) -> Awaitable[None]:
        self.replied = True
        return self._send({"type": "http.response.start", "status": status, "headers": headers})

    def forward(self, data: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self, data: bytes = b"") -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def refuse(self, outcome: Outcome, detail: str | None) -> None:
        """Answer in the upstream's stead, in OpenAI's form and with a header that says whose answer it is."""
        status, words = _REFUSALS[outcome]
        message = f"{words}: {detail}" if detail else words
        error = {"message": message, "type": outcome, "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-sparseety-error", outcome.encode()),
        ]
        await self.start(status, headers)
        await self.finish(body)


class _Body:
    """The request's body as it arrives, recorded when it has been sent on. Iteration raises ClientGone.

    Not a generator: the event loop keeps a list of those, which costs more than this one does.
    """

    def __init__(self, client: Client, recording: Recording) -> None:
        self._client, self._recording = client, recording
        self._part = b""  # that is being sent on
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._part:
            self._recording.request_body(self._part)
            self._part = b""
        while not self._over:
            message = await self._client.next_part()
            self._over = not message.get("more_body", False)
            self._part = message.get("body", b"")
            if self._part:
                return self._part
        received = self._client.received
        self._recording.request_ended(0.0 if received is None else time.monotonic() - received)
        raise StopAsyncIteration


class Relay:
    """Relays requests to one upstream. An ASGI callable for scopes of type http."""

    def __init__(self, upstream: Upstream, recorder: Recorder, clock: Clock) -> None:
        self._upstream, self._recorder, self._clock = upstream, recorder, clock
        self._open: set[asyncio.Task[None]] = set()

    def abort(self) -> int:
        """Break off the requests that are still open; returns how many. Each ends with outcome `shutdown`."""
        for task in self._open:
            task.cancel()
        return len(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._relay(scope, Client(scope["state"][CLIENT], receive, send), task)
        finally:
            self._open.discard(task)

    async def _relay(self, scope: Scope, client: Client, task: asyncio.Task[None]) -> None:
        head = RequestHead(scope["method"], scope["path"], scope["headers"], scope.get("query_string", b""))
        recording = self._recorder.begin(head)
        ending: Ending = ("internal_error", None)
        try:
            client.watch(task.cancel)
            ending = await self._exchange(scope, client, recording)
        except ClientGone:
            ending = ("client_gone", None)
        except asyncio.CancelledError:
            ending = ("shutdown", None)  # not raised again: the reply is broken off, or refused, by what follows
        except Exception as error:
            log.exception("relaying %s %s failed", head.method, head.path)
            ending = ("internal_error", type(error).__name__)
        finally:
            client.unwatch()
            try:
                if not client.gone and not client.replied:
                    await client.refuse(*ending)
            finally:
                outcome, broken = ("client_gone", None) if client.gone else ending
                recording.ended(outcome, broken)
        # A reply that was begun and not finished: to return now makes the server in front break off the connection.
        # The client must not take it for a complete one.

    async def _exchange(self, scope: Scope, client: Client, recording: Recording) -> Ending:
        """Send the request, pass the reply on. Each read is forwarded at once, and recorded when it is on its way."""
        headers = for_upstream(scope["headers"], self._upstream.authority)
        try:
            reply = await self._upstream.send(scope["method"], _target(scope), headers, _Body(client, recording))
        except httpx.TransportError as error:
            return self._failed(error)
        received = self._clock()

        async def pass_on(data: bytes) -> None:
            received = self._clock()
            try:
                await client.forward(data)
            finally:
                recording.reply_body(data, received)  # it was received, even if the client did not wait for it

        stream = reply.stream
        try:
            await client.start(reply.status, end_to_end(reply.headers))
            recording.reply_head(reply.status, reply.headers, received)
            if isinstance(stream, ReplyStream):
                await stream.push(pass_on)
            else:
                async for data in stream:
                    await pass_on(data)
        except httpx.TransportError as error:
            return self._failed(error)
        finally:
            await stream.aclose()
        await client.finish()
        return "complete", None

    def _failed(self, error: httpx.TransportError) -> Ending:
        if kind := error_type(error):
            self._recorder.counters.add(1, UPSTREAM_ERRORS, kind)
        return explain(error)


def _target(scope: Scope) -> bytes:
    """The request's target as it came."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path
