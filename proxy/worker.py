"""One process that relays: its log, its connections upstream, its counters; served until it is told to stop."""

import asyncio
import socket
import ssl

import msgspec

from proxy.app import ProxyApp
from proxy.capture import ENDPOINTS, Limits
from proxy.config import ProxyConfig
from proxy.counters import Counters, LiveStream, Overview, Report, overview_of
from proxy.logs import keep_contents_out
from proxy.protect import Guard, Thresholds, watch
from proxy.recording import Recorder
from proxy.serving import finish, first, serving
from proxy.upstream import Upstream
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import Scope
from sparseety.segments import Rotation

LOG_CLOSING_SECONDS = 10.0  # for the disk to take the rest of the log
HURRIED_SECONDS = 1.0  # the same, after the second signal


class Summary(msgspec.Struct, frozen=True):
    counters: Counters
    broken: list[LiveStream]  # requests broken off because they outlived the time to drain
    log_closed: bool = True  # False: the disk did not take the rest in time

    @property
    def requests(self) -> int:
        return sum(self.counters.requests.values())

    @property
    def written(self) -> int:
        return self.counters.records_written

    @property
    def lost(self) -> int:
        return self.counters.records_lost


# The two places where settings become parts.


def build_upstream(config: ProxyConfig) -> Upstream:
    """Raises SparseetyError: the file of certificates cannot be used."""
    context = None
    if config.upstream_ca:
        try:
            context = ssl.create_default_context(cafile=config.upstream_ca)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror if type(error) is not ssl.SSLError else None
            raise SparseetyError(
                f"{config.upstream_ca}: {reason or 'holds no certificates'}; --upstream-ca names a PEM file"
            ) from None
    return Upstream(config.upstream, ssl_context=context)


def build_writer(config: ProxyConfig, clock: Clock) -> LogWriter | None:
    """None: nothing is captured. Raises SparseetyError: the folder cannot be written."""
    if not config.capture:
        return None
    scope = Scope(endpoints=sorted(set(ENDPOINTS.values())), upstream=config.upstream, exclusive=config.exclusive)
    try:
        rotation = Rotation(**config.rotation())
        return LogWriter(config.log_dir, "proxy", scope, clock=clock, rotation=rotation)
    except SparseetyError as error:
        raise SparseetyError(f"{error}, or --no-capture to relay only") from None


class Worker:
    """What one process relays with: its log, its connections upstream, its counters."""

    def __init__(self, config: ProxyConfig, opened: socket.socket, *, clock: Clock) -> None:
        """Raises SparseetyError: the log folder cannot be written."""
        self._config, self._socket = config, opened
        self.writer = build_writer(config, clock)
        self.upstream = build_upstream(config)
        self._counters = Counters()
        self._guard = Guard(Thresholds(lag=config.protect_lag, after=config.protect_after))
        limits = Limits(**config.limits())
        self._recorder = Recorder(self.writer, clock, self._counters, limits, self._guard)
        self._app = ProxyApp(self.upstream, self._recorder)

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, listening: asyncio.Event) -> Summary:
        keep_contents_out()
        front = serving(self._app, "on")
        front_task = asyncio.create_task(front.serve([self._socket]))
        watching = asyncio.create_task(self._watch())
        broken: list[LiveStream] = []
        log_closed = False
        try:
            await first(front.listening, front_task)
            listening.set()
            await first(stop, front_task)
            front.should_exit = True
            broken = await self._drain(front_task, hurry)
        finally:
            await finish(front, front_task)
            watching.cancel()
            await self.upstream.aclose()
            log_closed = await self._close_log(HURRIED_SECONDS if hurry.is_set() else LOG_CLOSING_SECONDS)
        return Summary(self.report().counters, broken, log_closed)

    async def look(self, *, streams: bool = False) -> Overview:
        return overview_of([self.report(streams=streams)])

    def overview(self) -> Overview:
        return overview_of([self.report()])

    def report(self, *, streams: bool = False) -> Report:
        counters = self._counters
        counters.open_requests = self._app.relay.open_requests
        if self.writer:
            counters.records_written, counters.records_lost = self.writer.written, self.writer.lost
        live = [recording.live() for recording in self._recorder.open.values()] if streams else []
        healthy = self.writer is None or self.writer.healthy
        return Report(counters, log_healthy=healthy, paused=self._guard.paused, streams=live)

    async def _watch(self) -> None:
        if self.writer and self._config.protect:
            writer = self.writer
            await watch(self._guard, lambda: writer.fill, self._paused)

    def _paused(self) -> None:
        self._counters.pauses += 1

    async def _drain(self, front: asyncio.Task[None], hurry: asyncio.Event) -> list[LiveStream]:
        """Wait for the open requests, then break off the rest; returns those."""
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait((front, hurried), timeout=self._config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if front.done():
            return []
        broken = [recording.live() for recording in self._recorder.open.values()]
        self._app.relay.abort()
        return broken

    async def _close_log(self, seconds: float) -> bool:
        """A disk that hangs must not keep the proxy from ending; False: it does hang."""
        self._recorder.flush()
        return self.writer is None or await asyncio.to_thread(self.writer.close, seconds)
