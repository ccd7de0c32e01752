"""Which outputs are compared, where they part, and whether a tie explains it. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from verifier.stability.model import Output, Top
from verifier.stability.result import Band, Difference, Facts, GateSettings, Kind

Pair = tuple[Output, Output]
_MANTISSA = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # bits, the implied one too
ROUNDING = 1e-4  # nats: log probabilities come as float32, and as decimals
_LEAST_BAND = 0.01  # nats: 1 % of a probability. In float32 the last place is far below what sums in another order do.


def usable(output: Output) -> bool:
    """Can be compared: it came to its end, with ids."""
    return output.error is None and bool(output.ids)


def by_arm(outputs: Iterable[Output]) -> dict[str, list[Output]]:
    """The usable ones, in an order that does not depend on when they came."""
    arms: dict[str, list[Output]] = defaultdict(list)
    for output in sorted(outputs, key=lambda o: (o.prompt, o.repeat, o.cache, o.load, o.request_id)):
        if usable(output):
            arms[output.arm].append(output)
    return arms


def pair(first: Sequence[Output], second: Sequence[Output]) -> tuple[list[Pair], int]:
    """Outputs to the same prompt, repeat and cache state, and how many are left without another.

    Repeats are numbered through all loads of an arm, so a repeat stands for a load: a1 and b meet each under the same
    one, a1 and a2 under different ones, so that the noise floor holds what a batch does.
    """
    places = {(o.prompt, o.repeat, o.cache): o for o in first}
    pairs = [(other, o) for o in second if (other := places.get((o.prompt, o.repeat, o.cache)))]
    met = {other.request_id for other, _ in pairs}
    return pairs, sum(o.request_id not in met for o in first) + len(second) - len(pairs)


def pair_repeats(outputs: Sequence[Output]) -> list[Pair]:
    """The first output to each prompt and cache state, with each of the others: noise where there is no second arm."""
    first: dict[tuple[int, str], Output] = {}
    pairs = []
    for output in sorted(outputs, key=lambda o: (o.prompt, o.cache, o.load, o.repeat)):
        begin = first.setdefault((output.prompt, output.cache), output)
        if begin is not output:
            pairs.append((begin, output))
    return pairs


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index from 0; None: the same."""
    if first == second:
        return None
    return next(index for index, (a, b) in enumerate(zip_longest(first, second)) if a != b)


def parting(first: Output, second: Output) -> int | None:
    """Index of the first difference; None: the same, as far as both go.

    An output that was cut short (another context length, another cap of the server) says nothing of what would follow.
    """
    index = first_difference(first.ids, second.ids)
    if index is not None and any(index == len(o.ids) and o.finish == "length" for o in (first, second)):
        return None
    return index


def positions_at_risk(first: Output, second: Output, index: int | None) -> int:
    """Token positions at which a pair could have parted, up to where it did."""
    return min(len(first.ids), len(second.ids)) if index is None else index + 1


def difference(first: Output, second: Output, band: Band) -> Difference | None:
    """Where a pair parts, and of what kind that is; None: it does not."""
    index = parting(first, second)
    if index is None:
        return None
    a = first.ids[index] if index < len(first.ids) else None
    b = second.ids[index] if index < len(second.ids) else None
    lead_a, bounded_a = _lead(first.top, index, a, b)
    lead_b, bounded_b = _lead(second.top, index, b, a)
    shift = abs(lead_a) + abs(lead_b) if lead_a is not None and lead_b is not None else None
    kind = _kind(a, b, lead_a, lead_b, shift, band)
    known = [abs(lead) for lead in (lead_a, lead_b) if lead is not None]
    return Difference(
        prompt=first.prompt,
        repeat=second.repeat,
        load=second.load,
        cache=second.cache,
        index=index,
        context=None if first.prompt_tokens is None else first.prompt_tokens + index,
        kind=kind,
        hard=kind == "HARD" or (kind == "LENGTH" and not (known and max(known) <= band.margin + ROUNDING)),
        first=first.request_id,
        second=second.request_id,
        first_id=a,
        second_id=b,
        first_margin=lead_a,
        second_margin=lead_b,
        shift=shift,
        bounded=bounded_a or bounded_b,
        second_choice=_second_choice(first.top, index, a, b),
    )


