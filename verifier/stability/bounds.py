"""The conditions of bounded-change, and how a candidate stands to a yardstick. Pure.

Accepting needs every bound to be met with confidence, each at level beta: a candidate beyond one of them is accepted at
most that often (intersection-union). Rejecting needs one bound to be exceeded with confidence, each at alpha / bounds.
"""

from collections.abc import Mapping
from math import inf

from verifier.stability.comparing import Compared
from verifier.stability.forcing import disagreement
from verifier.stability.intervals import clustered_ratio, mcnemar, paired_difference, ratio_limits, share_limits
from verifier.stability.result import Bound, Decision, Estimate, GateSettings, Reading, YardstickReading

Counts = Mapping[int, tuple[int, int]]  # prompt: positions with another argmax, positions
_LEAST_PROMPTS = 8  # of fewer, resampling says nothing


def bounds(
    candidate: Compared,
    yardstick: Compared | None,
    noise: Compared | None,
    forced: tuple[Counts, Counts],
    settings: GateSettings,
) -> list[Bound]:
    """Those that are asked for and can be tested. forced: of the candidate and the yardstick."""
    ask_forced = bool(forced[0]) and (settings.forced_ratio if yardstick else settings.forced_disagreement) is not None
    number = (settings.hard_rate is not None) + (settings.hazard_ratio is not None) + ask_forced
    if not number:
        return []
    levels = settings.alpha / number, settings.beta
    found = []
    if settings.hard_rate is not None:
        found.append(_hard(candidate, yardstick, levels, settings))
    reference = yardstick or noise
    if settings.hazard_ratio is not None and reference:
        found.append(_hazard(candidate, reference, levels, settings.hazard_ratio))
    if ask_forced:
        found.append(_forced(forced, yardstick is not None, levels, settings))
    return found


def _decision(low: float, high: float, bound: float) -> Decision:
    return "accept" if high <= bound else "reject" if low > bound else "inconclusive"


def _bound(name: str, estimate: Estimate, bound: float, detail: str) -> Bound:
    low = -inf if estimate.low is None else estimate.low
    high = inf if estimate.high is None else estimate.high
    return Bound(name=name, estimate=estimate, bound=bound, decision=_decision(low, high, bound), detail=detail)


def _hard(
    candidate: Compared, yardstick: Compared | None, levels: tuple[float, float], settings: GateSettings
) -> Bound:
    hard = candidate.hard_prompts()
    if yardstick is None:
        count, n = sum(hard.values()), len(hard)
        low, high = share_limits(count, n, *levels)
        estimate = Estimate(value=count / n, low=low, high=high, method="Clopper-Pearson, one-sided")
        bound = settings.hard_rate or 0.0
        return _bound("hard rate", estimate, bound, f"{count} of {n} prompts ({_percent(estimate)}), bound {bound:.1%}")
    both, ours, theirs, neither = _paired(candidate, yardstick)
    n = both + ours + theirs + neither
    # each limit at its own level: the two-sided confidence whose tail is that level
    low = paired_difference(both, ours, theirs, neither, 1 - 2 * levels[0])[0]
    high = paired_difference(both, ours, theirs, neither, 1 - 2 * levels[1])[1]
    value = (ours - theirs) / n if n else None
    estimate = Estimate(value=value, low=low, high=high, method="Newcombe, paired by prompt, one-sided")
    margin = settings.hard_margin
    detail = f"{both + ours} against {both + theirs} of {n} prompts ({_percent(estimate)}), margin {margin:.1%}"
    return _bound("hard rate over yardstick", estimate, margin, detail)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.low or 0:.1%} to {estimate.high or 0:.1%}"


def _hazard(candidate: Compared, reference: Compared, levels: tuple[float, float], bound: float) -> Bound:
    ours, theirs = candidate.one_each_events(), reference.one_each_events()
    name = f"hazard ratio to {'the noise arm' if reference.name == 'noise' else reference.name}"
    counts = f"{ours[0]} in {ours[1]} positions against {theirs[0]} in {theirs[1]}"
    if not ours[0]:  # whatever it is a multiple of, it is below 3 in the positions at risk: within any bound
        estimate = Estimate(value=0.0, low=0.0, high=0.0, method="no first difference")
        return _bound(name, estimate, bound, f"{counts}, bound {bound:g}")
    estimate = _ratio(ours, theirs, levels)
    return _bound(name, estimate, bound, f"{counts} ({_times(estimate)}), bound {bound:g}")


def _ratio(ours: tuple[int, int], theirs: tuple[int, int], levels: tuple[float, float]) -> Estimate:
    if not ours[1] or not theirs[1]:
        return Estimate(value=None, low=None, high=None, method="nothing at risk")
    low, high = ratio_limits(*ours, *theirs, *levels)
    value = ours[0] / ours[1] / (theirs[0] / theirs[1]) if theirs[0] else None
    method = "conditional on the sum, one pair a prompt"
    return Estimate(value=value, low=low, high=high if high < inf else None, method=method)


