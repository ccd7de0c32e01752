"""Publishes the proxy's counters when somebody scrapes."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from proxy.counters import Counters
from sparseety.logwriter import LogWriter


class ProxyMetrics(Collector):
    """Reads the counters and the log writer at each scrape."""

    def __init__(self, registry: CollectorRegistry, counters: Counters, writer: LogWriter) -> None:
        self._counters, self._writer = counters, writer
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "sparseety_proxy_requests", "Requests that ended.", labels=["endpoint", "outcome"]
        )
        for labels, count in sorted(self._counters.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        yield CounterMetricFamily(
            "sparseety_proxy_chunks", "Records made of stream events.", value=self._counters.chunks
        )
        yield CounterMetricFamily(
            "sparseety_proxy_capture_records_lost",
            "Records that never reached the log; the log says so in gaps.",
            value=self._writer.lost,
        )
        yield CounterMetricFamily(
            "sparseety_proxy_capture_failures",
            "Requests whose capture was switched off by a fault of the proxy's own.",
            value=self._counters.capture_failures,
        )
        yield GaugeMetricFamily(
            "sparseety_proxy_open_streams", "Event streams being relayed now.", value=self._counters.open_streams
        )
