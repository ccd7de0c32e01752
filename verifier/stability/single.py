"""The same prompt N times on one server: each request, then each distinct output. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from verifier.output import printable
from verifier.stability import words
from verifier.stability.model import Output
from verifier.stability.repeats import group
from verifier.stability.result import Analysis
from verifier.stability.terminal import columns

Decode = Callable[[Sequence[int]], str]
_SHOWN = 200  # characters of each distinct output


def single(analysis: Analysis, outputs: Sequence[Output], decode: Decode | None = None) -> str:
    """Without `decode` no text is shown, only how long it is in tokens."""
    prompts: dict[tuple[str, int], list[Output]] = defaultdict(list)
    for output in outputs:
        prompts[output.arm, output.prompt].append(output)
    lines = (line for (arm, prompt), of in prompts.items() for line in _lines(analysis, arm, prompt, of, decode))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(
    analysis: Analysis, arm: str, prompt: int, outputs: Sequence[Output], decode: Decode | None
) -> Iterator[str]:
    groups = group([output for output in outputs if output.error is None])
    number = {output.request_id: n for n, same in enumerate(groups, 1) for output in same}
    yield f"prompt {prompt}   {words.arm(printable(arm))}   {len(outputs)} requests   {len(groups)} distinct outputs"
    rows = [["request", "load", "cache", "first token", "time", "tokens", "output"]]
    for output in outputs:
        which = f"#{number[output.request_id]}" if output.error is None else f"failed: {printable(output.error)}"
        rows.append(
            [
                printable(output.request_id),
                str(output.load),
                output.cache,
                words.seconds(output.ttft),
                words.seconds(total_seconds(output)),
                str(len(output.ids)),
                which,
            ]
        )
    yield from columns(rows)
    for n, same in enumerate(groups, 1):
        finish = printable(same[0].finish or "no finish reason")
        shown = printable(decode(same[0].ids)[:_SHOWN]) if decode else "text hidden (--show-text shows it)"
        yield f"  #{n}  {len(same)} times  {len(same[0].ids)} tokens  {finish}   {shown}"
    trees = [tree for each in analysis.repeats if each.arm == arm for tree in each.trees if tree.prompt == prompt]
    for fork in (fork for tree in trees for fork in tree.forks):
        ids = ", ".join("its end" if token < 0 else str(token) for token in fork.ids)
        yield f"  fork at token {fork.index}: {ids}   margin {words.nats(fork.margin)} nats"


def total_seconds(output: Output) -> float | None:
    """From sending to the last token."""
    if output.ttft is None:
        return None
    return output.ttft + (output.tpot or 0.0) * max(len(output.ids) - 1, 0)
