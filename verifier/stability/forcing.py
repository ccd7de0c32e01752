"""Teacher forcing: one set of ids through every arm, compared at every position. Prefill path only. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verifier.stability.differences import ROUNDING
from verifier.stability.intervals import clustered_share, share_limits, wilson
from verifier.stability.model import Forced, Output, Top
from verifier.stability.result import Band, Estimate, ForcedResult, GateSettings, MarginBin, Share
from verifier.stability.survival import middle

_BINS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, None)
_FEW = 5  # disagreements
_LEAST_PROMPTS = 8
_CLUSTERED = 10  # of so few, this many positions count as one: disagreements of a stream come together


@dataclass(slots=True)
class _Tally:
    bins: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in _BINS])  # positions, disagreements
    deltas: list[float] = field(default_factory=list)
    hard: int = 0
    prompts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))  # other, of, hard


def forced_results(
    forced: Sequence[Forced], outputs: Sequence[Output], band: Band, settings: GateSettings
) -> tuple[list[ForcedResult], dict[str, dict[int, tuple[int, int]]]]:
    """Of each arm; and of each arm's prompts, positions with another argmax and positions."""
    usable = [one for one in forced if one.error is None and one.ids and len(one.top) == len(one.ids)]
    baseline = {one.reference: one for one in usable if one.arm == "a1"}
    written = {output.request_id: output for output in outputs}
    results, counts = [], {}
    for arm in sorted({one.arm for one in forced} - ({"a1"} if baseline else set())):
        ours = [one for one in usable if one.arm == arm]
        tally, theirs = _tally(ours, baseline, written, band)
        counts[arm] = {prompt: (other, of) for prompt, (other, of, _) in tally.prompts.items()}
        failed = sum(one.arm == arm for one in forced) - len(ours)
        results.append(_result(arm, failed, tally, theirs, settings))
    return results, counts


def _tally(
    ours: Sequence[Forced], baseline: Mapping[str, Forced], written: Mapping[str, Output], band: Band
) -> tuple[_Tally, bool]:
    """True: all margins are those of a1, forced too."""
    tally, forced_too = _Tally(), True
    for one in ours:
        same_path = baseline.get(one.reference)
        output = written.get(one.reference)
        forced_too = forced_too and same_path is not None
        reference = same_path.top if same_path else output.top if output else []
        of_prompt = tally.prompts[one.prompt]
        for index, (token, top) in enumerate(zip(one.ids, one.top, strict=True)):
            if not top:
                continue
            expected = reference[index] if index < len(reference) else []
            if same_path and expected:
                token = _likeliest(expected)  # prefill against prefill: what decode chose there is another question
            other = not _leads(token, top)
            of_prompt[0] += other
            of_prompt[1] += 1
            if lead := margins(token, expected, top):
                hard = other and abs(lead[0]) + abs(lead[1]) > band.shift + ROUNDING
                tally.hard += hard
                of_prompt[2] += hard
                tally.deltas.append(abs(lead[0] - lead[1]))
                where = next(i for i, last in enumerate(_BINS) if last is None or lead[0] <= last)
                tally.bins[where][0] += 1
                tally.bins[where][1] += other
    return tally, forced_too


def _likeliest(top: Top) -> int:
    return max(top, key=lambda each: each[1])[0]


def _leads(token: int, top: Top) -> bool:
    """Of tokens that tie for the first place, either may be taken."""
    best = max(value for _, value in top)
    return any(each == token and value == best for each, value in top)


def margins(token: int, reference: Top, ours: Top) -> tuple[float, float] | None:
    """By how much the reference's token leads in either list: over our likeliest if that is another, else the second.

    None: a list is too short to say. In ours it is below 0 where we would have taken another.
    """
    if len(reference) < 2 or len(ours) < 2:
        return None
    theirs, mine = dict(reference), dict(ours)
    rival = max((value, -each) for each, value in ours if each != token)
    of_rival = -rival[1]
    if token not in theirs:
        return None
    runner_up = max(value for each, value in reference if each != token)
    least = min(value for each, value in reference if each != token)
    if token in mine and mine[token] >= rival[0]:
        return theirs[token] - runner_up, mine[token] - rival[0]
    first = theirs[token] - theirs.get(of_rival, least)
    return first, mine.get(token, min(mine.values())) - rival[0]


def _result(arm: str, failed: int, tally: _Tally, forced_too: bool, settings: GateSettings) -> ForcedResult:
    groups = [(float(other), float(of)) for other, of, _ in tally.prompts.values()]
    disagree, positions = sum(other for other, _, _ in tally.prompts.values()), sum(int(of) for _, of in groups)
    hard_prompts = sum(hard > 0 for _, _, hard in tally.prompts.values())
    low, high = wilson(hard_prompts, len(groups), settings.confidence)
    deltas = sorted(tally.deltas)
    tail = (1 - settings.confidence) / 2
    return ForcedResult(
        arm=arm,
        reference="a1, forced" if forced_too else "the output itself",
        prompts=len(groups),
        failed=failed,
        positions=positions,
        disagree=disagreement(groups, tail, tail),
        disagreements=disagree,
        hard=tally.hard,
        hard_prompts=Share(
            hits=hard_prompts,
            of=len(groups),
            share=hard_prompts / len(groups) if groups else None,
            low=low,
            high=high,
            method="Wilson",
        ),
        bins=[
            MarginBin(last=last, positions=of, disagree=other)
            for last, (of, other) in zip(_BINS, tally.bins, strict=True)
        ],
        delta_median=middle(deltas),
        delta_p90=deltas[int(0.9 * (len(deltas) - 1))] if deltas else None,
        delta_max=deltas[-1] if deltas else None,
    )


def disagreement(groups: Sequence[tuple[float, float]], below: float, above: float) -> Estimate:
    """Share of positions with another argmax, of (disagreements, positions) by prompt."""
    other, positions = sum(group[0] for group in groups), sum(group[1] for group in groups)
    if not positions:
        return Estimate(value=None, low=None, high=None, method="nothing forced")
    if other < _FEW or len(groups) < _LEAST_PROMPTS:
        low, high = share_limits(other / _CLUSTERED, positions / _CLUSTERED, below, above)
        method = f"exact, {_CLUSTERED} positions taken as one"
    else:
        low, high = clustered_share(groups, below, above)
        method = "prompts as groups, jackknife"
    return Estimate(value=other / positions, low=low, high=high, method=method)
