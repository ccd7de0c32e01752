"""Two arms side by side: how often, how soon and how their outputs part. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.stability.causes import likely_cause
from verifier.stability.differences import Pair, difference, positions_at_risk
from verifier.stability.intervals import poisson, resampled, wilson
from verifier.stability.result import Band, Comparison, Difference, Facts, GateSettings, LengthBin, LogRank, Rate, Share
from verifier.stability.survival import Time, log_rank, middle, quartiles, survival

_LENGTHS = (0, 256, 1024, 4096, 16384, 65536)
_ENOUGH_TO_RESAMPLE = 10  # events; of fewer, resampling knows too little


@dataclass(frozen=True, slots=True)
class Compared:
    """The pairs of two arms, each with its first difference."""

    name: str
    first: str
    second: str
    pairs: list[tuple[Pair, Difference | None]]
    unpaired: int

    @classmethod
    def of(cls, name: str, arms: tuple[str, str], pairs: Sequence[Pair], unpaired: int, band: Band) -> "Compared":
        return cls(name, *arms, [(each, difference(*each, band)) for each in pairs], unpaired)

    @property
    def differences(self) -> list[Difference]:
        return [found for _, found in self.pairs if found]

    def prompts(self) -> dict[int, list[tuple[Pair, Difference | None]]]:
        groups: dict[int, list[tuple[Pair, Difference | None]]] = defaultdict(list)
        for each in self.pairs:
            groups[each[0][0].prompt].append(each)
        return groups

    def hard_prompts(self) -> dict[int, bool]:
        """Whether any pair of a prompt has a hard first difference."""
        hard: dict[int, bool] = {}
        for (first, _), found in self.pairs:
            hard[first.prompt] = hard.get(first.prompt, False) or bool(found and found.hard)
        return hard

    def cut(self) -> tuple[int, int, int]:
        """(pairs that are equal until one of them was cut short, their positions, those of the longer of each)."""
        cut = [(len(a.ids), len(b.ids)) for (a, b), found in self.pairs if found is None and len(a.ids) != len(b.ids)]
        return len(cut), sum(map(min, cut)), sum(map(max, cut))

    def one_each(self) -> list[tuple[Pair, Difference | None]]:
        """One pair of each prompt: what tests take, since repeats of a prompt fork at the same ties."""
        return [min(group, key=lambda each: _order(each[0])) for group in self.prompts().values()]

    def one_each_events(self) -> tuple[int, int]:
        """First differences and positions at risk of one pair of each prompt."""
        chosen = self.one_each()
        return sum(found is not None for _, found in chosen), sum(_risk(each) for each in chosen)


def _order(pair: Pair) -> tuple[int, int, str]:
    return pair[1].repeat, pair[1].load, pair[1].cache


def _risk(each: tuple[Pair, Difference | None]) -> int:
    pair, found = each
    return positions_at_risk(*pair, found.index if found else None)


def summarise(
    compared: Compared, noise: Compared | None, settings: GateSettings, facts: Facts, of_length: bool = True
) -> Comparison:
    """All that is said of two arms. noise: None for the noise arm itself, and where there is none."""
    groups = compared.prompts()
    hard = compared.hard_prompts()
    differences = compared.differences
    hard_ones = [d for d in differences if d.hard]
    soft = soft_test(compared, noise, settings) if noise else None
    return Comparison(
        name=compared.name,
        first=compared.first,
        second=compared.second,
        prompts=len(groups),
        pairs=len(compared.pairs),
        unpaired=compared.unpaired,
        identical=_share(sum(all(f is None for _, f in group) for group in groups.values()), len(groups), settings),
        identical_pairs=_identical_pairs(compared, settings),
        hazard=_hazard(compared, settings),
        survival=survival([_time(each) for each in compared.pairs]),
        kinds=dict(Counter(d.kind for d in differences)),
        hard=_share(sum(hard.values()), len(hard), settings),
        hard_margin_median=middle([abs(d.first_margin) for d in hard_ones if d.first_margin is not None]),
        hard_shift_median=middle([d.shift for d in hard_ones if d.shift is not None]),
        hard_index_quartile=quartiles([d.index for d in hard_ones])[0] if hard_ones else None,
        early=sum(d.index < 5 for d in differences),
        by_length=_by_length(compared, settings) if of_length else [],
        differences=differences,
        soft=soft,
        cause=likely_cause(compared.pairs, soft, noise is not None, settings, facts),
    )


def _time(each: tuple[Pair, Difference | None]) -> Time:
    found = each[1]
    return (found.index, True) if found else (_risk(each), False)


def soft_test(compared: Compared, noise: Compared, settings: GateSettings) -> LogRank | None:
    """Do ties come sooner than in the noise arm? Hard differences end a pair without being one."""

    def times(of: Compared) -> list[Time]:
        # at the index of a hard difference a tie could have come as well, so it was still at risk there
        return [(f.index + 1, False) if (f := each[1]) and f.hard else _time(each) for each in of.one_each()]

    return log_rank(times(noise), times(compared), settings.soft_ratio)


def _share(hits: int, of: int, settings: GateSettings) -> Share:
    low, high = wilson(hits, of, settings.confidence)
    return Share(hits=hits, of=of, share=hits / of if of else None, low=low, high=high, method="Wilson")


def _identical_pairs(compared: Compared, settings: GateSettings) -> Share | None:
    groups = compared.prompts()
    if len(groups) == len(compared.pairs):
        return None
    counts = [(float(sum(f is None for _, f in group)), float(len(group))) for group in groups.values()]
    hits, of = round(sum(c[0] for c in counts)), len(compared.pairs)
    low, high, method = *wilson(hits, of, settings.confidence), "Wilson, as if pairs were independent"
    if min(hits, of - hits) >= _ENOUGH_TO_RESAMPLE:
        low, high, method = *_both_tails(counts, settings), "prompts resampled"
    return Share(hits=hits, of=of, share=hits / of, low=low, high=high, method=method)


def _both_tails(groups: list[tuple[float, float]], settings: GateSettings) -> tuple[float, float]:
    tail = (1 - settings.confidence) / 2
    return resampled(groups, (settings.seed, settings.resamples), tail, tail)


def _hazard(compared: Compared, settings: GateSettings) -> Rate:
    groups = compared.prompts()
    counts = [(float(sum(f is not None for _, f in g)), float(sum(map(_risk, g)))) for g in groups.values()]
    return _rate(counts, len(compared.pairs) / max(len(groups), 1), settings)


def _rate(counts: list[tuple[float, float]], pairs: float, settings: GateSettings) -> Rate:
    """counts: (first differences, positions at risk) by prompt; pairs: of each prompt."""
    events, at_risk = round(sum(c[0] for c in counts)), round(sum(c[1] for c in counts))
    if not at_risk:
        return Rate(events=0, at_risk=0, rate=None, low=0.0, high=None, method="Poisson")
    if pairs == 1:
        low, high = poisson(events, settings.confidence)
        limits, method = (low / at_risk, high / at_risk), "Poisson"
    elif events >= _ENOUGH_TO_RESAMPLE:
        limits, method = _both_tails(counts, settings), "prompts resampled"
    else:  # as if the repeats of a prompt were one
        low, high = poisson(sum(c[0] > 0 for c in counts), settings.confidence)
        share = pairs / at_risk
        limits, method = (low * share, high * share), "Poisson, repeats as one"
    return Rate(events=events, at_risk=at_risk, rate=events / at_risk, low=limits[0], high=limits[1], method=method)


def _by_length(compared: Compared, settings: GateSettings) -> list[LengthBin]:
    """By the context of each position, so that what begins beyond a length shows there."""
    edges = sorted({*_LENGTHS, *([settings.budget + 1] if settings.budget else [])})
    spans = list(zip(edges, [*edges[1:], None], strict=True))
    pairs = len(compared.pairs) / max(len(compared.prompts()), 1)
    counts: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    hard = Counter[int]()
    for each in compared.pairs:
        (first, _), found = each
        if first.prompt_tokens is None:
            continue
        begin, end = first.prompt_tokens, first.prompt_tokens + _risk(each)
        for low, high in spans:
            if (positions := min(end, high or end) - max(begin, low)) <= 0:
                continue
            of_prompt = counts[low][first.prompt]
            of_prompt[1] += positions
            if found and end - 1 < (high or end):
                of_prompt[0] += 1
                hard[low] += found.hard
    return [
        LengthBin(
            first=low,
            last=None if high is None else high - 1,
            differences=_rate([(parted, of) for parted, of in counts[low].values()], pairs, settings),
            hard=hard[low],
        )
        for low, high in spans
        if low in counts
    ]
