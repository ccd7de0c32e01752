"""The way to the server behind: one httpx transport, given raw requests so that nothing is added to them."""

import asyncio
import ssl
from collections.abc import AsyncIterator

import httpx

from proxy.connection import Timeouts
from proxy.headers import HeaderList
from proxy.transport import Transport
from sparseety.records import Outcome


class _Body(httpx.AsyncByteStream):
    def __init__(self, data: AsyncIterator[bytes]) -> None:
        self._data = data

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._data


async def _nothing() -> AsyncIterator[bytes]:
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

    async def send(self, method: str, target: bytes, headers: HeaderList, body: AsyncIterator[bytes]) -> httpx.Response:
        """Returns when the reply's head is there; the caller then reads `.stream` and closes it. Raises TransportError.

        An httpx.Request that is given a stream, handed straight to a transport, goes out as it stands: the client
        above it would add headers of its own and normalise the target.
        """
        request = httpx.Request(
            method,
            self._url,
            headers=list(headers),
            stream=_Body(body),
            extensions={"target": target},
        )
        return await self._transport.handle_async_request(request)

    async def trouble(self, seconds: float = 2.0) -> str | None:
        """Why requests would fail now; None: the server answers. Other servers than vLLM may have no /health."""
        try:
            async with asyncio.timeout(seconds):
                response = await self.send("GET", b"/health", [(b"host", self.authority)], _nothing())
                await response.aclose()
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except httpx.TransportError as error:
            return explain(error)[1]
        return f"/health says {response.status_code}" if response.status_code >= 500 else None

    async def aclose(self) -> None:
        await self._transport.aclose()


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
