"""A stability run's result for a terminal: conditions, numbers, evidence, verdict last. Pure; no text of any model."""

from collections.abc import Iterator, Sequence

from verifier.findings import numbered
from verifier.output import printable
from verifier.stability import words
from verifier.stability.result import Analysis, ArmResult, Check, Comparison, ForcedResult, Reading, Repeats

_FACTORS = {
    "load": "the load",
    "cache": "the cache's state",
    "reused": "whether a prefix was reused",
    "preempted": "preemption",
    "epoch": "what happened to the server (restart, sleep, weights, cache reset)",
}

_READINGS: dict[Reading, str] = {
    "less": "moves less than",
    "as much": "moves as much as",
    "more": "moves more than",
    "not told apart": "cannot be told apart from",
}


def text(analysis: Analysis) -> str:
    """All lines, the verdict's last."""
    return "\n".join(line.rstrip() for line in _lines(analysis)) + "\n"


def _lines(analysis: Analysis) -> Iterator[str]:
    facts = analysis.facts
    requests = sum(arm.requests for arm in analysis.arms)
    head = f"stability run {printable(facts.run)}".rstrip()
    sizes = f"{numbered(analysis.prompts, 'prompt')}   {numbered(requests, 'request')}"
    yield f"{head}   {sizes}   contract {analysis.verdict.contract}"
    for note in facts.notes:
        yield f"  note  {printable(note)}"
    yield ""
    yield from map(_check, analysis.checks)
    yield f"  band  ties up to a shift of {words.nats(analysis.band.shift)} nats: {analysis.band.detail}"
    if analysis.comparisons:
        yield ""
        yield from _table(analysis)
    yield from _block(map(_forced, analysis.forced))
    yield from _block(_evidence(analysis))
    yield from _block(_cost(analysis.arms))
    yield from _block(_by_length(analysis))
    yield from _block(line for each in analysis.repeats for line in _repeats(each))
    yield ""
    yield from _gate(analysis)
    yield from _verdict(analysis)


def _block(lines: Iterator[str]) -> Iterator[str]:
    """With an empty line before it, if there is anything."""
    for number, line in enumerate(lines):
        if not number:
            yield ""
        yield line


def _check(check: Check) -> str:
    mark = {True: "ok", False: "FAIL", None: "?"}[check.ok]
    return f"  {mark:<4}  {check.name}: {printable(check.detail)}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Cells in columns, two spaces in."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))


def _table(analysis: Analysis) -> Iterator[str]:
    level = f"{analysis.settings.confidence:.0%}"
    arms = {each.arm: each for each in analysis.arms}
    rows = [["", "", f"identical ({level})", "first differences / 1,000 tokens", "hard (per prompt)", "TTFT", "TPOT"]]
    for each in analysis.comparisons:
        cost = arms[each.second] if each.first != each.second else None
        rows.append(
            [
                *words.title(each),
                words.share(each.identical),
                words.rate(each.hazard),
                words.count(each.hard),
                words.times(cost.ttft_ratio if cost else None),
                words.times(cost.tpot_ratio if cost else None),
            ]
        )
    yield from columns(rows)


def _forced(forced: ForcedResult) -> str:
    if not forced.positions:
        said = f"none of {numbered(forced.failed, 'request')} was answered; the server must know prompt_logprobs"
        return f"  teacher-forced {words.arm(forced.arm)} ({forced.path}): {said}"
    disagree = forced.disagree
    limits = (
        "" if disagree.low is None or disagree.high is None else f" ({words.interval(disagree.low, disagree.high)})"
    )
    return (
        f"  teacher-forced {words.arm(forced.arm)} ({forced.path}): another token at {words.percent(disagree.value, 2)}"
        f"{limits} of {forced.positions} positions, {forced.hard} of them hard, in {forced.hard_prompts.hits} of "
        f"{forced.prompts} prompts; |margin moved| median {words.nats(forced.delta_median)}, "
        f"p90 {words.nats(forced.delta_p90)}, max {words.nats(forced.delta_max)} nats"
    )


def _evidence(analysis: Analysis) -> Iterator[str]:
    for each in analysis.comparisons:
        name = words.title(each)[0]
        if each.differences:
            quartiles = "/".join(map(str, each.survival.quartiles))
            yield f"  {name}: first differences {words.kinds(each)}; at token {quartiles} (quartiles), {_half(each)}"
        if each.hard_index_quartile is not None:
            yield (
                f"  {name}: hard ones begin at token {each.hard_index_quartile} (p25), median margin "
                f"{words.nats(each.hard_margin_median)}, median shift {words.nats(each.hard_shift_median)} nats"
            )
        if cause := words.cause(each):
            yield f"  {printable(cause)}"
    for one in analysis.yardsticks:
        yield (
            f"  B {_READINGS[one.reading]} {printable(one.arm)}: first differences "
            f"{words.times_with_limits(one.hazard_ratio)} times as often, hard in B only {one.hard_candidate_only}, "
            f"in {printable(one.arm)} only {one.hard_yardstick_only}, of {numbered(one.prompts, 'prompt')} "
            f"({words.chance(one.hard_p)})"
        )


