"""What a metric is: its name, kind, unit, labels and bounds, said once. The programs publish by these definitions, the
docs table, the dashboards' checks and the bound on the number of series are made from them. No metrics library here."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Stability = Literal["ALPHA", "BETA", "STABLE"]

REQUEST_SECONDS = (
    0.01, 0.02, 0.04, 0.08, 0.16,
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
"""OpenTelemetry's below 0.3 s, then vLLM's for whole requests, so that the two can be subtracted."""
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
"""vLLM's for time_to_first_token."""
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
"""vLLM's for inter_token_latency, and finer ones below."""
OVERHEAD_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
FLUSH_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


def steps_1_2_5(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 and so on, up to `most`."""
    steps = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


@dataclass(frozen=True, slots=True)
class Label:
    """values: all that it may have. Without them `limit` says how many there can be, and whoever publishes keeps it."""

    name: str
    values: tuple[str, ...] = ()
    limit: int = 0

    @property
    def most(self) -> int:
        return len(self.values) or self.limit


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue. `name` as on the wire, less the `_total` of counters."""

    name: str
    kind: Kind
    help: str  # one sentence or two; what is exported puts the stability word before it
    unit: str = "1"
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()  # of histograms, without +Inf
    layer: str = ""  # service, token, sparsity, verification, capture: the docs' chapters
    stability: Stability = "ALPHA"
    absent: str = ""  # when it is not there, if not always: no data is not zero

    @property
    def wire_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def text(self) -> str:
        """The HELP text."""
        return f"{self.stability} {self.help}"

    @property
    def most_series(self) -> int:
        """Samples that it can have at most in one scrape."""
        return self.series({})

    def series(self, limits: Mapping[str, int]) -> int:
        """The same where a label is known to have so many values: `limits`, by its name, holds in place of its own."""
        children = prod(limits.get(label.name, label.most) for label in self.labels)
        return children * (len(self.bounds) + 3 if self.kind == "histogram" else 1)


def most_series(metrics: Iterable[Metric], **limits: int) -> int:
    """limits: as of Metric.series."""
    return sum(metric.series(limits) for metric in metrics)


BUILD_INFO = Metric(
    "sparseety_build_info",
    "gauge",
    "Constant 1; which version runs, and which version of the record format it writes or reads.",
    labels=(Label("version", limit=1), Label("schema_version", limit=1)),
    layer="service",
)
"""Of each program."""


# ------------------------------------------------------------------------------------------------------ the numbers

Cell = list[float]
"""One child's numbers. Of a counter or gauge: its value. Of a histogram: how many fell to each bound, how many beyond
the last, and the sum of all."""


def new_cell(bounds: Sequence[float] = ()) -> Cell:
    return [0] * (len(bounds) + 2) if bounds else [0]


def observe(cell: Cell, bounds: Sequence[float], value: float) -> None:
    cell[bisect_left(bounds, value)] += 1
    cell[-1] += value
