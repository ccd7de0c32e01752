"""Intervals for shares, rates and ratios, from the standard library alone. Pure."""

from collections.abc import Callable, Sequence
from math import comb, erfc, exp, inf, lgamma, log, sqrt
from random import Random
from statistics import NormalDist, fmean

_NORMAL = NormalDist()
_TINY = 1e-300
_STEPS = 200  # of a continued fraction or a bisection; both converge long before


def z_value(probability: float) -> float:
    """The standard normal quantile."""
    return _NORMAL.inv_cdf(probability)


def normal_tail(z: float) -> float:
    """Probability of more than z."""
    return erfc(z / sqrt(2)) / 2


def wilson(hits: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a share. Unlike the usual one it holds at 0 and 1. Source: Wilson, JASA 22 (1927)."""
    if not of:
        return 0.0, 1.0
    z2 = z_value(0.5 + confidence / 2) ** 2
    share = hits / of
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = sqrt(z2 * (share * (1 - share) / of + z2 / (4 * of * of))) / (1 + z2 / of)
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == of else middle + half)


def share_limits(hits: float, of: float, below: float, above: float) -> tuple[float, float]:
    """Exact limits of a share: too high with probability `below`, too low with `above`.

    Source: Clopper and Pearson, Biometrika 26 (1934). Fractions are allowed, for effective sample sizes.
    """
    low = _solve(lambda p: beta_cdf(p, hits, of - hits + 1), below, 0, 1) if hits > 0 else 0.0
    high = _solve(lambda p: beta_cdf(p, hits + 1, of - hits), 1 - above, 0, 1) if hits < of else 1.0
    return low, high


def poisson(events: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a Poisson mean. Source: Garwood, Biometrika 28 (1936)."""
    tail = (1 - confidence) / 2
    top = events + 20 * sqrt(events + 1) + 20  # far beyond any limit that is asked for
    low = _solve(lambda mean: gamma_cdf(mean, events), tail, 0, top) if events else 0.0
    return low, _solve(lambda mean: gamma_cdf(mean, events + 1), 1 - tail, 0, top)


def ratio_limits(
    first: int, first_risk: float, second: int, second_risk: float, below: float, above: float
) -> tuple[float, float]:
    """Exact limits of the ratio of two Poisson rates, first over second; inf where nothing bounds it.

    Given the sum of the events, those of the first are binomial. Where both rates come from the same prompts, what they
    share makes the limits wider than need be, not narrower. Source: Przyborowski and Wilenski, Biometrika 31 (1940).
    """
    if not first + second:
        return 0.0, inf
    low, high = share_limits(first, first + second, below, above)
    scale = second_risk / first_risk
    return low / (1 - low) * scale if low < 1 else inf, high / (1 - high) * scale if high < 1 else inf


def mcnemar(first_only: int, second_only: int) -> float:
    """Exact two-sided probability that paired yes-no answers disagree so unevenly by chance."""
    n = first_only + second_only
    tail: float = sum(comb(n, k) for k in range(min(first_only, second_only) + 1)) / (1 << n)
    return min(1.0, 2 * tail)


def paired_difference(
    both: int, first_only: int, second_only: int, neither: int, confidence: float
) -> tuple[float, float]:
    """Interval of (share of first) - (share of second), of answers paired by prompt.

    Source: Newcombe, Statistics in Medicine 17 (1998) 2635, method 10.
    """
    n = both + first_only + second_only + neither
    if not n:
        return -1.0, 1.0
    one, two = both + first_only, both + second_only
    p1, p2 = one / n, two / n
    low1, high1 = wilson(one, n, confidence)
    low2, high2 = wilson(two, n, confidence)
    product = one * two * (n - one) * (n - two)
    odds = both * neither - first_only * second_only
    corrected = max(odds - n / 2, 0) if odds > 0 else odds
    phi = corrected / sqrt(product) if product else 0.0

    def reach(a: float, b: float) -> float:
        return sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p1 - p2 - reach(p1 - low1, high2 - p2), p1 - p2 + reach(p2 - low2, high1 - p1)


def median_limits(values: Sequence[float], confidence: float) -> tuple[float | None, float | None]:
    """Interval of the median by order statistics, whatever the distribution; None where too few bound it."""
    n, tail, outside = len(values), (1 - confidence) / 2, 0.0
    ordered = sorted(values)
    rank = 0  # the rank-th smallest (from 1) bounds it, if at most this share of samples has fewer below the median
    while rank < n // 2 and (outside := outside + exp(_log_comb(n, rank) - n * log(2))) <= tail:
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else (None, None)


def resampled(
    groups: Sequence[tuple[float, float]], settings: tuple[int, int], below: float, above: float
) -> tuple[float, float]:
    """Percentile limits of sum(numerators) / sum(denominators) over resampled groups. settings: (seed, resamples)."""
    seed, resamples = settings
    random = Random(seed)
    size = range(len(groups))
    ratios = []
    for _ in range(resamples):
        drawn = random.choices(groups, k=len(size))
        bottom = sum(pair[1] for pair in drawn)
        ratios.append(sum(pair[0] for pair in drawn) / bottom if bottom else inf)
    ratios.sort()
    return ratios[int(below * resamples)], ratios[min(int((1 - above) * resamples), resamples - 1)]


def t_value(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution, for probabilities above a half."""
    # P(T > t) is half of I(freedom / (freedom + t^2); freedom/2, 1/2)
    x = _solve(lambda p: beta_cdf(p, freedom / 2, 0.5), 2 * (1 - probability), 0, 1)
    return sqrt(freedom * (1 / x - 1))


def clustered_share(groups: Sequence[tuple[float, float]], below: float, above: float) -> tuple[float, float]:
    """Limits of a small share, of (hits, of) by group: hits come together, and some groups hold most of them.

    Where a dozen groups happen to lack those few, the share is small and looks sure, and resampling is too narrow. So
    groups are taken to be as uneven as exponential ones at least, whose mean is gamma distributed
    (benchmarks/gate_simulation.py has the rates).
    """
    hits = sum(g[0] for g in groups)
    error = max(_jackknife(groups), 1 / sqrt(len(groups)), 1 / sqrt(hits))
    if error == inf:
        return 0.0, 1.0
    share, count = hits / sum(g[1] for g in groups), 1 / error**2  # as many groups, exponential
    top = count + 20 * sqrt(count) + 20
    least, most = (_solve(lambda x: gamma_cdf(x, count), p, 0, top) for p in (above, 1 - below))
    return share * count / most, min(share * count / least, 1.0) if least else 1.0


def clustered_ratio(groups: Sequence[tuple[float, float]], below: float, above: float) -> tuple[float, float]:
    """Limits of sum(numerators) / sum(denominators), both counted in the same groups: jackknife of the logarithm.

    No surer than two Poisson counts of that size: groups that all count 0 look as if 0 were certain.
    Source: Miller, Biometrika 61 (1974).
    """
    top, bottom, n = sum(g[0] for g in groups), sum(g[1] for g in groups), len(groups)
    error = max(_jackknife(groups), sqrt(1 / top + 1 / bottom))
    if error == inf:
        return 0.0, inf
    ratio = top / bottom
    return ratio * exp(-t_value(1 - below, n - 1) * error), ratio * exp(t_value(1 - above, n - 1) * error)


def _jackknife(groups: Sequence[tuple[float, float]]) -> float:
    """Standard error of the logarithm of sum(numerators) / sum(denominators); inf where one group has all."""
    top, bottom, n = sum(g[0] for g in groups), sum(g[1] for g in groups), len(groups)
    if any(top - x <= 0 or bottom - of <= 0 for x, of in groups):
        return inf
    left = [log((top - x) / (bottom - of)) for x, of in groups]
    mean = fmean(left)
    return sqrt((n - 1) / n * sum((each - mean) ** 2 for each in left))


def gamma_cdf(x: float, shape: float) -> float:
    """Regularised lower incomplete gamma function: P(Poisson(x) >= shape). Source: Numerical Recipes 6.2."""
    if x <= 0:
        return 0.0
    if x < shape + 1:
        term = total = 1 / shape
        step = shape
        while term > total * 1e-16:
            step += 1
            term *= x / step
            total += term
        return total * exp(-x + shape * log(x) - lgamma(shape))
    b = x + 1 - shape
    c, d = 1 / _TINY, 1 / b
    h = d
    for i in range(1, 100 * _STEPS):
        an = -i * (i - shape)
        b += 2
        d = 1 / _away_from_0(an * d + b)
        c = _away_from_0(b + an / c)
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return 1 - exp(-x + shape * log(x) - lgamma(shape)) * h


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function. Source: Numerical Recipes 6.4."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    c = 1.0
    d = 1 / _away_from_0(1 - (a + b) * x / (a + 1))
    h = d
    for m in range(1, 100 * _STEPS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_0(1 + factor * d)
            c = _away_from_0(1 + factor / c)
            h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return h


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _log_comb(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _solve(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a rising function reaches the target."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
