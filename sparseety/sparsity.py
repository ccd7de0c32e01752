"""Add up `sparsity` records, over tokens, requests and ranks, and say it as a table. Two sums and a division, last."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from sparseety.records import AnyRecord, Phase, Site, Sparsity, SparsityStart

PHASES: tuple[Phase, ...] = ("prefill", "decode", "recomputed")
OVERALL = "overall"
SKIPPING = 0.5  # a layer that has more near zeros than this is said to skip most of its neurons


@dataclass(slots=True)
class Counts:
    """Sums over any number of tokens."""

    computed: int = 0  # elements of the tokens that were computed
    elements: int = 0  # of these, observed
    zeros: int = 0
    near: int = 0

    def add(self, other: "Counts") -> None:
        self.computed += other.computed
        self.elements += other.elements
        self.zeros += other.zeros
        self.near += other.near

    @property
    def zero_share(self) -> float | None:
        """None: nothing was observed, which is not a share of 0."""
        return self.zeros / self.elements if self.elements else None

    @property
    def near_zero_share(self) -> float | None:
        return self.near / self.elements if self.elements else None


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A module of the model; of all ranks that hold a part of it."""

    layer: int  # -1: its name has no number
    site: str


class SparsityTable:
    """What a set of logs says, by module and phase."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Place, Phase], Counts] = {}
        self.thresholds: set[float] = set()
        self.not_observed: dict[str, str] = {}
        self.models: set[str] = set()

    def add_log(self, records: Iterable[AnyRecord]) -> None:
        """Add one log's records, in their order: a `sparsity_start` says what the numbers behind it are of."""
        sites: list[Site] = []
        for record in records:
            if isinstance(record, SparsityStart):
                sites = record.sites
                self.thresholds.add(record.threshold)
                self.models.add(record.model)
                if not record.tensor_parallel_rank:
                    self.not_observed |= record.not_observed
                for site in sites:
                    for phase in PHASES[:2]:
                        self.counts.setdefault((_place(site), phase), Counts())
            elif isinstance(record, Sparsity) and len(sites) == len(record.elements):
                self._add(record, sites)

    def _add(self, record: Sparsity, sites: list[Site]) -> None:
        for site, zeros, near, elements in zip(sites, record.zeros, record.near, record.elements, strict=True):
            counts = self.counts.setdefault((_place(site), record.phase), Counts())
            counts.add(Counts(record.tokens * site.width, elements, zeros, near))

    def overall(self, phases: tuple[Phase, ...] = PHASES[:2]) -> Counts:
        """Weighted by elements. What was computed again after a preemption is no part of it."""
        total = Counts()
        for (_, phase), counts in self.counts.items():
            if phase in phases:
                total.add(counts)
        return total

    def places(self) -> list[Place]:
        return sorted({place for place, _ in self.counts})

    def skipping(self) -> list[Place]:
        """Modules with more near zeros than SKIPPING, over prefill and decode."""
        return [place for place, counts in self._by_place() if (counts.near_zero_share or 0.0) > SKIPPING]

    def unseen(self) -> list[Place]:
        """Modules that were to be counted and of which nothing was observed."""
        return [place for place, counts in self._by_place() if not counts.elements]

    def _by_place(self) -> list[tuple[Place, Counts]]:
        places: dict[Place, Counts] = {}
        for (place, phase), counts in self.counts.items():
            if phase != "recomputed":
                places.setdefault(place, Counts()).add(counts)
        return sorted(places.items(), key=lambda item: item[0])

    def write_csv(self, file: TextIO) -> None:
        """One row a module and phase, then the weighted sums. An empty share: nothing was observed."""
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for place, phase in sorted(self.counts, key=lambda key: (key[0], PHASES.index(key[1]))):
            layer = place.layer if place.layer >= 0 else ""
            rows.writerow([layer, place.site, phase, *self._numbers(self.counts[place, phase])])
        for phase in PHASES[:2]:
            rows.writerow([OVERALL, "", phase, *self._numbers(self.overall((phase,)))])
        rows.writerow([OVERALL, "", "", *self._numbers(self.overall())])

    def _numbers(self, counts: Counts) -> list[str]:
        share = counts.near_zero_share
        return [
            str(counts.zeros),
            str(counts.near),
            str(counts.elements),
            str(counts.computed - counts.elements),
            _share(counts.zero_share),
            _share(share),
            "" if share is None else "yes" if share > SKIPPING else "no",
            " ".join(f"{threshold:g}" for threshold in sorted(self.thresholds)),
        ]


COLUMNS = (
    "layer",
    "site",
    "phase",
    "zeros",
    "near_zeros",
    "elements",
    "elements_not_observed",
    "zero_share",
    "near_zero_share",
    "skips_over_half",
    "threshold",
)


def _place(site: Site) -> Place:
    return Place(-1 if site.layer is None else site.layer, site.name)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.6f}"
