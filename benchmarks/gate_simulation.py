"""How often the stability gate is wrong: campaigns of known truth, judged by the gate itself.

    python -m benchmarks.gate_simulation [--campaigns 2000] [--seed 1]

Each campaign is a run's outputs (a1, a2, b, sometimes a yardstick), put together at random, which then go through the
product's own pairing, classing, tie band and gate. Exit code 1 if a rate of wrong verdicts is beyond the stated 5 % by
more than chance.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from verifier.stability.analysis import compare
from verifier.stability.forcing import forced_results
from verifier.stability.gate import Evidence, decide
from verifier.stability.intervals import wilson
from verifier.stability.model import Forced, Output, Top
from verifier.stability.result import Contract, Decision, Facts, GateSettings

_TOKENS = 24
_TIES = (0.0, 0.0625, 0.125, 0.25)  # nats that the other side's token leads by, where a tie parts them
_HARD = 1.0
_REFERENCE_MARGIN = 0.125  # by which a1's token leads there
_STATED = 0.05
_accept: Decision = "accept"
_reject: Decision = "reject"


@dataclass(frozen=True)
class Truth:
    """What is so of a server."""

    hard: float = 0.0  # share of prompts with a hard first difference
    ties: float = 0.01  # hazard of a tie a token
    forced: float = 0.0  # share of positions with another argmax, teacher-forced


@dataclass(frozen=True)
class Scenario:
    name: str
    wrong: Decision | None  # the verdict that must be rare; None: only the sizes are of interest
    contract: Contract
    prompts: int
    arms: dict[str, Truth]  # besides a1
    settings: GateSettings = field(default_factory=GateSettings)


class Pool:
    """Outputs are the same objects in all campaigns: making them would cost more than judging them."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int, int | None, float], Output] = {}

    def output(self, arm: str, prompt: int, index: int | None = None, margin: float = 0.0) -> Output:
        """Parts from a1 at the index; its token leads a1's there by the margin."""
        key = arm, prompt, index, margin
        if key not in self._outputs:
            ids = [1000 * prompt + n for n in range(_TOKENS)]
            top: list[Top] = [[(token, -0.5), (-token - 1, -0.5 - _REFERENCE_MARGIN)] for token in ids]
            if index is not None:
                own = -ids[index] - 1
                top = [*top[:index], [(own, -0.5), (ids[index], -0.5 - margin)], *top[index + 1 :]]
                ids = [*ids[:index], own, *ids[index + 1 :]]
            self._outputs[key] = Output(
                arm=arm, prompt=prompt, repeat=0, load=1, cache="cold", request_id=f"{arm}-{prompt}", ids=ids, top=top
            )
        return self._outputs[key]

    def of(self, arm: str, prompt: int, truth: Truth, chance: random.Random) -> Output:
        if chance.random() < truth.hard:
            return self.output(arm, prompt, chance.randrange(_TOKENS), _HARD)
        if truth.ties:
            index = int(chance.expovariate(truth.ties))
            if index < _TOKENS:
                return self.output(arm, prompt, index, chance.choice(_TIES))
        return self.output(arm, prompt)


def forced(arm: str, prompt: int, truth: Truth, chance: random.Random, positions: int = 200) -> Forced:
    """Disagreements come together: prompts differ threefold and more in how many they have."""
    share = truth.forced * chance.gammavariate(1.0, 1.0)
    ids = list(range(positions))
    top: list[Top] = [[(-1 if chance.random() < share else token, -0.5), (-2, -1.0)] for token in ids]
    return Forced(arm=arm, prompt=prompt, reference=f"a1-{prompt}", ids=ids, top=top)


def campaigns(scenario: Scenario, count: int, seed: int) -> Iterator[tuple[Decision, int]]:
    """(verdict, prompts that it took) of each."""
    chance, pool = random.Random(f"{seed} {scenario.name}"), Pool()
    order = list(range(scenario.prompts))
    for _ in range(count):
        outputs = [pool.output("a1", prompt) for prompt in order]
        for arm, truth in scenario.arms.items():
            outputs += [pool.of(arm, prompt, truth, chance) for prompt in order]
        taught = [
            forced(arm, prompt, truth, chance)
            for arm, truth in scenario.arms.items()
            for prompt in order[:16]
            if truth.forced
        ]
        band, compared = compare(outputs, scenario.settings, Facts())
        _, counts = forced_results(taught, outputs, band, scenario.settings)
        yardsticks = {name: each for name, each in compared.items() if name not in ("noise", "candidate")}
        evidence = Evidence(compared.get("noise"), compared.get("candidate"), yardsticks, counts, order)
        verdict = decide(scenario.contract, evidence, [], scenario.settings)
        yield verdict.decision, verdict.sprt.prompts if verdict.sprt else scenario.prompts


