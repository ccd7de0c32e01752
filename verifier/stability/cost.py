"""What an arm cost and what sparsity did in it, so that "faster" and "different" stand side by side. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from verifier.stability.differences import usable
from verifier.stability.intervals import median_limits
from verifier.stability.model import Output, Served
from verifier.stability.result import ArmResult, Estimate, GateSettings

Value = Callable[[Output], float | None]
Counts = Callable[[Served], tuple[int | None, int | None]]


def arm_result(arm: str, outputs: Sequence[Output], baseline: Sequence[Output], settings: GateSettings) -> ArmResult:
    """outputs: all requests of the arm, failed ones too. baseline: those of a1."""
    ended = [output for output in outputs if usable(output)]
    served = [output.served for output in ended if output.served]
    reference = [output for output in baseline if usable(output)] if arm != "a1" else []
    ttft = _ratio(ended, reference, lambda o: o.ttft, settings)
    tpot = _ratio(ended, reference, lambda o: o.tpot, settings)
    conditions = [{(o.load, o.cache) for o in of} for of in (ended, reference)]
    return ArmResult(
        arm=arm,
        requests=len(outputs),
        failed=len(outputs) - len(ended),
        tokens=sum(len(output.ids) for output in ended),
        verified=dict(Counter(output.verdict or "not verified" for output in ended)),
        ttft=_median([o.ttft for o in ended]),
        tpot=_median([o.tpot for o in ended]),
        ttft_ratio=ttft,
        tpot_ratio=tpot,
        same_conditions=conditions[0] == conditions[1] if ttft or tpot else None,
        logged=len(served),
        zero_share=_share(served, lambda s: (s.zeros, s.elements)),
        evicted_share=_share(served, lambda s: (s.evicted, _prompt(s))),
        skipped_share=_share(served, lambda s: (_skipped(s), s.context)),
        reused_share=_share(served, lambda s: (s.reused, _prompt(s))),
        recomputed=_total([s.recomputed for s in served]),
        preemptions=_total([s.preemptions for s in served]),
        accepted_share=_share(served, lambda s: (s.accepted, s.drafted)),
    )


def _prompt(served: Served) -> int | None:
    return None if served.computed is None or served.reused is None else served.computed + served.reused


def _skipped(served: Served) -> int | None:
    return None if served.attended is None or served.context is None else served.context - served.attended


def _share(served: Sequence[Served], counts: Counts) -> float | None:
    """Of the requests that say both."""
    known = [(part, of) for part, of in map(counts, served) if part is not None and of is not None]
    whole = sum(of for _, of in known)
    return sum(part for part, _ in known) / whole if whole else None


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _of_prompts(outputs: Sequence[Output], value: Value) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for output in outputs:
        if (known := value(output)) is not None:
            found[output.prompt].append(known)
    return {prompt: median(values) for prompt, values in found.items()}


def _ratio(
    outputs: Sequence[Output], reference: Sequence[Output], value: Value, settings: GateSettings
) -> Estimate | None:
    ours, theirs = _of_prompts(outputs, value), _of_prompts(reference, value)
    ratios = [ours[prompt] / theirs[prompt] for prompt in ours.keys() & theirs.keys() if theirs[prompt] > 0]
    if not ratios:
        return None
    low, high = median_limits(ratios, settings.confidence)
    return Estimate(value=median(ratios), low=low, high=high, method="order statistics of ratios by prompt")
