"""The running proxy: two ports, one log, one event loop; started and stopped in order."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry

from proxy.admin import build_admin
from proxy.app import ProxyApp
from proxy.config import Address, ProxyConfig
from proxy.front import FrontProtocol, watch_peers
from proxy.logs import keep_contents_out
from proxy.metrics import Counters, ProxyMetrics
from proxy.upstream import Upstream
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.logfile import LogWriter
from sparseety.records import Scope

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that it is they who close
CLOSING_SECONDS = 2.0  # for connections to take their last bytes, once all requests have ended


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    aborted: int  # requests broken off because they outlived the time to drain
    written: int
    lost: int


class Service:
    """Holds the sockets and the log from the beginning, so that what is wrong with them is said before it serves."""

    def __init__(self, config: ProxyConfig, *, clock: Clock, registry: CollectorRegistry) -> None:
        """Raises SparseetyError: a port is taken, the log folder cannot be written."""
        self._config = config
        self._draining = False
        with contextlib.ExitStack() as undo:
            self._sockets = [_listen(config.listen, "--listen"), _listen(config.admin, "--admin")]
            for opened in self._sockets:
                undo.callback(opened.close)
            scope = Scope(endpoints=["chat", "completions"], upstream=config.upstream, exclusive=config.exclusive)
            self.writer = LogWriter(config.log_dir, "proxy", scope, clock=clock)
            undo.pop_all()
        self.listen, self.admin = (Address(*opened.getsockname()[:2]) for opened in self._sockets)
        self.upstream = Upstream(config.upstream)
        self._counters = Counters()
        ProxyMetrics(registry, self._counters, self.writer)
        self._app = ProxyApp(self.upstream, self.writer, clock, self._counters)
        self._admin_app = build_admin(self.upstream, self.writer, registry, lambda: self._draining)

    async def run(
        self,
        stop: asyncio.Event,
        hurry: asyncio.Event,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[int], None] = lambda open_requests: None,
    ) -> Summary:
        """Serve until `stop`, let open requests end, close the log. `hurry` breaks off those that are open then."""
        keep_contents_out()
        # The admin port outlives the other, to say that the proxy drains. Only one of them runs the lifespan.
        front = _server(self._app, "on")
        admin = _server(self._admin_app, "off")
        front_task, admin_task = (
            asyncio.create_task(server.serve([opened]))
            for server, opened in zip((front, admin), self._sockets, strict=True)
        )
        aborted = 0
        try:
            await front.listening.wait()
            await admin.listening.wait()
            on_ready()
            await stop.wait()
            self._draining = True
            on_drain(self._app.relay.open_requests)
            front.should_exit = True
            aborted = await self._drain(front_task, hurry)
        finally:
            await _finish(front, front_task)
            await _finish(admin, admin_task)
            await self.upstream.aclose()
            self.writer.close()
        requests = self._counters.requests.total()
        return Summary(requests, aborted, self.writer.written, self.writer.lost)

    async def _drain(self, front: asyncio.Task[None], hurry: asyncio.Event) -> int:
        """Wait for the open requests, then break off the rest; returns how many those were."""
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait((front, hurried), timeout=self._config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        return 0 if front.done() else self._app.relay.abort()


def _server(app: object, lifespan: str) -> _Server:
    return _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=FrontProtocol,
            ws="none",
            lifespan=lifespan,  # type: ignore[arg-type]
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )


async def _finish(server: _Server, task: asyncio.Task[None]) -> None:
    """End a server whose requests have ended. A client that does not read its last bytes must not hold it up."""
    server.should_exit = True
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    server.force_exit = True
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _listen(address: Address, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        opened = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror
        if error.errno and not isinstance(error, socket.gaierror):
            reason = os.strerror(error.errno)  # the error's own words repeat the address
        raise SparseetyError(f"cannot listen on {address}: {reason}; choose another with {flag}") from None
    opened.setblocking(False)
    watch_peers(opened)
    return opened