def _arms(hard: float) -> dict[str, Truth]:
    return {"a2": Truth(), "b": Truth(hard)}


def scenarios() -> list[Scenario]:
    found = [
        Scenario(f"same-model, true hard rate {hard:.1%}", wrong, "same-model", 600, _arms(hard))
        for hard, wrong in _rates()
    ]
    stricter = GateSettings(p0=0.01, p1=0.05)
    for hard, wrong in ((0.01, _reject), (0.05, _accept)):
        name = f"same-model 1 % against 5 %, true {hard:.1%}"
        found.append(Scenario(name, wrong, "same-model", 600, _arms(hard), stricter))
    return found + list(_bounded())


def _rates() -> list[tuple[float, Decision | None]]:
    return [(0.0, _reject), (0.01, _reject), (0.02, _reject), (0.035, None), (0.06, _accept), (0.1, _accept)]


def _bounded() -> Iterator[Scenario]:
    """At the bound itself: there either verdict is wrong, so each must be rare."""
    hard = GateSettings(hazard_ratio=None, forced_disagreement=None)
    hazard = GateSettings(hard_rate=None, forced_disagreement=None)
    taught = GateSettings(hard_rate=None, hazard_ratio=None)
    quiet, noisy = Truth(ties=0.005), Truth(ties=0.01)
    for wrong in (_accept, _reject):
        yield Scenario(
            f"bounded-change, hard rate at its bound of 6 %, {wrong}",
            wrong,
            "bounded-change",
            300,
            {"a2": quiet, "b": Truth(0.06)},
            hard,
        )
        yield Scenario(
            f"bounded-change, hard rate 4 % above a yardstick's 2 %, {wrong}", wrong, "bounded-change", 300,
            {"a2": quiet, "b": Truth(0.06), "fp8": Truth(0.02)}, hard,
        )  # fmt: skip
        yield Scenario(
            f"bounded-change, hazard 1.5 times the noise, {wrong}", wrong, "bounded-change", 300,
            {"a2": noisy, "b": Truth(ties=0.015)}, hazard,
        )  # fmt: skip
        yield Scenario(
            f"bounded-change, teacher-forced disagreement at 3 %, {wrong}", wrong, "bounded-change", 30,
            {"a2": quiet, "b": Truth(forced=0.03)}, taught,
        )  # fmt: skip
        yield Scenario(
            f"bounded-change, teacher-forced 1.5 times a yardstick's 2 %, {wrong}", wrong, "bounded-change", 30,
            {"a2": quiet, "b": Truth(forced=0.03), "fp8": Truth(forced=0.02)}, taught,
        )  # fmt: skip
    everything = GateSettings()
    yield Scenario(
        "bounded-change, all three bounds met by half, reject",
        _reject,
        "bounded-change",
        300,
        {"a2": noisy, "b": Truth(0.02, 0.01, 0.015)},
        everything,
    )


def measure(scenario: Scenario, count: int, seed: int) -> tuple[Counter[Decision], list[int]]:
    decisions: Counter[Decision] = Counter()
    sizes = []
    for decision, size in campaigns(scenario, count, seed):
        decisions[decision] += 1
        sizes.append(size)
    return decisions, sorted(sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--campaigns", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORDS", help="scenarios whose name holds these")
    options = parser.parse_args(argv)
    worst = 0
    show = partial(print, flush=True)
    show("| truth | accept | reject | inconclusive | wrong (95 %) | prompts: mean, 95 % within |")
    show("|---|---|---|---|---|---|")
    began = time.perf_counter()
    for scenario in scenarios():
        if options.only not in scenario.name:
            continue
        decisions, sizes = measure(scenario, options.campaigns, options.seed)
        n = len(sizes)
        said = "–"
        if scenario.wrong:
            low, high = wilson(decisions[scenario.wrong], n)
            said = f"{decisions[scenario.wrong] / n:.1%} ({low:.1%}-{high:.1%})"
            worst |= low > _STATED
        shares = " | ".join(f"{decisions[decision] / n:.1%}" for decision in ("accept", "reject", "inconclusive"))
        show(f"| {scenario.name} | {shares} | {said} | {sum(sizes) / n:.0f}, {sizes[int(0.95 * n)]} |")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    return worst


if __name__ == "__main__":
    sys.exit(main())
