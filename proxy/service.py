"""The running proxy: two ports, started and stopped in order. One worker runs in this process, several in their own."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry

from proxy.admin import build_admin
from proxy.config import ProxyConfig
from proxy.counters import Overview
from proxy.metrics import ProxyMetrics
from proxy.serving import finish, first, listen, listen_all, serving
from proxy.upstream import Probe
from proxy.values import Address
from proxy.worker import Summary, Worker, build_upstream
from proxy.workers import Fleet
from sparseety.clock import Clock


class Relaying(Protocol):
    """What serves the clients: a worker in this process, or several in their own."""

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, listening: asyncio.Event) -> Summary:
        """Serve until `stop`, let open requests end, close the log. `hurry` breaks off those that are open then."""

    async def look(self, *, streams: bool = False) -> Overview:
        """How things are now, as far as the workers say it within a moment."""

    def overview(self) -> Overview:
        """How they were when last looked at."""


class Service:
    """Holds the sockets and the log from the beginning, so that what is wrong with them is said before it serves."""

    def __init__(self, config: ProxyConfig, *, clock: Clock, registry: CollectorRegistry) -> None:
        """Raises SparseetyError: a port is taken, the log folder cannot be written."""
        self._config = config
        self.draining = False
        with contextlib.ExitStack() as undo:
            fronts = listen_all(config.listen, "--listen", config.workers)
            for opened in fronts:
                undo.callback(opened.close)
            self._admin_socket = undo.enter_context(listen(config.admin, "--admin"))
            self._relaying: Relaying
            if config.workers == 1:
                worker = Worker(config, fronts[0], clock=clock)
                self.writer, self.upstream, self._relaying = worker.writer, worker.upstream, worker
            else:
                self.writer, self.upstream, self._relaying = None, build_upstream(config), Fleet(config, fronts)
            undo.pop_all()
        self.listen, self.admin = (Address(*each.getsockname()[:2]) for each in (fronts[0], self._admin_socket))
        self._probe = Probe(self.upstream)
        metrics = ProxyMetrics(registry, self.overview, capture=config.capture, upstream_up=lambda: self._probe.up)
        token = config.admin_token.get_secret_value() if config.admin_token else None
        self._admin_app = build_admin(self, self._probe, metrics, token)

    async def look(self, *, streams: bool = False) -> Overview:
        return await self._relaying.look(streams=streams)

    def overview(self) -> Overview:
        return self._relaying.overview()

    async def run(
        self,
        stop: asyncio.Event,
        hurry: asyncio.Event,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[int], None] = lambda open_requests: None,
    ) -> Summary:
        """Serve until `stop`; then not ready, a delay, and the end of `Relaying.run`."""
        close, listening = asyncio.Event(), asyncio.Event()
        relaying = asyncio.create_task(self._relaying.run(close, hurry, listening))
        # The admin port outlives the other, to say that the proxy drains.
        admin = serving(self._admin_app, "off")
        admin_task = asyncio.create_task(admin.serve([self._admin_socket]))
        try:
            await first(listening, relaying)
            await first(admin.listening, admin_task)
            on_ready()
            await first(stop, relaying)
            self.draining = True
            on_drain((await self.look()).open_requests)
            with contextlib.suppress(TimeoutError):  # so that balancers see that it is not ready, and stop sending
                await asyncio.wait_for(hurry.wait(), self._config.drain_delay)
            close.set()
            return await relaying
        finally:
            close.set()
            await asyncio.gather(relaying, return_exceptions=True)
            await finish(admin, admin_task)
            await self.upstream.aclose()
