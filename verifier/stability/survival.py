"""How long two outputs stay identical: survival curve and log-rank test. Pure.

A time is (index, parted): the index of the first differing token, or the length of a pair that never parted (censored:
what it would have done after its end is not known).
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil, log, sqrt
from statistics import median_low

from verifier.stability.intervals import normal_tail, z_value
from verifier.stability.result import CurvePoint, LogRank, Survival

Time = tuple[int, bool]


def survival(times: Sequence[Time]) -> Survival:
    """Share of pairs still identical after so many tokens. Source: Kaplan and Meier, JASA 53 (1958)."""
    events = Counter(index for index, parted in times if parted)
    left = Counter(index for index, parted in times if not parted)
    at_risk, share, middle = len(times), 1.0, None
    points = []
    for index in sorted(events | left):
        # a pair of length n was seen at indexes 0 to n-1 only: at index n it is no longer at risk
        at_risk -= left[index]
        if events[index]:
            share *= 1 - events[index] / at_risk
            points.append(CurvePoint(index=index, share=share, at_risk=at_risk))
            at_risk -= events[index]
            if share <= 0.5 and middle is None:
                middle = index
    return Survival(
        points=points,
        longest=max((index + parted for index, parted in times), default=0),
        median=middle,
        quartiles=quartiles([index for index, parted in times if parted]),
    )


def quartiles(values: Sequence[int]) -> list[int]:
    """Three that occur themselves; none of nothing."""
    if not values:
        return []
    ordered = sorted(values)
    return [ordered[(len(ordered) - 1) * quarter // 4] for quarter in (1, 2, 3)]


def log_rank(first: Sequence[Time], second: Sequence[Time], ratio: float = 1.5) -> LogRank | None:
    """Does the second part sooner? None: nothing parted while both were at risk. `ratio`: for how many events it takes.

    Source: Mantel, Cancer Chemotherapy Reports 50 (1966); the variance is the hypergeometric one.
    """
    leaving = [Counter(times) for times in (first, second)]
    risk = [len(first), len(second)]
    observed = expected = variance = other_expected = 0.0
    for index in sorted({index for index, _ in (*first, *second)}):
        for group in (0, 1):
            risk[group] -= leaving[group][index, False]
        parted = [leaving[group][index, True] for group in (0, 1)]
        events, n = sum(parted), sum(risk)
        if events:
            observed += parted[1]
            expected += events * risk[1] / n
            other_expected += events * risk[0] / n
            if n > 1:
                variance += events * risk[0] / n * risk[1] / n * (n - events) / (n - 1)
        risk = [risk[group] - parted[group] for group in (0, 1)]
    total = round(expected + other_expected)
    if variance <= 0:
        return None
    z = (observed - expected) / sqrt(variance)
    others = total - observed
    hazards = observed / expected / (others / other_expected) if others and expected and other_expected else None
    return LogRank(
        z=z,
        two_sided=2 * normal_tail(abs(z)),
        one_sided=normal_tail(z),
        ratio=hazards,
        events=total,
        needed=events_needed(ratio),
    )


def events_needed(ratio: float, alpha: float = 0.05, power: float = 0.9) -> int:
    """First differences in all, of two arms of one size, to see that ratio of hazards. Source: Schoenfeld (1981)."""
    return ceil(4 * (z_value(1 - alpha) + z_value(power)) ** 2 / log(ratio) ** 2)


def middle(values: Sequence[float]) -> float | None:
    """One that occurs itself; None of nothing."""
    return median_low(values) if values else None
