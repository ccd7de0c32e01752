"""Repeats within one arm: how many distinct outputs, where they fork, and what the forks go by. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import factorial, log, prod
from statistics import fmean

from verifier.stability.differences import difference, first_difference
from verifier.stability.intervals import wilson
from verifier.stability.model import Output
from verifier.stability.result import Band, Factor, Fork, GateSettings, Leaf, Repeats, Share, Tree

ENDED = -1  # stands for the token of an output that had ended
Groups = list[list[Output]]
_FACTORS: dict[str, Callable[[Output], str | None]] = {
    "load": lambda o: str(o.load),
    "cache": lambda o: o.cache,
    "reused": lambda o: None if o.served is None or o.served.reused is None else str(o.served.reused > 0),
    "preempted": lambda o: None if o.served is None or o.served.preemptions is None else str(o.served.preemptions > 0),
    "epoch": lambda o: o.epoch,
}


def group(outputs: Sequence[Output]) -> Groups:
    """Outputs that are token for token the same, most first; then in the order they came."""
    groups: dict[tuple[int, ...], list[Output]] = defaultdict(list)
    for output in outputs:
        groups[tuple(output.ids)].append(output)
    return sorted(groups.values(), key=len, reverse=True)


def repeats(arm: str, outputs: Sequence[Output], band: Band, settings: GateSettings) -> Repeats:
    """outputs: those of the arm that can be compared."""
    prompts: dict[int, list[Output]] = defaultdict(list)
    for output in outputs:
        prompts[output.prompt].append(output)
    several = {prompt: group(o) for prompt, o in sorted(prompts.items()) if len(o) > 1}
    trees, kinds = [], Counter[str]()
    for prompt, groups in several.items():
        forks = list(_forks([g[0] for g in groups], band))
        kinds.update(kind for _, kind in forks)
        trees.append(_tree(prompt, groups, [fork for fork, _ in forks]))
    stable = sum(len(tree.leaves) == 1 for tree in trees)
    low, high = wilson(stable, len(trees), settings.confidence)
    share = stable / len(trees) if trees else None
    return Repeats(
        arm=arm,
        prompts=len(trees),
        stable=Share(hits=stable, of=len(trees), share=share, low=low, high=high, method="Wilson"),
        distinct_mean=fmean(len(tree.leaves) for tree in trees) if trees else None,
        largest_mean=fmean(tree.largest for tree in trees) if trees else None,
        entropy_mean=fmean(tree.entropy for tree in trees) if trees else None,
        tie_forks=kinds["tie"],
        hard_forks=kinds["hard"],
        unknown_forks=kinds["unknown"],
        factors=list(factors(list(several.values()))),
        trees=[tree for tree in trees if len(tree.leaves) > 1],
    )


def _tree(prompt: int, groups: Groups, forks: list[Fork]) -> Tree:
    n = sum(map(len, groups))
    return Tree(
        prompt=prompt,
        outputs=n,
        leaves=[
            Leaf(requests=[o.request_id for o in same], tokens=len(same[0].ids), finish=same[0].finish)
            for same in groups
        ],
        forks=forks,
        largest=len(groups[0]) / n,
        entropy=sum(len(same) / n * log(n / len(same)) for same in groups),
    )


def _forks(distinct: Sequence[Output], band: Band) -> Iterator[tuple[Fork, str]]:
    """Each place where some of these part, and whether ties explain it. Shallow ones first."""
    if len(distinct) < 2:
        return
    first = distinct[0]
    index = min(i for o in distinct[1:] if (i := first_difference(first.ids, o.ids)) is not None)
    branches: dict[int, list[Output]] = defaultdict(list)
    for output in distinct:
        branches[output.ids[index] if index < len(output.ids) else ENDED].append(output)
    heads = [branch[0] for branch in branches.values()]
    found = [d for head in heads[1:] if (d := difference(heads[0], head, band))]
    margins = [abs(m) for d in found for m in (d.first_margin, d.second_margin) if m is not None]
    kind = "hard" if any(d.hard for d in found) else "unknown" if any(d.kind == "UNKNOWN" for d in found) else "tie"
    yield Fork(index=index, ids=list(branches), margin=min(margins, default=None)), kind
    for branch in branches.values():
        yield from _forks(branch, band)


def factors(of_prompts: Sequence[Groups]) -> Iterator[Factor]:
    """For each condition that varies: of how many prompts it alone tells which output came, and of how many by luck."""
    for name, value in _FACTORS.items():
        explains = applies = 0
        chance = 0.0
        for groups in of_prompts:
            classes: dict[str, set[int]] = defaultdict(set)
            sizes = Counter[str]()
            for number, same in enumerate(groups):
                for output in same:
                    if (found := value(output)) is not None:
                        classes[found].add(number)
                        sizes[found] += 1
            if len(groups) < 2 or len(classes) < 2 or sizes.total() < sum(map(len, groups)):
                continue
            applies += 1
            explains += all(len(numbers) == 1 for numbers in classes.values())
            chance += _luck(sorted(sizes.values(), reverse=True), [len(same) for same in groups])
        if applies:
            yield Factor(name=name, explains=explains, of=applies, chance=chance)


def _luck(classes: Sequence[int], groups: Sequence[int]) -> float:
    """Probability that outputs dealt at random to groups of these sizes fall so that each class is in one group."""
    arrangements = factorial(sum(groups)) // prod(map(factorial, groups))
    return _fillings(tuple(classes), tuple(groups)) / arrangements


def _fillings(classes: tuple[int, ...], left: tuple[int, ...]) -> int:
    """Ways to put whole classes into groups so that all are full."""
    if not classes:
        return 1
    size, rest = classes[0], classes[1:]
    return sum(
        _fillings(rest, (*left[:number], room - size, *left[number + 1 :]))
        for number, room in enumerate(left)
        if room >= size
    )
