"""What the proxy counts: plain integers in each worker, added up and published when somebody scrapes."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import get_args

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

import sparseety
from sparseety.records import FORMAT_VERSION, Endpoint, Outcome

PAUSE_REASONS = ("lag", "queue")


@dataclass(slots=True)
class Counters:
    """Of one worker, or of several. Those marked "now" are of the moment; all others only grow."""

    requests: dict[tuple[str, str], int] = field(default_factory=Counter)  # by (endpoint, outcome), ended ones
    chunks: int = 0  # records of stream events
    open_streams: int = field(default=0, metadata={"now": True})
    open_requests: int = field(default=0, metadata={"now": True})
    capture_failures: int = 0  # requests whose capture was switched off by an exception
    uncaptured: int = 0  # requests of which nothing, or not all, was recorded because the capture was paused
    pauses: int = 0  # times that the capture was paused
    records_written: int = 0
    records_lost: int = 0

    def add(self, other: "Counters") -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(theirs, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, each.name, mine + theirs)

    def forget_now(self) -> None:
        """What they are of has ended: its sums stay, its present does not."""
        for each in fields(self):
            if each.metadata.get("now"):
                setattr(self, each.name, 0)


class LiveStream(msgspec.Struct, frozen=True):
    """A request that is open. No text, no path, no header: this is shown to whoever may see the admin port."""

    id: str  # its uuid, as in request_start
    endpoint: str
    began: float  # Unix seconds
    reads: int  # of the reply's body
    bytes: int  # of the reply's body
    captured: bool


class Report(msgspec.Struct):
    """What one worker says of itself."""

    counters: Counters
    log_healthy: bool = True
    paused: str | None = None  # why the capture is paused
    streams: list[LiveStream] = []  # filled only when it was asked for


@dataclass(slots=True)
class Overview:
    """What all workers together say."""

    counters: Counters
    reports: list[Report]  # of the workers that live
    workers: int = 1  # that there should be
    restarts: int = 0
    silent: int = 0  # workers that live and do not answer

    @property
    def alive(self) -> int:
        return len(self.reports)

    def troubles(self) -> list[str]:
        """Why traffic should go elsewhere, as far as the workers know."""
        found = []
        if self.alive < self.workers:
            found.append(f"{self.workers - self.alive} of {self.workers} workers are down")
        if self.silent:
            found.append(f"{self.silent} of {self.workers} workers do not answer")
        if not all(report.log_healthy for report in self.reports):
            found.append("the capture log cannot be written")
        return found


def overview_of(
    reports: list[Report], *, gone: Counters | None = None, workers: int = 1, restarts: int = 0
) -> Overview:
    """gone: the sums of workers that have ended; without them a counter would go down when one dies."""
    total = Counters()
    total.requests = {(endpoint, outcome): 0 for endpoint in _ENDPOINTS for outcome in get_args(Outcome)}
    for counters in [*([gone] if gone else []), *(report.counters for report in reports)]:
        total.add(counters)
    return Overview(total, reports, workers, restarts)


_ENDPOINTS = (*get_args(Endpoint), "other")


class ProxyMetrics(Collector):
    """Reads the newest overview at each scrape."""

    def __init__(self, registry: CollectorRegistry, overview: Callable[[], Overview]) -> None:
        self._overview = overview
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        overview = self._overview()
        counters = overview.counters
        build = GaugeMetricFamily("sparseety_build_info", "Constant 1.", labels=["version", "schema_version"])
        build.add_metric([sparseety.__version__, str(FORMAT_VERSION)], 1)
        yield build
        requests = CounterMetricFamily(
            "sparseety_proxy_requests", "Requests that ended.", labels=["endpoint", "outcome"]
        )
        for labels, count in sorted(counters.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        for name, text, value in (
            ("chunks", "Records made of stream events.", counters.chunks),
            ("capture_records_written", "Records in the log.", counters.records_written),
            (
                "capture_records_lost",
                "Records that never reached the log; the log says so in gaps.",
                counters.records_lost,
            ),
            (
                "capture_failures",
                "Requests whose capture was switched off by a fault of the proxy's own.",
                counters.capture_failures,
            ),
            ("capture_pauses", "Times that the capture was paused to protect serving.", counters.pauses),
            ("uncaptured_requests", "Requests not recorded in full because of that.", counters.uncaptured),
            ("worker_restarts", "Workers that died and were replaced.", overview.restarts),
        ):
            yield CounterMetricFamily(f"sparseety_proxy_{name}", text, value=value)
        unhealthy = sum(not report.log_healthy for report in overview.reports)
        for name, text, value in (
            ("open_streams", "Event streams being relayed now.", counters.open_streams),
            ("requests_in_flight", "Requests accepted and not ended.", counters.open_requests),
            ("workers", "Workers that should run.", overview.workers),
            ("workers_alive", "Workers that run.", overview.alive),
            ("workers_silent", "Workers that run and do not answer.", overview.silent),
            ("capture_logs_failing", "Workers whose log cannot be written now.", unhealthy),
        ):
            yield GaugeMetricFamily(f"sparseety_proxy_{name}", text, value=value)
        paused = GaugeMetricFamily(
            "sparseety_proxy_capture_paused", "Workers whose capture is paused to protect serving.", labels=["reason"]
        )
        for reason in PAUSE_REASONS:
            paused.add_metric([reason], sum(report.paused == reason for report in overview.reports))
        yield paused
