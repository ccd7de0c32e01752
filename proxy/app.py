"""The ASGI application of port 9000: wholly the upstream's, without a path of its own."""

from proxy.asgi import Receive, Scope, Send
from proxy.catalogue import REFUSED
from proxy.recording import Recorder
from proxy.relay import Relay
from proxy.upstream import Upstream


class ProxyApp:
    """Raw ASGI: a framework would answer some paths itself, and would re-emit what it relays."""

    def __init__(self, upstream: Upstream, recorder: Recorder) -> None:
        self.upstream, self._counters = upstream, recorder.counters
        self.relay = Relay(upstream, recorder, recorder.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.relay(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    def refused(self, code: str) -> None:
        """The front has answered a request itself."""
        self._counters.add(1, REFUSED, code)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.upstream.aclose()
        await send({"type": "lifespan.shutdown.complete"})
