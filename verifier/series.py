"""Numbers by the definitions of catalogue.py, for Prometheus to read: on a port, or as a text file's content."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from sparseety.metrics import Metric

Values = tuple[str, ...]  # of the labels, in the definition's order


class Series(Collector):
    """Written in one thread, read in others."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._numbers: dict[Metric, dict[Values, float]] = {metric: {} for metric in metrics}
        self._counts = {metric: [0] * (len(metric.bounds) + 1) for metric in self._numbers if metric.bounds}

    def add(self, metric: Metric, *values: str, by: float = 1) -> None:
        """To a counter; by 0, so that it is there before its first event."""
        numbers = self._numbers[metric]
        numbers[values] = numbers.get(values, 0) + by

    def set(self, metric: Metric, *values: str, to: float) -> None:
        self._numbers[metric][values] = to

    def observe(self, metric: Metric, value: float) -> None:
        """By a histogram, which has no labels here."""
        self._counts[metric][bisect_left(metric.bounds, value)] += 1
        self.add(metric, by=value)

    def collect(self) -> Iterator[Family]:
        for metric, numbers in self._numbers.items():
            if metric in self._counts:
                yield self._histogram(metric)
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=[label.name for label in metric.labels])
            for values, number in sorted(numbers.copy().items()):
                family.add_metric(list(values), number)
            yield family

    def _histogram(self, metric: Metric) -> Family:
        seen, buckets = 0, []
        for bound, count in zip((*map(float, metric.bounds), "+Inf"), self._counts[metric], strict=True):
            seen += count
            buckets.append((str(bound), seen))
        return HistogramMetricFamily(metric.name, metric.text, buckets, self._numbers[metric].get((), 0.0))

    def text(self) -> bytes:
        """As Prometheus reads it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)
