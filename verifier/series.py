"""Numbers by the definitions of catalogue.py, for Prometheus to read: on a port, or as a text file's content."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from sparseety.metrics import Cell, Metric, new_cell, observe

Values = tuple[str, ...]  # of the labels, in the definition's order


class Series(Collector):
    """Written in one thread, read in others."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._numbers: dict[Metric, dict[Values, float]] = {metric: {} for metric in metrics}
        self._cells = {metric: new_cell(metric.bounds) for metric in self._numbers if metric.bounds}

    def add(self, metric: Metric, *values: str, by: float = 1) -> None:
        """To a counter; by 0, so that it is there before its first event."""
        numbers = self._numbers[metric]
        numbers[values] = numbers.get(values, 0) + by

    def set(self, metric: Metric, *values: str, to: float) -> None:
        self._numbers[metric][values] = to

    def observe(self, metric: Metric, value: float) -> None:
        """By a histogram, which has no labels here."""
        observe(self._cells[metric], metric.bounds, value)

    def collect(self) -> Iterator[Family]:
        for metric, numbers in self._numbers.items():
            if cell := self._cells.get(metric):
                yield _histogram(metric, cell)
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=[label.name for label in metric.labels])
            for values, number in sorted(numbers.copy().items()):
                family.add_metric(list(values), number)
            yield family

    def text(self) -> bytes:
        """As Prometheus reads it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def _histogram(metric: Metric, cell: Cell) -> Family:
    bounds = [*map(str, map(float, metric.bounds)), "+Inf"]
    return HistogramMetricFamily(
        metric.name, metric.text, list(zip(bounds, accumulate(cell[:-1]), strict=True)), cell[-1]
    )
