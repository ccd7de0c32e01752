"""The way to the server behind: one httpx transport, given raw requests so that nothing is added to them."""

import asyncio
import ssl
from collections.abc import AsyncIterator

import httpx

from proxy.headers import HeaderList
from sparseety.records import Outcome

CONNECT_SECONDS = 5.0
WRITE_SECONDS = 30.0  # a server that takes no byte of a request for so long is stuck; replies may take any time

# vLLM closes an idle connection after 5 s. A request sent at that very moment is lost, and to send it again might
# generate twice, so connections are given up well before.
IDLE_SECONDS = 2.0

# httpx queues what exceeds its limits, and counts busy connections among the idle ones it keeps: both must be high.
_LIMITS = httpx.Limits(max_connections=1_000_000, max_keepalive_connections=1_000_000, keepalive_expiry=IDLE_SECONDS)

_TIMEOUT = {"connect": CONNECT_SECONDS, "write": WRITE_SECONDS, "read": None, "pool": None}


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
        self, url: str, transport: httpx.AsyncBaseTransport | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._url = httpx.URL(url)
        # The system's certificates, for they include an operator's own; none are loaded for plain http.
        verify = (ssl_context or ssl.create_default_context()) if self._url.scheme == "https" else False
        self._transport = transport or httpx.AsyncHTTPTransport(
            verify=verify, retries=0, limits=_LIMITS, trust_env=False
        )
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
            extensions={"target": target, "timeout": _TIMEOUT},
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
    return "upstream_broken", message
