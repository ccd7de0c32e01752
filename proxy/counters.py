"""What the proxy counts: plain numbers in each worker, added up by the parent. Without a metrics library, so that the
capture can be mounted where there is none."""

from dataclasses import dataclass, field

import msgspec

from proxy.catalogue import (
    BY_NAME,
    ENDPOINTS,
    MODEL,
    MODELS,
    OTHER,
)
from sparseety.metrics import Cell, Metric, new_cell, observe

LONGEST_NAME = 200  # characters of a model's name; no server's own is longer

Labels = tuple[str, ...]
"""The values of a metric's labels, in the catalogue's order."""


class ModelNames:
    """The models that get series of their own: the first so many that replies name."""

    def __init__(self, limit: int = MODELS) -> None:
        self._limit = limit
        self._names: set[str] = set()

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self._names)

    def learn(self, name: str) -> str:
        """The label for a model that a reply has named."""
        fits = 0 < len(name) <= LONGEST_NAME and len(self._names) < self._limit
        if fits and name != OTHER:
            self._names.add(name)
        return self.known(name)

    def known(self, name: str | None) -> str:
        """The label for a model that somebody else has named."""
        return name if name is not None and name in self._names else OTHER


@dataclass(slots=True)
class Counters:
    """Of one worker, or of several: the children of each metric. All of them only grow."""

    children: dict[str, dict[Labels, Cell]] = field(default_factory=dict)  # by the metric's name

    def cell(self, metric: Metric, *labels: str) -> Cell:
        children = self.children.get(metric.name)
        if children is None:
            children = self.children[metric.name] = {}
        cell = children.get(labels)
        if cell is None:
            cell = children[labels] = new_cell(metric.bounds)
        return cell

    def add(self, amount: float, metric: Metric, *labels: str) -> None:
        self.cell(metric, *labels)[0] += amount

    def observe(self, value: float, metric: Metric, *labels: str) -> None:
        observe(self.cell(metric, *labels), metric.bounds, value)

    def total(self, metric: Metric) -> int:
        """Of a counter, over all labels."""
        return int(sum(cell[0] for cell in self.children.get(metric.name, {}).values()))

    def merge(self, other: "Counters", names: ModelNames) -> None:
        """Add another's. names: of all workers together; each has as many of its own, and they may differ.

        The other may go on counting in a thread of its own meanwhile.
        """
        for name, children in list(other.children.items()):
            metric = BY_NAME[name]
            by_model = bool(metric.labels) and metric.labels[0] is MODEL
            for labels, theirs in list(children.items()):
                if by_model and labels[0] != OTHER:
                    labels = (names.learn(labels[0]), *labels[1:])
                mine = self.cell(metric, *labels)
                for place, count in enumerate(theirs):
                    mine[place] += count


class LiveStream(msgspec.Struct, frozen=True):
    """A request that is open. No text, no path, no header: this is shown to whoever may see the admin port."""

    id: str  # its uuid, as in request_start
    endpoint: str
    began: float  # Unix seconds
    reads: int  # of the reply's body
    bytes: int  # of the reply's body
    captured: bool


class Present(msgspec.Struct):
    """How one worker is at this moment."""

    open: dict[str, int] = {}  # requests, by endpoint
    open_streams: int = 0
    paused: str | None = None  # why the capture is paused
    log_healthy: bool = True
    queue: tuple[int, int] | None = None  # bytes in the log's queue, and its bound; None: there is no log
    last_write: float | None = None  # Unix seconds
    disk_free: int | None = None  # bytes

    @property
    def open_requests(self) -> int:
        return sum(self.open.values())


class Report(msgspec.Struct):
    """What one worker says of itself."""

    counters: Counters
    present: Present = msgspec.field(default_factory=Present)
    streams: list[LiveStream] = []  # filled only when it was asked for


@dataclass(slots=True)
class Overview:
    """What all workers together say."""

    reports: list[Report]  # of the workers that live
    gone: Counters = field(default_factory=Counters)  # the sums of workers that have ended
    names: ModelNames = field(default_factory=ModelNames)
    workers: int = 1  # that there should be
    restarts: int = 0
    silent: int = 0  # workers that live and do not answer

    def counters(self) -> Counters:
        """Added up. Without those that have ended a counter would go down when one dies."""
        total = Counters()
        for counters in (self.gone, *(report.counters for report in self.reports)):
            total.merge(counters, self.names)
        return total

    @property
    def present(self) -> list[Present]:
        return [report.present for report in self.reports]

    @property
    def alive(self) -> int:
        return len(self.reports)

    @property
    def open_requests(self) -> int:
        return sum(present.open_requests for present in self.present)

    def open_by_endpoint(self) -> dict[str, int]:
        places = (*ENDPOINTS, OTHER)
        return {endpoint: sum(each.open.get(endpoint, 0) for each in self.present) for endpoint in places}

    def troubles(self) -> list[str]:
        """Why traffic should go elsewhere, as far as the workers know."""
        found = []
        if self.alive < self.workers:
            found.append(f"{self.workers - self.alive} of {self.workers} workers are down")
        if self.silent:
            found.append(f"{self.silent} of {self.workers} workers do not answer")
        if not all(present.log_healthy for present in self.present):
            found.append("the capture log cannot be written")
        return found
