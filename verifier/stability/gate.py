"""Accept, reject, or say that it cannot be told. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

from verifier.stability.bounds import bounds
from verifier.stability.comparing import Compared
from verifier.stability.intervals import wilson
from verifier.stability.result import (
    EXIT_CODES,
    Bound,
    Comparison,
    Contract,
    Decision,
    GateSettings,
    Sprt,
    Verdict,
)
from verifier.stability.words import chance

_SHORT = 8  # tokens a pair, first difference included


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a gate decides by."""

    noise: Compared | None
    candidate: Compared | None
    yardsticks: Mapping[str, Compared] = field(default_factory=dict)
    forced: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)  # arm, prompt: other, positions
    order: Sequence[int] = ()  # prompts in the plan's order


def decide(contract: Contract, evidence: Evidence, failures: Sequence[str], settings: GateSettings) -> Verdict:
    """failures: why the run is not valid, if it is not."""
    sprt: Sprt | None = None
    found: list[Bound] = []
    if contract == "bitwise":
        decision, reasons = bitwise(evidence, settings)
    elif evidence.candidate is None or not evidence.candidate.pairs:
        decision, reasons = "inconclusive", ["no output of a candidate can be compared with the baseline's"]
    elif contract == "same-model":
        decision, reasons, sprt = same_model(evidence, settings)
    else:
        decision, reasons, found = bounded_change(evidence, settings)
    if failures:
        decision, reasons = "inconclusive", list(failures)
    return Verdict(
        contract=contract,
        decision=decision,
        exit_code=EXIT_CODES[decision],
        reasons=reasons,
        warnings=[],
        sprt=sprt,
        bounds=found,
    )


def bitwise(evidence: Evidence, settings: GateSettings) -> tuple[Decision, list[str]]:
    """No difference at all. Without a candidate: of a server with itself."""
    noise, candidate = evidence.noise, evidence.candidate
    if noise and candidate and (own := len(noise.differences)):
        parted = f"{own} of {len(noise.pairs)} pairs"
        return "inconclusive", [f"the baseline is not bitwise equal to itself: {parted} of the noise arm differ"]
    judged = candidate or noise
    if judged is None or not judged.pairs:
        return "inconclusive", ["there are no two outputs to compare"]
    if different := len({d.prompt for d in judged.differences}):
        return "reject", [f"{different} of {len(judged.prompts())} prompts differ"]
    n = len(judged.prompts())
    upper = wilson(0, n, settings.confidence)[1]
    said = f"0 of {n} prompts differ: at most {upper:.1%} do ({settings.confidence:.0%})"
    if upper > settings.p1:
        return "inconclusive", [f"{said}; too few prompts to say at most {settings.p1:.0%}"]
    return "accept", [said]


def same_model(evidence: Evidence, settings: GateSettings) -> tuple[Decision, list[str], Sprt | None]:
    """Few enough prompts have a first difference that no tie explains."""
    if broken := noise_floor(evidence.noise, settings):
        return "inconclusive", [broken], None
    assert evidence.candidate is not None
    hard = evidence.candidate.hard_prompts()
    order = list(dict.fromkeys([*(prompt for prompt in evidence.order if prompt in hard), *hard]))
    test = sprt((hard[prompt] for prompt in order), settings)
    said = f"{test.hard} of {test.prompts} prompts have a hard first difference"
    if test.prompts < len(order):
        said = f"{said}, which decides ({sum(hard.values())} of {len(order)} in all)"
    if not test.decided:
        more = f"too few prompts: {said}, which lies between the limits of the sequential test"
        return "inconclusive", [more], test
    if test.truncated:
        upper = wilson(test.hard, test.prompts, settings.confidence)[1]
        side = "at most" if test.decision == "accept" else "more than"
        said += f"; by the Wilson bound {upper:.1%}, {side} p1 {settings.p1:.0%}"
    return test.decision, [f"{said} (sequential test, p0 {settings.p0:.1%}, p1 {settings.p1:.1%})"], test


def noise_floor(noise: Compared | None, settings: GateSettings) -> str | None:
    """What is wrong with the bench, if anything."""
    hard = noise.hard_prompts() if noise else {}
    if not hard:
        return "no noise arm: nothing shows that this bench finds a server equal to itself (add a2, or repeats of a1)"
    if sum(hard.values()) > settings.p0 * len(hard):
        return (
            f"the bench is broken, not the candidate: {sum(hard.values())} of {len(hard)} prompts of the noise arm "
            f"have a hard first difference, more than p0 {settings.p0:.1%}"
        )
    return None