def _half(comparison: Comparison) -> str:
    median = comparison.survival.median
    return "more than half never part" if median is None else f"half have parted after {median + 1}"


def _cost(arms: Sequence[ArmResult]) -> Iterator[str]:
    rows = [
        ["", "TTFT", "TPOT", "zero share", "attention skipped", "KV evicted", "prefix reused", "preempted", "failed"]
    ]
    for arm in arms:
        rows.append(
            [
                words.arm(printable(arm.arm)),
                words.seconds(arm.ttft),
                words.seconds(arm.tpot),
                words.percent(arm.zero_share),
                words.percent(arm.skipped_share),
                words.percent(arm.evicted_share),
                words.percent(arm.reused_share),
                words.NOTHING if arm.preemptions is None else str(arm.preemptions),
                str(arm.failed),
            ]
        )
    # a column of which nothing is known says nothing
    known = [n for n in range(len(rows[0])) if n < 3 or any(row[n] != words.NOTHING for row in rows[1:])]
    yield from columns([[row[n] for n in known] for row in rows])
    if any(arm.same_conditions is False for arm in arms):
        yield "  (ratios of TTFT and TPOT to A1 are of requests under other loads where an arm ran under others)"


def _by_length(analysis: Analysis) -> Iterator[str]:
    shown = [each for each in analysis.comparisons if len(each.by_length) > 1]
    if not shown:
        return
    spans = sorted({(each.first, each.last) for one in shown for each in one.by_length})
    rows = [["first differences / 1,000 tokens by context", *(words.title(each)[0] for each in shown)]]
    for first, last in spans:
        name = f"{first} tokens and more" if last is None else f"{first} to {last} tokens"
        found = [next((b for b in each.by_length if b.first == first), None) for each in shown]
        rows.append(
            [name, *(words.NOTHING if b is None else f"{words.rate(b.differences)}, hard {b.hard}" for b in found)]
        )
    yield from columns(rows)


def _repeats(repeats: Repeats) -> Iterator[str]:
    yield (
        f"  repeats of {words.arm(repeats.arm)}: all alike in {words.count(repeats.stable)} prompts; distinct outputs "
        f"{words.nats(repeats.distinct_mean)} on average, largest group {words.percent(repeats.largest_mean)}; "
        f"forks: {repeats.tie_forks} ties, {repeats.hard_forks} hard, {repeats.unknown_forks} unknown"
    )
    for factor in repeats.factors:
        if factor.explains:
            yield (
                f"    they go by {_FACTORS[factor.name]} in {factor.explains} of {factor.of} prompts "
                f"(by luck: {factor.chance:.1f})"
            )


def _gate(analysis: Analysis) -> Iterator[str]:
    verdict, settings = analysis.verdict, analysis.settings
    if sprt := verdict.sprt:
        state = f"decided after {sprt.prompts} prompts" if sprt.decided else f"not decided by {sprt.prompts} prompts"
        yield f"  gate  SPRT  p0 {settings.p0:.1%}  p1 {settings.p1:.1%}   {state}"
    for bound in verdict.bounds:
        yield f"  gate  {bound.name:<28} {bound.decision:<12} {printable(bound.detail)}"
    for warning in verdict.warnings:
        yield f"  warn  {printable(warning)}"
    yield ""


def _verdict(analysis: Analysis) -> Iterator[str]:
    verdict = analysis.verdict
    for number, reason in enumerate(verdict.reasons):
        head = f"VERDICT  {verdict.decision.upper()}" if not number else ""
        yield f"{head:<23} {printable(reason)}"
    if shown := words.first_shown(analysis):
        kind = "hard" if shown.hard else "first"
        shown_in = analysis.comparison("candidate") or analysis.comparisons[0]
        sides = f"{words.arm(shown_in.first)} {words.token(shown.first_id)}  "
        sides += f"{words.arm(shown_in.second)} {words.token(shown.second_id)}"
        yield (
            f"         {kind} divergence: prompt {shown.prompt}, token {shown.index}:  {sides}  ({shown.kind}, shift "
            f"{words.nats(shown.shift)} nats)   see: sparseety diff … --prompt {shown.prompt}"
        )
    yield f"exit code {verdict.exit_code}"
