"""From the outputs of a run to its result. Pure."""

from collections.abc import Sequence

import msgspec

from verifier.stability.bounds import reading
from verifier.stability.checks import checks, failures
from verifier.stability.comparing import Compared, summarise
from verifier.stability.cost import arm_result
from verifier.stability.differences import Pair, by_arm, pair, pair_repeats, precision_band, tie_band
from verifier.stability.forcing import forced_results
from verifier.stability.gate import Evidence, decide, warnings
from verifier.stability.model import Forced, Output
from verifier.stability.repeats import repeats
from verifier.stability.result import Analysis, Band, Contract, Facts, GateSettings

_ARMS = ("a1", "a2", "b")


def analyse(
    outputs: Sequence[Output],
    forced: Sequence[Forced] = (),
    settings: GateSettings | None = None,
    contract: Contract = "same-model",
    facts: Facts | None = None,
) -> Analysis:
    """All statistics and the verdict. Outputs of the arms a1, a2 and b; any other name is a yardstick."""
    settings, facts = settings or GateSettings(), facts or Facts()
    band, compared = compare(outputs, settings, facts)
    noise, candidate = compared.get("noise"), compared.get("candidate")
    yardsticks = {name: each for name, each in compared.items() if each not in (noise, candidate)}
    results, counts = forced_results(forced, outputs, band, settings)
    found = checks(outputs, list(compared.values()), settings, contract, facts)
    order = facts.order or list(dict.fromkeys(output.prompt for output in outputs))
    evidence = Evidence(noise, candidate, yardsticks, counts, order)
    verdict = decide(contract, evidence, list(failures(found)), settings)
    comparisons = {
        name: summarise(each, None if each is noise else noise, settings, facts) for name, each in compared.items()
    }
    said = warnings(verdict, comparisons.get("noise"), comparisons.get("candidate"), settings)
    said += unchanged(outputs)
    arms = _of_arms(outputs)
    return Analysis(
        facts=facts,
        settings=settings,
        checks=found,
        valid=all(check.ok is not False for check in found),
        band=band,
        prompts=len({output.prompt for output in outputs}),
        arms=[arm_result(arm, of, arms.get("a1", []), settings) for arm, of in arms.items()],
        repeats=[repeats(arm, of, band, settings) for arm, of in by_arm(outputs).items() if _repeated(of)],
        comparisons=list(comparisons.values()),
        yardsticks=[
            reading(candidate, each, (counts.get("b", {}), counts.get(each.second, {})), settings)
            for each in yardsticks.values()
            if candidate
        ],
        forced=results,
        verdict=msgspec.structs.replace(verdict, warnings=said),
    )


def compare(outputs: Sequence[Output], settings: GateSettings, facts: Facts) -> tuple[Band, dict[str, Compared]]:
    """The tie band, and the arms compared: noise, candidate, then the yardsticks by name."""
    arms = by_arm(outputs)
    baseline = arms.get("a1", [])
    pairs: dict[str, tuple[tuple[str, str], list[Pair], int]] = {}
    if noisy := arms.get("a2"):
        pairs["noise"] = (("a1", "a2"), *pair(baseline, noisy))
    elif alone := pair_repeats(baseline):
        pairs["noise"] = (("a1", "a1"), alone, 0)
    for name in sorted(arms, key=lambda arm: (arm != "b", arm)):
        if name not in ("a1", "a2") and baseline:
            pairs["candidate" if name == "b" else name] = (("a1", name), *pair(baseline, arms[name]))
    first = precision_band(settings, facts)
    noise = [Compared.of("noise", *pairs["noise"], first)] if "noise" in pairs else []
    band = tie_band([d for each in noise for d in each.differences], settings, facts)
    return band, {name: Compared.of(name, *each, band) for name, each in pairs.items()}


def unchanged(outputs: Sequence[Output]) -> list[str]:
    """A candidate that is the baseline is accepted, and nobody would notice."""
    epochs = {arm: {o.epoch for o in outputs if o.arm == arm and o.epoch is not None} for arm in ("a1", "b")}
    if not epochs["a1"] & epochs["b"]:
        return []
    return ["b went to the engine that a1 went to, and it was not restarted between: is the change switched on?"]


def _of_arms(outputs: Sequence[Output]) -> dict[str, list[Output]]:
    """In the order in which they are shown; failed requests too."""
    names = {output.arm for output in outputs}
    order = [arm for arm in _ARMS if arm in names] + sorted(names - set(_ARMS))
    return {arm: [output for output in outputs if output.arm == arm] for arm in order}


def _repeated(outputs: Sequence[Output]) -> bool:
    return len({output.prompt for output in outputs}) < len(outputs)
