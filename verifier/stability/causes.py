"""What first differences likely come from. A cause is named only with evidence; else it is unknown. Pure."""

from collections.abc import Sequence
from math import comb

from verifier.stability.differences import Pair, positions_at_risk
from verifier.stability.intervals import beta_cdf
from verifier.stability.model import Served
from verifier.stability.result import Cause, Difference, Facts, GateSettings, LogRank
from verifier.stability.words import chance as by_chance

_NOT_GREEDY = 0.2  # share of first differences at which a side took what it did not hold likeliest
_CHANCE = 0.05


def likely_cause(
    pairs: Sequence[tuple[Pair, Difference | None]],
    soft: LogRank | None,
    has_noise: bool,
    settings: GateSettings,
    facts: Facts,
) -> Cause | None:
    """None: nothing differs. has_noise: there is a noise arm to compare with."""
    found = [(pair, d) for pair, d in pairs if d]
    if not found:
        return None
    hard = [d for _, d in found if d.hard]
    if evidence := _sampling([d for _, d in found]):
        return Cause(name="sampling path", evidence=evidence)
    if hard:
        evidence = _kv_loss(_one_each(pairs), settings)
        return Cause(name="KV loss" if evidence else "unknown", evidence=evidence)
    ties = f"all {len(found)} first differences are ties within the band"
    loads = sorted({(a.load, b.load) for (a, b), _ in found if a.load != b.load})
    said = ", ".join(f"{a} and {b}" for a, b in loads)
    if not has_noise:
        if loads:
            return Cause(name="batch", evidence=[ties, f"the requests ran under other loads ({said} at once)"])
        return Cause(name="numeric path", evidence=[ties])
    if soft and soft.one_sided > _CHANCE:
        again = f"they come no sooner than those of the noise arm (log-rank, one-sided {by_chance(soft.one_sided)})"
        return Cause(name="batch", evidence=[ties, again])
    evidence = [ties, "they come sooner than those of the noise arm" if soft else "the noise arm has none"]
    dtypes = {arm.dtype for arm in facts.arms.values() if arm.dtype}
    if len(dtypes) > 1:
        evidence.append(f"the arms compute in {' and '.join(sorted(dtypes))}")
    return Cause(name="numeric path", evidence=evidence)


def _one_each(pairs: Sequence[tuple[Pair, Difference | None]]) -> list[tuple[Pair, Difference | None]]:
    """One pair of each prompt, a hard one if there is one: repeats of a prompt are no further evidence."""
    chosen: dict[int, tuple[Pair, Difference | None]] = {}
    for each in pairs:
        if each[0][0].prompt not in chosen or (each[1] and each[1].hard):
            chosen[each[0][0].prompt] = each
    return list(chosen.values())


def _sampling(found: Sequence[Difference]) -> list[str]:
    """A token that its own side held less likely than the other's was not taken by a greedy sampler."""
    known = [d for d in found if d.first_margin is not None or d.second_margin is not None]
    behind = [d for d in known if min(d.first_margin or 0.0, d.second_margin or 0.0) < -1e-3]
    if not behind or len(behind) < _NOT_GREEDY * len(known):
        return []
    return [
        f"at {len(behind)} of {len(known)} first differences a side took a token that it did not hold the likeliest"
    ]


def kv_lost(served: Served | None) -> float | None:
    """Share of the context that was not there to be read; None: nothing in the log says it."""
    if served is None:
        return None
    if served.attended is not None and served.context:
        return 1 - served.attended / served.context
    if served.evicted is None:
        return None
    held = (served.computed or 0) + (served.reused or 0)
    return min(served.evicted / held, 1.0) if held else float(served.evicted > 0)


def _kv_loss(pairs: Sequence[tuple[Pair, Difference | None]], settings: GateSettings) -> list[str]:
    """From the engine's log if it says what was lost, else from where hard differences are."""
    lost = [(kv_lost(b.served), kv_lost(a.served), bool(d and d.hard)) for (a, b), d in pairs]
    known = [(more > (less or 0.0), hard) for more, less, hard in lost if more is not None]
    if any(hard for _, hard in known):
        return _by_log(known)
    return _by_budget(pairs, settings)


def _by_log(known: Sequence[tuple[bool, bool]]) -> list[str]:
    hard_lossy = sum(lossy and hard for lossy, hard in known)
    hard = sum(hard for _, hard in known)
    lossy = sum(lossy for lossy, _ in known)
    if not hard_lossy or hard_lossy < 0.9 * hard:
        return []
    evidence = [f"{hard_lossy} of {hard} hard first differences are of requests that read less of their context"]
    if lossy == len(known):
        return [*evidence, "so did all others, so a further change of the server cannot be told from it"]
    chance = _hypergeometric(hard_lossy, lossy, hard, len(known))
    if chance > _CHANCE:
        return []
    return [*evidence, f"{lossy} of all {len(known)} requests did ({by_chance(chance)})"]


def _by_budget(pairs: Sequence[tuple[Pair, Difference | None]], settings: GateSettings) -> list[str]:
    """Are hard differences where the context exceeds the budget, more than the positions at risk are?"""
    if settings.budget is None:
        return []
    beyond = at_risk = hard_beyond = hard = 0
    for (first, second), d in pairs:
        if first.prompt_tokens is None:
            continue
        length = positions_at_risk(first, second, d.index if d else None)
        at_risk += length
        beyond += min(length, max(0, first.prompt_tokens + length - 1 - settings.budget))
        if d and d.hard and d.context is not None:
            hard += 1
            hard_beyond += d.context > settings.budget
    if not hard or not beyond or beyond == at_risk:
        return []
    share = beyond / at_risk
    chance = beta_cdf(share, hard_beyond, hard - hard_beyond + 1) if hard_beyond else 1.0  # binomial: at least so many
    if hard_beyond < 0.9 * hard or chance > _CHANCE:
        return []
    return [
        f"{hard_beyond} of {hard} hard first differences are where the context exceeds the budget of {settings.budget},"
        f" as {share:.0%} of the positions at risk do ({by_chance(chance)})"
    ]


def _hypergeometric(both: int, lossy: int, hard: int, n: int) -> float:
    """Probability that so many of the hard ones are among the lossy ones by chance (Fisher, one-sided)."""
    ways = sum(comb(lossy, k) * comb(n - lossy, hard - k) for k in range(both, min(lossy, hard) + 1))
    return ways / comb(n, hard)
