"""The fast way to the upstream: an httpx transport that passes on what it is given and nothing more.

A request goes out once. A connection from the pool that turns out to be closed is passed over before a byte is written;
after that nothing is ever sent again, for the server might generate twice.
"""

import asyncio
import ssl
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

import httpx

from proxy.connection import Connection, Forward, Timeouts
from proxy.headers import HeaderList


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply whose body is still on its way. Whoever has it closes its stream."""

    status: int
    headers: HeaderList  # as they came
    stream: httpx.AsyncByteStream


class Transport(httpx.AsyncBaseTransport):
    """HTTP/1.1 to one server, over connections that are kept for a short while."""

    def __init__(
        self, url: httpx.URL, *, timeouts: Timeouts | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """ssl_context: for https; None: the system's certificates, which include an operator's own."""
        self._host, self._tls = url.raw_host.decode("ascii"), url.scheme == "https"
        self._port = url.port or (443 if self._tls else 80)
        self._ssl = (ssl_context or ssl.create_default_context()) if self._tls else None
        self._timeouts = timeouts or Timeouts()
        self._idle: list[Connection] = []  # the one used last is at the end, and is used next
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """`exchange` as httpx's own client calls it."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        target = request.extensions.get("target", request.url.raw_path)
        reply = await self.exchange(request.method, target, request.headers.raw, request.stream)
        return httpx.Response(reply.status, headers=list(reply.headers), stream=reply.stream)

    async def exchange(self, method: str, target: bytes, headers: HeaderList, body: AsyncIterable[bytes]) -> Reply:
        """Returns when the reply's head is there. Raises httpx.TransportError, and what `body` raises."""
        head, length = _head(method, target, headers)
        connection = self._reuse() or await self._connect()
        try:
            connection.send(head, body, length, head_only=method == "HEAD")
            await connection.head()
        except BaseException:
            connection.drop()
            raise
        return Reply(connection.status, connection.headers, ReplyStream(self, connection))

    async def aclose(self) -> None:
        for connection in list(self._open):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _connect(self) -> Connection:
        limit, loop = self._timeouts.connect, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._timeouts, self._lost),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._host if self._tls else None,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {limit:g} s") from None
        except OSError as error:  # TLS errors among them
            raise httpx.ConnectError(str(error) or type(error).__name__) from error
        self._open.add(connection)
        return connection

    # ------------------------------------------------------------------------------------------------------ the pool

    def _reuse(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._timeouts.pool
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.alive:
                return connection
            connection.abort()
        return None

    def release(self, connection: Connection) -> None:
        """The exchange is over, in whatever way."""
        if not connection.reusable:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._timeouts.pool, self._sweep)

    def _sweep(self) -> None:
        """Close the connections that were idle for too long; those come first."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._timeouts.pool
        expired = next((i for i, kept in enumerate(self._idle) if kept.idle_since > oldest), len(self._idle))
        for connection in self._idle[:expired]:
            connection.abort()
        del self._idle[:expired]
        due = self._idle[0].idle_since - oldest if self._idle else None
        self._sweeper = None if due is None else loop.call_later(due, self._sweep)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class ReplyStream(httpx.AsyncByteStream):
    """A reply's body on its way. One item is what one read from the network brought."""

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection: Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert self._connection is not None
        while (data := await self._connection.read()) is not None:
            yield data

    async def push(self, forward: Forward) -> None:
        """As `async for data in self: await forward(data)`, without a task being woken for each read."""
        assert self._connection is not None
        await self._connection.push(forward)

    async def aclose(self) -> None:
        """Give the connection back, or break it off where its reply is not complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.release(connection)


def _head(method: str, target: bytes, headers: HeaderList) -> tuple[bytes, int | None]:
    """The bytes of a request's head as given, and the length of its body; None: it is chunked.

    Raises LocalProtocolError on what would not arrive as one request.
    """
    line = b"%b %b HTTP/1.1" % (method.encode("ascii"), target)
    lines, length, chunked = [line], 0, False
    for name, value in headers:
        lines.append(name + b": " + value)
        lowered = name.lower()
        if lowered == b"content-length":
            length = int(value)
        elif lowered == b"transfer-encoding":
            chunked = True
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    ends = len(lines) + 1
    if len(line.split()) != 3 or head.count(b"\n") != ends or head.count(b"\r") != ends:
        raise httpx.LocalProtocolError("white space where HTTP allows none")
    return head, None if chunked else length
