"""Outputs of stability runs that never took place, with first differences where and as wide as a test says."""

from collections.abc import Iterable, Mapping
from random import Random

from verifier.stability.model import Output, Served, Top

LENGTH = 40


def tops(ids: list[int], lead: float = 2.0, rival: int = 9999) -> list[Top]:
    """Two tokens a position: the one taken, and one that it leads by so many nats."""
    return [[(token, -0.1), (rival, -0.1 - lead)] for token in ids]


def output(arm: str, prompt: int, ids: list[int] | None = None, **more: object) -> Output:
    ids = baseline_ids(prompt) if ids is None else ids
    told: dict[str, object] = {
        "repeat": 0,
        "load": 1,
        "cache": "cold",
        "top": tops(ids),
        "finish": "length",
        "prompt_sha256": f"sha of {prompt}",
        "prompt_tokens": 100,
        "ttft": 0.1,
        "tpot": 0.01,
        "verdict": "pass",
    } | more
    told.setdefault("request_id", f"{arm}-{prompt}-{told['repeat']}-{told['load']}-{told['cache']}")
    return Output(arm=arm, prompt=prompt, ids=ids, **told)  # type: ignore[arg-type]


def baseline_ids(prompt: int, length: int = LENGTH) -> list[int]:
    return Random(prompt).choices(range(1000), k=length)


def parted(
    arm: str, prompt: int, index: int, margins: tuple[float, float] = (0.0, 0.0), **more: object
) -> tuple[Output, list[Top]]:
    """An output that leaves the baseline at an index, and the lists that the baseline must then have had.

    margins: nats by which each side's token leads the other's there; the sum is the shift.
    """
    ids = baseline_ids(prompt)
    other = [*ids[:index], *(token + 1000 for token in ids[index:])]
    ours, theirs = tops(other), tops(ids)
    ours[index] = [(other[index], -0.5), (ids[index], -0.5 - margins[1])]
    theirs[index] = [(ids[index], -0.5), (other[index], -0.5 - margins[0])]
    return output(arm, prompt, other, **({"top": ours} | more)), theirs


def run(
    prompts: int,
    b: Mapping[int, tuple[int, float, float]] | None = None,
    a2: Mapping[int, tuple[int, float, float]] | None = None,
    arms: Iterable[str] = ("a1", "a2", "b"),
    **more: object,
) -> list[Output]:
    """A run of one repeat. b, a2: where these arms part from a1, by prompt: (index, margin in a1, margin in the other).

    An arm's margin in a1 is written into the list of a1 itself, so at one index only one arm can part.
    """
    found = []
    given = {"a2": a2 or {}, "b": b or {}}
    for prompt in range(prompts):
        ids = baseline_ids(prompt)
        lists = tops(ids)
        others = []
        for arm in arms:
            if arm == "a1":
                continue
            if part := given.get(arm, {}).get(prompt):
                index, first, second = part
                other, theirs = parted(arm, prompt, index, (first, second), **more)
                lists[index] = theirs[index]
                others.append(other)
            else:
                others.append(output(arm, prompt, **more))
        found += [output("a1", prompt, ids, top=lists, **more), *others]
    return found


def served(**counts: int) -> Served:
    return Served(**counts)
