"""Numbers of a stability run as words. Pure."""

from verifier.stability.result import Analysis, Comparison, Difference, Estimate, Rate, Share

ROLES = {"noise": "noise", "candidate": "candidate"}
NOTHING = "–"


def percent(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def interval(low: float, high: float) -> str:
    """Of a share: as few digits as tell its ends apart."""
    digits = 1 if high - low < 0.1 else 0
    return f"{100 * low:.{digits}f}-{100 * high:.{digits}f} %"


def share(of: Share) -> str:
    return f"{percent(of.share)} ({interval(of.low, of.high)})"


def count(of: Share) -> str:
    return f"{of.hits} of {of.of} ({interval(of.low, of.high)})"


def rate(of: Rate) -> str:
    """Per 1,000 tokens."""
    if of.rate is None:
        return NOTHING
    high = "" if of.high is None else _plain(1000 * of.high)
    return f"{_plain(1000 * of.rate)} ({_plain(1000 * of.low)}-{high})"


def _plain(value: float) -> str:
    """Two or three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2f}"


def chance(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def times(of: Estimate | None) -> str:
    return NOTHING if of is None or of.value is None else f"{of.value:.2f}"


def times_with_limits(of: Estimate | None) -> str:
    if of is None or (of.low is None and of.value is None):
        return NOTHING
    if of.value is None:
        return f"more than {of.low:.2f}"
    if of.low is None:
        return f"{of.value:.2f}"
    return f"{of.value:.2f} ({of.low:.2f}-{'' if of.high is None else format(of.high, '.2f')})"


def nats(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def arm(name: str) -> str:
    """As people write it: A1, A2, B; yardsticks have names of their own."""
    return name.upper() if name in ("a1", "a2", "b") else name


def title(comparison: Comparison) -> tuple[str, str]:
    """("A1 vs B", "candidate")."""
    pair = f"{arm(comparison.first)} vs {arm(comparison.second)}"
    if comparison.first == comparison.second:
        pair = f"{arm(comparison.first)} repeats"
    return pair, ROLES.get(comparison.name, "yardstick")


def token(of: int | None) -> str:
    return "its end" if of is None else str(of)


def first_shown(analysis: Analysis) -> Difference | None:
    """The difference to look at first: a hard one of the candidate, else any; in the plan's order."""
    candidate = analysis.comparison("candidate") or analysis.comparison("noise")
    if candidate is None or not candidate.differences:
        return None
    place = {prompt: number for number, prompt in enumerate(analysis.facts.order)}
    return min(candidate.differences, key=lambda d: (not d.hard, place.get(d.prompt, d.prompt), d.repeat))


def kinds(comparison: Comparison) -> str:
    order = ("HARD", "LENGTH", "UNKNOWN", "NEAR_TIE", "EXACT_TIE")
    return ", ".join(f"{kind} {comparison.kinds[kind]}" for kind in order if kind in comparison.kinds) or "none"


def cause(comparison: Comparison) -> str | None:
    """None: nothing differs."""
    found = comparison.cause
    because = "; ".join(found.evidence) or "no evidence for any" if found else ""
    return f"{title(comparison)[0]}: likely cause {found.name} ({because})" if found else None