def _lead(tops: Sequence[Top], index: int, own: int | None, other: int | None) -> tuple[float | None, bool]:
    """By how much `own` led `other`, in nats; True: the other is not in the list, so by at least that.

    Below 0: it did not lead, so something other than the likeliest token was taken. Where the other had ended, the lead
    over the runner-up: more is not known of it.
    """
    if own is None or index >= len(tops) or len(tops[index]) < 2:
        return None, False
    top = tops[index]
    known = dict(top)
    if own not in known:
        return None, False
    if other in known:
        return known[own] - known[other], False
    if other is None:
        return known[own] - max(value for token, value in top if token != own), False
    return known[own] - min(value for token, value in top if token != own), True


def _kind(
    a: int | None, b: int | None, lead_a: float | None, lead_b: float | None, shift: float | None, band: Band
) -> Kind:
    if a is None or b is None:
        return "LENGTH"
    leads = [abs(lead) for lead in (lead_a, lead_b) if lead is not None]
    if not leads:
        return "UNKNOWN"
    tied = shift <= band.shift + ROUNDING if shift is not None else leads[0] <= band.margin + ROUNDING
    if not tied:
        return "HARD"
    return "EXACT_TIE" if min(leads) < ROUNDING else "NEAR_TIE"


def _second_choice(tops: Sequence[Top], index: int, own: int | None, other: int | None) -> bool | None:
    if own is None or other is None or index >= len(tops) or len(tops[index]) < 2:
        return None
    return next(token for token, _ in tops[index] if token != own) == other


def precision_band(settings: GateSettings, facts: Facts) -> Band:
    """2 and 4 units in the last place of the largest logit, in the coarser of the arms' number formats."""
    dtype = _plain(settings.dtype) or _coarsest(facts) or ""
    assumed = dtype not in _MANTISSA
    bits = _MANTISSA["bfloat16" if assumed else dtype]
    binade = 1.0
    while binade * 2 < settings.largest_logit:
        binade *= 2
    unit = binade * 2.0 ** (1 - bits)
    said = "bfloat16 (assumed)" if assumed else dtype
    return Band(
        margin=max(2.4 * unit, _LEAST_BAND),  # 2, and a fifth more: 0.3 where the unit is 0.125
        shift=max(4 * unit, _LEAST_BAND),
        source="precision",
        detail=f"2 and 4 units in the last place ({unit:.2g}) of logits up to {settings.largest_logit:g} in {said}",
    )


def _coarsest(facts: Facts) -> str | None:
    """None: an arm does not say what it computes in, and that may be coarser than the others."""
    known = [name for arm in facts.arms.values() if (name := _plain(arm.dtype)) in _MANTISSA]
    if len(known) < len(facts.arms):
        return None
    return min(known, key=lambda name: _MANTISSA[name], default=None)


def _plain(dtype: str | None) -> str:
    return (dtype or "").removeprefix("torch.")


def tie_band(noise: Iterable[Difference], settings: GateSettings, facts: Facts) -> Band:
    """From the noise arm where it parted often enough, else from the precision.

    noise: classed by the precision's band. Repeats fork at the same ties, so each place of a prompt counts once.
    """
    default = precision_band(settings, facts)
    places: Mapping[tuple[int, int], Difference] = {
        (d.prompt, d.index): d for d in noise if d.shift is not None and d.kind != "LENGTH"
    }
    largest = max((d.shift for d in places.values() if d.shift is not None), default=0.0)
    baseline = _plain(facts.arms["a1"].dtype) if "a1" in facts.arms else ""
    if baseline in _MANTISSA and baseline != _coarsest(facts):
        return _because(default, f"the noise arm computes in {baseline}; another arm does not, or does not say")
    if len(places) < settings.noise_differences:
        few = f"the noise arm has {len(places)} first differences, {settings.noise_differences} would give the band"
        return _because(default, few)
    if largest > 2 * default.shift:  # a band that wide would hide the very fault that the noise floor is there to show
        return _because(default, f"the noise arm has shifts up to {largest:.2f} nats, which is no rounding")
    shift = max(largest * 1.2, _LEAST_BAND)  # the largest of so many is not the largest there is
    return Band(
        margin=max(shift * default.margin / default.shift, _LEAST_BAND),
        shift=shift,
        source="noise arm",
        detail=f"largest shift ({largest:.3g} nats) of {len(places)} first differences of the noise arm, plus a fifth",
    )


def _because(band: Band, reason: str) -> Band:
    return Band(margin=band.margin, shift=band.shift, source=band.source, detail=f"{band.detail}; {reason}")
