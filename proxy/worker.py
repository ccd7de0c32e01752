"""One process that relays: its log, its connections upstream, its counters; served until it is told to stop."""

import asyncio
import socket
import ssl
from collections import Counter

import msgspec

from proxy.app import ProxyApp
from proxy.capture import ENDPOINTS, Limits
from proxy.catalogue import (
    FLUSH,
    PAUSES,
    RECORDS_DROPPED,
    RECORDS_WRITTEN,
    REQUESTS,
    SEGMENTS,
    SOURCE,
    SPANS,
    WRITTEN_BYTES,
)
from proxy.config import ProxyConfig
from proxy.counters import Counters, LiveStream, ModelNames, Overview, Present, Report
from proxy.logs import keep_contents_out
from proxy.protect import Guard, Reason, Thresholds, watch
from proxy.recording import Recorder
from proxy.serving import finish, first, serving
from proxy.spans import Spans
from proxy.upstream import Upstream
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import Scope
from sparseety.segments import Rotation
from sparseety.writer_metrics import DROP_REASONS, SEGMENT_EVENTS
from sparseety.written import Written

LOG_CLOSING_SECONDS = 10.0  # for the disk to take the rest of the log
SPANS_CLOSING_SECONDS = 1.0  # for the collector to take the last spans
HURRIED_SECONDS = 1.0  # the same, after the second signal


class Summary(msgspec.Struct, frozen=True):
    counters: Counters
    broken: list[LiveStream]  # requests broken off because they outlived the time to drain
    log_closed: bool = True  # False: the disk did not take the rest in time

    @property
    def requests(self) -> int:
        return self.counters.total(REQUESTS)

    @property
    def written(self) -> int:
        return self.counters.total(RECORDS_WRITTEN)

    @property
    def lost(self) -> int:
        return self.counters.total(RECORDS_DROPPED)


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


def take_over(counters: Counters, done: Written) -> None:
    """What the log's writer has counted itself."""
    counters.cell(RECORDS_WRITTEN, SOURCE)[0] = done.records
    counters.cell(WRITTEN_BYTES, SOURCE)[0] = done.bytes
    counters.cell(FLUSH, SOURCE)[:] = done.flushes
    for reason in DROP_REASONS:
        counters.cell(RECORDS_DROPPED, SOURCE, reason)[0] = done.dropped[reason]
    for event in SEGMENT_EVENTS:
        counters.cell(SEGMENTS, SOURCE, event)[0] = done.segments[event]


class Worker:
    """What one process relays with: its log, its connections upstream, its counters."""

    def __init__(self, config: ProxyConfig, opened: socket.socket, *, clock: Clock) -> None:
        """Raises SparseetyError: the log folder cannot be written."""
        self._config, self._socket = config, opened
        self.upstream = build_upstream(config)
        self._spans = Spans(config.otlp_endpoint, config.upstream) if config.otlp_endpoint else None
        self.writer = build_writer(config, clock)  # last, so that a refusal to start leaves no log behind
        self._counters = Counters()
        self._guard = Guard(Thresholds(lag=config.protect_lag, after=config.protect_after))
        limits = Limits(**config.limits())
        self._names = names = ModelNames(config.metrics_models)
        self._recorder = Recorder(
            self.writer, clock, self._counters, limits, self._guard, names, self._spans, config.otlp_content
        )
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
        return Overview([await self.newest_report(streams=streams)], names=self._names)

    def overview(self) -> Overview:
        return Overview([self.report()], names=self._names)

    async def newest_report(self, *, streams: bool = False) -> Report:
        """With all that has happened by now."""
        await self._recorder.caught_up()
        return self.report(streams=streams)

    def report(self, *, streams: bool = False) -> Report:
        """As far as it is counted, which is a tenth of a second ago."""
        if self.writer:
            take_over(self._counters, self.writer.done)
        if self._spans:
            for result, count in self._spans.counts.items():
                self._counters.cell(SPANS, result)[0] = count
        live = [recording.live() for recording in self._recorder.open.values()] if streams else []
        return Report(self._counters, self._present(), live)

    def _present(self) -> Present:
        recordings = self._recorder.open.values()
        present = Present(
            open=Counter(recording.endpoint for recording in recordings),
            open_streams=sum(recording.streams for recording in recordings),
            paused=self._guard.paused,
        )
        if self.writer:
            present.log_healthy, present.queue = self.writer.healthy, self.writer.queue
            present.last_write, present.disk_free = self.writer.done.last, self.writer.done.disk_free
        return present

    async def _watch(self) -> None:
        if self.writer and self._config.protect:
            writer = self.writer
            await watch(self._guard, lambda: writer.fill, self._paused)

    def _paused(self, reason: Reason) -> None:
        self._counters.add(1, PAUSES, SOURCE, reason)

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
        if self._spans:
            await asyncio.to_thread(self._spans.close, SPANS_CLOSING_SECONDS)
        return self.writer is None or await asyncio.to_thread(self.writer.close, seconds)
