"""Two outputs to one prompt, around the place where they part. Pure; no text unless `decode` is given."""

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher

from verifier.output import printable, quote
from verifier.stability import words
from verifier.stability.causes import kv_lost, likely_cause
from verifier.stability.differences import difference
from verifier.stability.model import Output
from verifier.stability.result import Analysis, Difference
from verifier.stability.terminal import columns

Decode = Callable[[Sequence[int]], str]
_BEFORE, _AFTER = 3, 3  # tokens shown around the place
_RUN = 4  # tokens; shorter runs are equal by chance
_TEXT_AFTER = 12  # tokens of each side whose text is shown


def diff(first: Output, second: Output, analysis: Analysis, decode: Decode | None = None) -> str:
    """first and second: of one prompt, both ended. `analysis` gives the tie band and what is known of the arms."""
    return "\n".join(line.rstrip() for line in _lines(first, second, analysis, decode)) + "\n"


def _lines(first: Output, second: Output, analysis: Analysis, decode: Decode | None) -> Iterator[str]:
    found = difference(first, second, analysis.band)
    names = [f"{words.arm(printable(o.arm))} {printable(o.request_id)} ({len(o.ids)} tokens)" for o in (first, second)]
    head = f"prompt {first.prompt}   {names[0]}   {names[1]}"
    if found is None:
        shortest = min(len(first.ids), len(second.ids))
        cut = len(first.ids) != len(second.ids)
        yield f"{head}   equal: " + (f"the {shortest} until one was cut short" if cut else f"all {shortest} tokens")
        return
    yield f"{head}   equal: {found.index} tokens, then different"
    if run := next_equal_run(first.ids, second.ids, found.index):
        a, b, size = run
        yield f"  next equal run: A[{a}..{a + size - 1}] = B[{b}..{b + size - 1}] (no rule goes by it)"
    yield from columns([_row(first, found.index), _row(second, found.index)])
    for output, other in ((first, second), (second, first)):
        yield f"  {words.arm(printable(output.arm))}: {_place(output, found.index, other)}"
    yield f"  {found.kind}   {_why(found, analysis)}"
    cause = likely_cause([((first, second), found)], None, False, analysis.settings, analysis.facts)
    if cause:
        yield f"  likely cause: {cause.name} ({'; '.join(cause.evidence) or 'no evidence for any'})"
    if decode:
        begin = max(0, found.index - _TEXT_AFTER)
        yield f"  before {quote(decode(first.ids[begin : found.index])[-40:])}"
        for output in (first, second):
            after = output.ids[found.index : found.index + _TEXT_AFTER]
            yield f"  {words.arm(printable(output.arm)):<6} {quote(decode(after))}"


def _row(output: Output, index: int) -> list[str]:
    before = output.ids[max(0, index - _BEFORE) : index]
    at = [str(output.ids[index])] if index < len(output.ids) else ["ended"]
    after = output.ids[index + 1 : index + 1 + _AFTER]
    return [words.arm(printable(output.arm)), "…", *map(str, before), "│", *at, "│", " ".join(map(str, after))]


def _place(output: Output, index: int, other: Output) -> str:
    """What this side thought of the two tokens, and what of the context it had."""
    said = f"ended after {len(output.ids)} tokens ({printable(output.finish or 'no finish reason')})"
    if index < len(output.ids):
        said = f"token {output.ids[index]}"
        top = output.top[index] if index < len(output.top) else []
        known = dict(top)
        if (own := known.get(output.ids[index])) is not None:
            said += f"  logprob {own:.2f}"
            shown = [f"{token} ({value:.2f})" for token, value in top if token != output.ids[index]]
            said += f"   next likely {', '.join(shown[:2])}" if shown else ""
        else:
            said += "  no log probabilities"
    if output.prompt_tokens is not None:
        said += f"   context {output.prompt_tokens + index}"
    served, lost = output.served, kv_lost(output.served)
    if served is None or lost is None:
        return f"{said}   KV: not known"
    if served.attended is not None and served.context is not None:
        return f"{said}   KV: {served.attended} of {served.context} positions read over the request"
    return f"{said}   KV: {served.evicted} slots given up"


def _why(found: Difference, analysis: Analysis) -> str:
    band = analysis.band
    gaps = [f"{words.nats(m)} nats in {side}" for side, m in (("A", found.first_margin), ("B", found.second_margin))]
    known = [gap for gap, m in zip(gaps, (found.first_margin, found.second_margin), strict=True) if m is not None]
    if not known:
        return "no log probabilities on either side"
    limit = f"shift {found.shift:.2f}, band {band.shift:.2f}" if found.shift is not None else f"band {band.margin:.2f}"
    tail = "; at least, since not both tokens are among those logged" if found.bounded else ""
    return f"gap {' and '.join(known)} ({limit}{tail})"


def next_equal_run(first: Sequence[int], second: Sequence[int], index: int) -> tuple[int, int, int] | None:
    """(start in first, start in second, tokens) of the next run that both have. A display aid, never a rule."""
    matcher = SequenceMatcher(None, list(first[index:]), list(second[index:]), autojunk=False)
    run = next((block for block in matcher.get_matching_blocks() if block.size >= _RUN), None)
    return (run.a + index, run.b + index, run.size) if run else None
