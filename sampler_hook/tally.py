"""What a worker has counted since it began, added up for metrics. No torch, no vLLM, no metrics library.

Sums of the same records that its log holds. What was computed again after a preemption is in none of them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sampler_hook.catalogue import RATIO_BOUNDS
from sampler_hook.sites import DOWN_PROJECTIONS, layer_of
from sparseety.metrics import Cell, new_cell, observe
from sparseety.records import AnyRecord, Experts, ParameterZeros, Router, Site, Sparsity, SparsityStart, Weights

PHASES = ("prefill", "decode")
WINDOW_SECONDS = 60.0  # of the loads of experts, at least
WINDOW_PATIENCE = 300.0  # a window that has not come together by then is given up
WINDOW_CHOICES = 20  # by expert: fewer say nothing about who is idle


@dataclass(slots=True)
class Zeros:
    """Sums over the tokens of one phase, a number for each site."""

    zeros: list[int]
    near: list[int]
    elements: list[int]

    def plus(self, record: Sparsity) -> "Zeros":
        return Zeros(
            [a + b for a, b in zip(self.zeros, record.zeros, strict=True)],
            [a + b for a, b in zip(self.near, record.near, strict=True)],
            [a + b for a, b in zip(self.elements, record.elements, strict=True)],
        )


class Tally:
    def __init__(self, start: SparsityStart, *, whole: bool = True) -> None:
        """whole: this worker sees all of a token, all layers and all columns."""
        self.sites: list[Site] = start.sites
        self.routers: list[Router] = start.routers
        self.zeros = {phase: Zeros(*([0] * len(self.sites) for _ in range(3))) for phase in PHASES}
        self.loads = {phase: [[0] * router.experts for router in self.routers] for phase in PHASES}
        # Of single tokens, by phase: exact and near.
        self.shares: dict[str, tuple[Cell, Cell]] = (
            {phase: (new_cell(RATIO_BOUNDS), new_cell(RATIO_BOUNDS)) for phase in PHASES}
            if start.per_token and whole and self.sites
            else {}
        )
        self.weights: dict[tuple[int | None, str], tuple[int, int]] = {}  # by layer and module: zeros, elements

    def add(self, record: AnyRecord) -> None:
        match record:
            case Sparsity() if record.phase in PHASES:
                self.zeros[record.phase] = self.zeros[record.phase].plus(record)
                if self.shares and record.token_zeros is not None and record.token_near is not None:
                    for shares, counts in zip(
                        self.shares[record.phase], (record.token_zeros, record.token_near), strict=True
                    ):
                        for share in self._token_shares(counts):
                            observe(shares, RATIO_BOUNDS, share)
            case Experts() if record.phase in PHASES:
                self.loads[record.phase] = [
                    [a + b for a, b in zip(mine, more, strict=True)]
                    for mine, more in zip(self.loads[record.phase], record.counts, strict=True)
                ]
            case Weights():
                self.weights = of_weights(record.parameters)

    def _token_shares(self, counts: list[list[int]]) -> Iterator[float]:
        """counts: by site and token; -1: not observed."""
        for token in zip(*counts, strict=True):
            seen = [(zeros, site.width) for zeros, site in zip(token, self.sites, strict=True) if zeros >= 0]
            if elements := sum(width for _, width in seen):
                yield sum(zeros for zeros, _ in seen) / elements

    def all_loads(self) -> list[list[int]]:
        """Over both phases, by router and expert."""
        both = (self.loads[phase] for phase in PHASES)
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*both, strict=True)]


# ------------------------------------------------------------------------------------------- the loads of experts


@dataclass(frozen=True, slots=True)
class Spread:
    """How one layer's tokens went to its experts, in a window."""

    balance: float  # mean load / highest load
    entropy: float  # / ln(experts)
    idle: int


def spread(loads: Sequence[int]) -> Spread:
    """loads: tokens by expert, of at least two; not all 0."""
    total = sum(loads)
    entropy = -sum(load / total * math.log(load / total) for load in loads if load)
    return Spread(total / len(loads) / max(loads), entropy / math.log(len(loads)), sum(not load for load in loads))


class Windows:
    """Cuts the sums of each router into windows. `latest`: of the last one; None: none came together for too long."""

    def __init__(self, routers: int, now: float) -> None:
        self.latest: dict[int, Spread | None] = {}
        self._begun = [(now, [0])] * routers  # and the sums of then

    def look(self, loads: list[list[int]], now: float) -> None:
        for number, sums in enumerate(loads):
            begun, before = self._begun[number]
            if len(sums) < 2 or now - begun < WINDOW_SECONDS:
                continue
            window = [a - b for a, b in zip(sums, before if len(before) > 1 else [0] * len(sums), strict=True)]
            if sum(window) >= WINDOW_CHOICES * len(sums):
                self.latest[number] = spread(window)
            elif now - begun < WINDOW_PATIENCE:
                continue
            elif number in self.latest:
                self.latest[number] = None
            self._begun[number] = (now, sums)


# --------------------------------------------------------------------------------------------------- the weights

_EXPERTS = re.compile(r"(^|\.)experts\.")
_ATTENTION = re.compile(r"att", re.IGNORECASE)
_INTO_ATTENTION = ("q", "k", "v", "c_attn", "Wqkv", "fused_qkv", "wq", "wk", "wv")  # begins the name
_INTO_MLP = frozenset(
    {"gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "w1", "w3", "w13", "dense_h_to_4h"}
)
_EMBEDDINGS = frozenset({"embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "word_embeddings"})
_HEADS = frozenset({"lm_head", "embed_out"})


def module_of(name: str) -> str:
    """What a weight is for, by its name: a value of the label `module`."""
    parent, _, last = name.removesuffix(".weight").rpartition(".")
    if _EXPERTS.search(name):
        return "experts"
    if last in _EMBEDDINGS:
        return "embed"
    if last in _HEADS:
        return "head"
    if _ATTENTION.search(parent.rpartition(".")[2]):
        if last in ("o_proj", "out_proj", "c_proj", "dense", "wo"):
            return "attn_o"
        return "qkv" if last.startswith(_INTO_ATTENTION) else "other"
    if last in _INTO_MLP:
        return "ffn_in"
    return "ffn_out" if last in DOWN_PROJECTIONS else "other"


def of_weights(parameters: Iterable[ParameterZeros]) -> dict[tuple[int | None, str], tuple[int, int]]:
    """(zeros, elements) by layer and module."""
    zeros: Counter[tuple[int | None, str]] = Counter()
    elements: Counter[tuple[int | None, str]] = Counter()
    for parameter in parameters:
        place = layer_of(parameter.name), module_of(parameter.name)
        zeros[place] += parameter.zeros
        elements[place] += parameter.elements
    return {place: (zeros[place], elements[place]) for place in elements}