def sprt(hard: Iterable[bool], settings: GateSettings) -> Sprt:
    """Wald's sequential test of p0 against p1; may be looked at after every prompt.

    Source: Wald, Sequential Analysis (1947); truncated, then decided by the Wilson upper bound.
    """
    accept_below = log(settings.beta / (1 - settings.alpha))
    reject_above = log((1 - settings.beta) / settings.alpha)
    if_hard = log(settings.p1 / settings.p0)
    if_not = log((1 - settings.p1) / (1 - settings.p0))
    ratio, prompts, count = 0.0, 0, 0
    decision: Decision = "inconclusive"
    truncated = False
    for each in hard:
        prompts += 1
        count += each
        ratio += if_hard if each else if_not
        if ratio <= accept_below:
            decision = "accept"
        elif ratio >= reject_above:
            decision = "reject"
        elif prompts >= settings.truncate:
            truncated = True
            decision = "accept" if wilson(count, prompts, settings.confidence)[1] <= settings.p1 else "reject"
        if decision != "inconclusive":
            break
    return Sprt(
        prompts=prompts,
        hard=count,
        log_ratio=ratio,
        accept_below=accept_below,
        reject_above=reject_above,
        decided=decision != "inconclusive",
        truncated=truncated,
        decision=decision,
    )


def bounded_change(evidence: Evidence, settings: GateSettings) -> tuple[Decision, list[str], list[Bound]]:
    """Within all bounds: accept. Beyond one: reject. Each at a level that keeps the whole at alpha and beta."""
    yardstick = settings.yardstick
    if yardstick is None and len(evidence.yardsticks) == 1:
        yardstick = next(iter(evidence.yardsticks))
    if yardstick is not None and yardstick not in evidence.yardsticks:
        return "inconclusive", [f"there is no yardstick arm {yardstick!r} to measure by"], []
    if (yardstick is None or evidence.noise) and (broken := noise_floor(evidence.noise, settings)):
        return "inconclusive", [broken], []
    assert evidence.candidate is not None
    arms = evidence.forced
    found = bounds(
        evidence.candidate,
        evidence.yardsticks[yardstick] if yardstick else None,
        evidence.noise,
        (arms.get("b", {}), arms.get(yardstick, {}) if yardstick else {}),
        settings,
    )
    if not found:
        return "inconclusive", ["no bound is asked for"], []
    for decision, word in (("reject", "beyond"), ("inconclusive", "not told"), ("accept", "within")):
        if told := [bound for bound in found if bound.decision == decision]:
            reasons = [f"{bound.name} {word}: {bound.detail}" for bound in told]
            return told[0].decision, reasons, found
    raise AssertionError("a bound has one of three decisions")


def warnings(
    verdict: Verdict, noise: Comparison | None, candidate: Comparison | None, settings: GateSettings
) -> list[str]:
    """What does not change the verdict, and should be known."""
    said = []
    if candidate and candidate.soft and candidate.soft.one_sided <= settings.alpha:
        ratio = candidate.soft.ratio
        often = "though the noise arm has none" if ratio is None else f"{ratio:.2g} times as often as in the noise arm"
        said.append(f"ties come {often} (log-rank, one-sided {chance(candidate.soft.one_sided)})")
    elif candidate and candidate.soft and candidate.soft.events < candidate.soft.needed:
        said.append(
            f"too few first differences ({candidate.soft.events} of {candidate.soft.needed}) to say whether ties come "
            f"{settings.soft_ratio:g} times as often as in the noise arm"
        )
    if candidate and candidate.pairs and candidate.hazard.at_risk < _SHORT * candidate.pairs:
        each = candidate.hazard.at_risk / candidate.pairs
        said.append(f"only {each:.0f} tokens a pair were compared: what differs late is not seen (raise max_tokens)")
    for comparison in (noise, candidate):
        if comparison and comparison.unpaired:
            said.append(f"{comparison.name}: {comparison.unpaired} outputs have no counterpart and were left out")
        if comparison and (bounded := sum(d.bounded and not d.hard for d in comparison.differences)):
            said.append(
                f"{comparison.name}: of {bounded} ties the other's token is not among those logged, so the shift is a "
                "lower bound (ask for more log probabilities)"
            )
    if verdict.contract == "bounded-change" and settings.forced_disagreement is not None:
        names = {bound.name for bound in verdict.bounds}
        if verdict.bounds and "teacher-forced disagreement" not in names:
            said.append("nothing was teacher-forced, so that bound was not tested")
    return said
