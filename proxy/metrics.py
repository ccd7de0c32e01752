"""Publishes what the workers counted, when somebody scrapes."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

import sparseety
from proxy.counters import PAUSE_REASONS, Overview
from sparseety.records import FORMAT_VERSION


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