def _times(estimate: Estimate) -> str:
    if estimate.low is None:
        return "not known"
    return f"{estimate.low:.2f} to {'any' if estimate.high is None else format(estimate.high, '.2f')} times"


def _forced(
    forced: tuple[Counts, Counts], by_yardstick: bool, levels: tuple[float, float], settings: GateSettings
) -> Bound:
    name = "teacher-forced disagreement"
    if by_yardstick:
        bound = settings.forced_ratio or 0.0
        estimate = forced_ratio(*forced, levels)
        return _bound(name, estimate, bound, f"{_times(estimate)} the yardstick's, bound {bound:g}; prefill path only")
    bound = settings.forced_disagreement or 0.0
    groups = [(float(other), float(of)) for other, of in forced[0].values()]
    estimate = disagreement(groups, *levels)
    if len(groups) < _LEAST_PROMPTS:
        estimate = Estimate(value=estimate.value, low=None, high=None, method=f"fewer than {_LEAST_PROMPTS} prompts")
    return _bound(name, estimate, bound, f"{_percent(estimate)} of positions, bound {bound:.1%}; prefill path only")


def forced_ratio(ours: Counts, theirs: Counts, levels: tuple[float, float]) -> Estimate:
    """Disagreement of one arm in units of another's, over prompts that both were forced through."""
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < _LEAST_PROMPTS:
        return Estimate(value=None, low=None, high=None, method=f"fewer than {_LEAST_PROMPTS} prompts")
    if not any(ours[p][0] for p in shared):
        return Estimate(value=0.0, low=0.0, high=0.0, method="no disagreement")  # as of no first difference
    share = [sum(counts[p][1] for p in shared) for counts in (ours, theirs)]
    # half a disagreement more on either side, spread over the prompts: a ratio to 0 has no limits
    spread = 0.5 / len(shared)
    groups = [(ours[p][0] + spread, theirs[p][0] + spread) for p in shared]
    low, high = clustered_ratio(groups, *levels)
    scale = share[1] / share[0]
    value = sum(g[0] for g in groups) / sum(g[1] for g in groups) * scale
    top = high * scale if high < inf else None
    return Estimate(value=value, low=low * scale, high=top, method="paired by prompt, jackknife")


def _paired(candidate: Compared, yardstick: Compared) -> tuple[int, int, int, int]:
    """Prompts hard in both, in the candidate only, in the yardstick only, in neither."""
    ours, theirs = candidate.hard_prompts(), yardstick.hard_prompts()
    pairs = [(ours[prompt], theirs[prompt]) for prompt in ours.keys() & theirs.keys()]
    return (
        pairs.count((True, True)),
        pairs.count((True, False)),
        pairs.count((False, True)),
        pairs.count((False, False)),
    )


def reading(
    candidate: Compared, yardstick: Compared, forced: tuple[Counts, Counts], settings: GateSettings
) -> YardstickReading:
    """Less, as much or more than the yardstick. Hard differences weigh more than how soon ties come."""
    both, ours, theirs, neither = _paired(candidate, yardstick)
    tail = (1 - settings.confidence) / 2
    p = mcnemar(ours, theirs)
    low, high = paired_difference(both, ours, theirs, neither, settings.confidence)
    n = both + ours + theirs + neither
    hard = Estimate(value=(ours - theirs) / n if n else None, low=low, high=high, method="Newcombe, paired by prompt")
    hazard = _ratio(candidate.one_each_events(), yardstick.one_each_events(), (tail, tail))
    return YardstickReading(
        arm=yardstick.second,
        reading=_reading(p, ours > theirs, hard, hazard, settings),
        prompts=n,
        hazard_ratio=hazard,
        hard_candidate_only=ours,
        hard_yardstick_only=theirs,
        hard_p=p,
        hard_difference=hard,
        forced_ratio=forced_ratio(*forced, (tail, tail)) if all(forced) else None,
    )


def _reading(p: float, harder: bool, hard: Estimate, hazard: Estimate, settings: GateSettings) -> Reading:
    if p <= 1 - settings.confidence:
        return "more" if harder else "less"
    if hazard.low is not None and hazard.low > 1:
        return "more"
    if hazard.high is not None and hazard.high < 1:
        return "less"
    width = settings.hazard_ratio or 1.5
    near = hazard.low is not None and hazard.high is not None and 1 / width <= hazard.low <= hazard.high <= width
    level = max(abs(hard.low or 0.0), abs(hard.high or 0.0)) <= settings.hard_margin
    return "as much" if near and level else "not told apart"
