"""Publishes what the workers counted, when somebody scrapes: what stands in the catalogue, and nothing else."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product

from prometheus_client import core, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

import sparseety
from proxy import catalogue
from proxy.catalogue import METRICS, MODEL, OTHER, SOURCE
from proxy.counters import Labels, Overview
from sparseety.metrics import Cell, Metric, new_cell
from sparseety.records import FORMAT_VERSION

Children = dict[Labels, Cell]


class ProxyMetrics(Collector):
    """Reads the newest overview at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        overview: Callable[[], Overview],
        *,
        capture: bool = True,
        upstream_up: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """capture: it is on. upstream_up: None: not known yet."""
        self._overview, self._capture, self._upstream_up = overview, capture, upstream_up
        registry.register(self)

    def collect(self) -> Iterable[core.Metric]:
        return self.snapshot().collect()

    def snapshot(self) -> "Snapshot":
        """To be called where the workers are heard, so that nothing moves meanwhile."""
        overview = self._overview()
        counted = overview.counters().children
        present = dict(_present(overview, capture=self._capture, upstream_up=self._upstream_up()))
        return Snapshot(counted, present, {OTHER, *overview.names.all})

    async def text(self) -> bytes:
        """For Prometheus. Written in a thread: it takes 3 ms, and 90 ms where there are as many series as may be."""
        registry = CollectorRegistry()
        registry.register(self.snapshot())
        return await asyncio.to_thread(generate_latest, registry)


class Snapshot(Collector):
    """The numbers of one moment."""

    def __init__(self, counted: dict[str, Children], present: dict[str, Children], models: set[str]) -> None:
        self._counted, self._present, self._models = counted, present, models

    def collect(self) -> Iterable[core.Metric]:
        for metric in METRICS:
            children: Children = {}
            if metric.kind != "gauge":
                children = dict.fromkeys(_at_zero(metric, self._models), new_cell(metric.bounds))
            yield _family(metric, children | self._counted.get(metric.name, {}) | self._present.get(metric.name, {}))


def _at_zero(metric: Metric, models: set[str]) -> Iterator[Labels]:
    """The children that are there before anything happened: else `increase` would miss the first time that it does.

    Of a model's histograms there are none: they have thirty series each, and come with what is first observed.
    """
    if metric.bounds and MODEL in metric.labels:
        return iter(())
    return product(*(sorted(models) if label is MODEL else label.values for label in metric.labels))


def _present(overview: Overview, *, capture: bool, upstream_up: bool | None) -> Iterator[tuple[str, Children]]:
    """What is not counted but seen at the moment. What is not known is left out."""
    present = overview.present
    yield _one(catalogue.BUILD, 1, sparseety.__version__, str(FORMAT_VERSION))
    yield _one(catalogue.WORKERS, overview.workers)
    yield _one(catalogue.WORKERS_ALIVE, overview.alive)
    yield _one(catalogue.WORKERS_SILENT, overview.silent)
    yield _one(catalogue.RESTARTS, overview.restarts)
    yield _one(catalogue.OPEN_STREAMS, sum(each.open_streams for each in present))
    yield catalogue.IN_FLIGHT.name, {(place,): [count] for place, count in overview.open_by_endpoint().items()}
    yield _one(catalogue.SAMPLING_RATIO, int(capture), SOURCE)
    yield _one(catalogue.LOGS_FAILING, sum(not each.log_healthy for each in present), SOURCE)
    reasons = catalogue.PAUSE_REASONS
    yield (
        catalogue.PAUSED.name,
        {(SOURCE, reason): [sum(each.paused == reason for each in present)] for reason in reasons},
    )
    if upstream_up is not None:
        yield _one(catalogue.UPSTREAM_UP, int(upstream_up), catalogue.UPSTREAM)
    if queues := [each.queue for each in present if each.queue]:
        yield _one(catalogue.QUEUE_BYTES, max(used for used, _ in queues), SOURCE)
        yield _one(catalogue.QUEUE_LIMIT, max(limit for _, limit in queues), SOURCE)
    if writes := [each.last_write for each in present if each.last_write is not None]:
        yield _one(catalogue.LAST_WRITE, max(writes), SOURCE)
    if free := [each.disk_free for each in present if each.disk_free is not None]:
        yield _one(catalogue.DISK_FREE, min(free))


def _one(metric: Metric, value: float, *labels: str) -> tuple[str, Children]:
    return metric.name, {labels: [value]}


def _family(metric: Metric, children: Children) -> core.Metric:
    names = [label.name for label in metric.labels]
    if metric.kind == "histogram":
        histogram = core.HistogramMetricFamily(metric.name, metric.text, labels=names)
        bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
        for labels, cell in children.items():
            histogram.add_metric(labels, list(zip(bounds, accumulate(cell[:-1]), strict=True)), cell[-1])
        return histogram
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=names)
    for labels, cell in children.items():
        family.add_metric(labels, cell[0])
    return family
