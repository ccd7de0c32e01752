"""Which numbers of a worker go into which metric. Definitions: catalogue.py."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from sampler_hook.catalogue import (
    BALANCE,
    ELEMENTS,
    ENTROPY,
    ERRORS,
    EXPERT_TOKENS,
    HOOKS,
    IDLE,
    ROUTED,
    SPARSITY_CONFIG,
    TOKEN_ZEROS,
    WEIGHT_ZEROS,
    ZEROS,
)
from sampler_hook.detail import EXPERT, TOTALS
from sampler_hook.figures import histogram, total
from sampler_hook.metrics import Sample
from sampler_hook.tally import PHASES, Spread, Tally

ALL = "all"  # the layer's label where only totals are published
NO_LAYER = "none"  # of a module whose name has no layer's number
_Place = TypeVar("_Place")
_OTHER = "other"
_THRESHOLDS = 8  # told apart; the operator may change it as often as he likes


@dataclass(slots=True)
class WorkerFigures:
    """Of one worker, at one of detail.DETAILS."""

    model: str
    engine: str
    detail: str
    first_rank: bool  # of its tensor parallel group
    _configs: dict[tuple[str, str], None] = field(default_factory=dict)  # settings that have been in force

    def layer(self, number: int | None) -> str:
        return ALL if self.detail == TOTALS else NO_LAYER if number is None else str(number)

    def activations(self, tally: Tally) -> Iterator[Sample]:
        both = {"model_name": self.model, "engine": self.engine}
        layers = [self.layer(site.layer) for site in tally.sites]
        for phase in PHASES:
            zeros = tally.zeros[phase]
            kinds = {"exact": summed(layers, zeros.zeros), "near": summed(layers, zeros.near)}
            for layer, elements in summed(layers, zeros.elements).items():
                place = both | {"layer": layer, "site": "ffn_act", "phase": phase}
                yield total(ELEMENTS, elements, place)
                yield from (total(ZEROS, counts[layer], place, zero_kind=kind) for kind, counts in kinds.items())
        for phase, spreads in tally.shares.items():
            for kind, shares in zip(("exact", "near"), spreads, strict=True):
                labels = both | {"site": "ffn_act", "phase": phase, "zero_kind": kind}
                yield from histogram(TOKEN_ZEROS, shares, labels)

    def routing(self, tally: Tally, spreads: Mapping[int, Spread | None]) -> Iterator[Sample]:
        both = {"model_name": self.model, "engine": self.engine}
        layers = [self.layer(router.layer) for router in tally.routers]
        pairs = list(zip(layers, tally.routers, strict=True))
        for phase in PHASES:
            for layer, count in summed(layers, map(sum, tally.loads[phase])).items():
                yield total(ROUTED, count, both | {"layer": layer, "phase": phase})
        if self.detail == EXPERT:
            places = [(layer, expert) for layer, router in pairs for expert in range(router.experts)]
            counts = [count for loads in tally.all_loads() for count in loads]
            for (layer, expert), count in summed(places, counts).items():
                yield total(EXPERT_TOKENS, count, both | {"layer": layer, "expert": str(expert)})
        found: dict[str, list[Spread]] = {layers[number]: [] for number in spreads}
        for number, each in spreads.items():
            if each is not None:
                found[layers[number]].append(each)
        for layer, those in found.items():  # of several routers, as with totals: the worst
            place = both | {"layer": layer}
            yield Sample(BALANCE, place, min((each.balance for each in those), default=math.nan))
            yield Sample(ENTROPY, place, min((each.entropy for each in those), default=math.nan))
            yield Sample(IDLE, place, max((each.idle for each in those), default=math.nan))

    def weights(self, tally: Tally) -> Iterator[Sample]:
        if not self.first_rank:
            return
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for (number, module), (zeros, elements) in tally.weights.items():
            place = self.layer(number), module
            before = sums.get(place, (0, 0))
            sums[place] = before[0] + zeros, before[1] + elements
        for (layer, module), (zeros, elements) in sums.items():
            labels = {"model_name": self.model, "layer": layer, "module": module, "zero_kind": "exact"}
            yield Sample(WEIGHT_ZEROS, labels, zeros / elements)

    def config(self, threshold: float, tally: Tally) -> Iterator[Sample]:
        if not self.first_rank:  # others see but a part of the sites
            return
        sites = ["ffn_act"] * bool(tally.sites) + ["router"] * bool(tally.routers)
        known = any(f"{threshold:g}" == told for told, _ in self._configs)
        told = f"{threshold:g}" if known or len(self._configs) < _THRESHOLDS - 1 else _OTHER
        now = told, ",".join(sites) or "none"
        self._configs[now] = None
        for each in self._configs:
            labels = {"model_name": self.model, "near_zero_threshold": each[0], "site_set": each[1]}
            yield Sample(SPARSITY_CONFIG, labels, float(each == now))

    def health(self, hooks: Mapping[str, Mapping[str, int]], faults: int) -> Iterator[Sample]:
        """hooks: by site and state, of the modules of this worker."""
        for site, states in hooks.items():
            for state, count in states.items():
                yield Sample(HOOKS, {"engine": self.engine, "site": site, "state": state}, float(count))
        yield total(ERRORS, faults, {"engine": self.engine}, site="sparsity")


def summed(places: Iterable[_Place], counts: Iterable[int]) -> dict[_Place, int]:
    """By place, of which several may be the same."""
    sums: dict[_Place, int] = {}
    for place, count in zip(places, counts, strict=True):
        sums[place] = sums.get(place, 0) + count
    return sums
