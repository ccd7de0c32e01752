"""The way to the server behind: one httpx transport, given raw requests so that nothing is added to them."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator

import httpx

from proxy.connection import ClosedEarly, Timeouts
from proxy.headers import HeaderList
from proxy.transport import Reply, Transport
from sparseety.records import Outcome

FRESH_SECONDS = 5.0  # how old the answer of a probe may be, as told to others


class _Body(httpx.AsyncByteStream):
    def __init__(self, data: AsyncIterator[bytes]) -> None:
        self._data = data

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._data


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


class Upstream:
    """Sends requests to one server and returns replies whose body is still on its way."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        ssl_context: ssl.SSLContext | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """transport: another than the project's own, such as httpx's, with which tests compare it.

        ssl_context: for https; None: the system's certificates.
        """
        self._url = httpx.URL(url)
        self._transport = transport or Transport(self._url, timeouts=timeouts, ssl_context=ssl_context)
        self.authority = self._url.netloc

    async def send(self, method: str, target: bytes, headers: HeaderList, body: AsyncIterator[bytes]) -> Reply:
        """Returns when the reply's head is there. Raises httpx.TransportError.

        The project's own transport is spared httpx's request and response, which cost a third of a short request.
        """
        if isinstance(self._transport, Transport):
            return await self._transport.exchange(method, target, headers, body)
        # A request that is given a stream, handed straight to a transport, goes out as it stands: httpx's client above
        # it would add headers of its own and normalise the target.
        response = await self._transport.handle_async_request(
            httpx.Request(method, self._url, headers=list(headers), stream=_Body(body), extensions={"target": target})
        )
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return Reply(response.status_code, [(n.lower(), value) for n, value in response.headers.raw], response.stream)

    async def trouble(self, seconds: float = 2.0) -> str | None:
        """Why requests would fail now; None: the server answers. Other servers than vLLM may have no /health."""
        try:
            async with asyncio.timeout(seconds):
                reply = await self.send("GET", b"/health", [(b"host", self.authority)], nothing())
                await reply.stream.aclose()
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except httpx.TransportError as error:
            return explain(error)[1]
        return f"/health says {reply.status}" if reply.status >= 500 else None

    async def aclose(self) -> None:
        await self._transport.aclose()


class Probe:
    """Asks one upstream how it is, and remembers the answer."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.up: bool | None = None  # None: it was never asked
        self._asked = -FRESH_SECONDS

    async def trouble(self) -> str | None:
        """As the upstream's own."""
        trouble = await self._upstream.trouble()
        self.up, self._asked = trouble is None, time.monotonic()
        return trouble

    async def refresh(self) -> None:
        """See that the answer is no older than a moment."""
        if time.monotonic() - self._asked > FRESH_SECONDS:
            await self.trouble()


def error_type(error: httpx.TransportError) -> str | None:
    """What kind of failure of the upstream it is, as a metric's label; None: it is this side's fault."""
    match error:
        case httpx.ConnectError() if isinstance(error.__cause__, ssl.SSLError):
            return "tls"
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "connect"
        case httpx.ReadTimeout():
            return "read_timeout"
        case httpx.WriteTimeout():
            return "write_timeout"
        case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
            return None
        case httpx.NetworkError() | ClosedEarly():
            return "reset"
        case _:
            return "protocol"


def explain(error: httpx.TransportError) -> tuple[Outcome, str]:
    """Which ending an error of the upstream connection is, and what to say of it."""
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "upstream_unreachable", message
    if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
        return "internal_error", message  # this side made a request that HTTP does not allow
    if isinstance(error, httpx.TimeoutException):
        return "upstream_timeout", message
    return "upstream_broken", message
