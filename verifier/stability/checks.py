"""What must hold before anything is concluded. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from verifier.stability.comparing import Compared
from verifier.stability.differences import usable
from verifier.stability.model import Output
from verifier.stability.result import ArmFacts, Check, Contract, Facts, GateSettings

_CUT = 0.5  # share of positions that may be missing for it
_NAMED = 5  # prompts or requests named in a line


def checks(
    outputs: Sequence[Output],
    compared: Sequence[Compared],
    settings: GateSettings,
    contract: Contract,
    facts: Facts,
) -> list[Check]:
    """In the order in which a reader should look at them."""
    ended = [output for output in outputs if usable(output)]
    found = [
        _complete(outputs, ended, settings, facts),
        _prompts(ended),
        _facts("tokenizer", facts, lambda arm: arm.tokenizer),
        _parameters(facts),
        _state(ended),
        _verified(ended),
    ]
    if contract != "bitwise":
        found.append(_log_probabilities(ended, compared))
    if cut := _cut(compared, contract):
        found.append(cut)
    if settings.budget is not None:
        found.append(_beyond_budget(ended, settings.budget, settings.min_beyond_budget))
    return found


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:_NAMED])) + (" …" if len(names) > _NAMED else "")


def _complete(outputs: Sequence[Output], ended: Sequence[Output], settings: GateSettings, facts: Facts) -> Check:
    planned = max(facts.planned or 0, len(outputs))
    missing = planned - len(ended)
    if not ended:
        return Check(name="complete", ok=False, detail="no request ended with token ids")
    detail = f"{len(ended)} of {planned} planned requests ended well"
    if missing:
        failed: dict[str, int] = defaultdict(int)
        for output in outputs:
            if not usable(output):
                failed[f"{output.arm}: {output.error or 'no token ids'}"] += 1
        said = [f"{count} x {reason}" for reason, count in sorted(failed.items(), key=lambda each: -each[1])]
        detail += f" ({_some(said) if said else 'the others were not sent'})"
    # of each arm too: a candidate may fail at the very prompts at which it would differ
    arms = Counter(output.arm for output in outputs)
    good = Counter(output.arm for output in ended)
    if facts.planned is not None:  # as many of each: an arm that broke off has fewer than were planned of it
        arms = Counter(dict.fromkeys(arms, max(arms.values())))
    lost = [planned - len(ended) - settings.max_failed * planned]
    lost += [number - good[arm] - settings.max_failed * number for arm, number in arms.items()]
    return Check(name="complete", ok=max(lost) <= 0, detail=detail)


def _prompts(ended: Sequence[Output]) -> Check:
    """The same prompt must reach every arm as the same ids."""
    hashes: dict[int, set[str | None]] = defaultdict(set)
    lengths: dict[int, set[int]] = defaultdict(set)
    for output in ended:
        hashes[output.prompt].add(output.prompt_sha256)
        if output.prompt_tokens is not None:
            lengths[output.prompt].add(output.prompt_tokens)
    differ = [p for p in sorted(hashes) if len(hashes[p] - {None}) > 1 or len(lengths[p]) > 1]
    name = "prompt ids equal"
    if differ:
        return Check(name=name, ok=False, detail=f"arms got different ids for prompt {_some(differ)}")
    unknown = sum(None in each for each in hashes.values())
    if unknown:
        detail = f"not known of {unknown} of {len(hashes)} prompts; their lengths are equal as far as known"
        return Check(name=name, ok=None, detail=detail)
    return Check(name=name, ok=True, detail=f"{len(hashes)} prompts by their hashes")


def _facts(name: str, facts: Facts, value: Callable[[ArmFacts], str | None]) -> Check:
    known = {arm: found for arm, each in facts.arms.items() if (found := value(each)) is not None}
    if len(set(known.values())) > 1:
        said = ", ".join(f"{arm} {found[:12]}" for arm, found in sorted(known.items()))
        return Check(name=f"{name} equal", ok=False, detail=said)
    if not known or len(known) < len(facts.arms):
        return Check(name=f"{name} equal", ok=None, detail="not known of every arm")
    return Check(name=f"{name} equal", ok=True, detail=f"in {len(known)} arms")


def _parameters(facts: Facts) -> Check:
    """Of those that several arms tell."""
    seen: dict[str, set[str]] = defaultdict(set)
    for arm in facts.arms.values():
        for key, value in arm.parameters.items():
            seen[key].add(value)
    name = "effective parameters equal"
    if differ := sorted(key for key, values in seen.items() if len(values) > 1):
        said = [f"{key}: {' and '.join(sorted(seen[key]))}" for key in differ]
        return Check(name=name, ok=False, detail=_some(said))
    if not seen or any(not arm.parameters for arm in facts.arms.values()):
        return Check(name=name, ok=None, detail="not known of every arm")
    return Check(name=name, ok=True, detail=f"{len(seen)} parameters")


def _state(ended: Sequence[Output]) -> Check:
    """Runs on both sides of a restart, a sleep, new weights or a cleared cache are of two servers."""
    epochs: dict[str, set[str]] = defaultdict(set)
    for output in ended:
        if output.epoch is not None:
            epochs[output.arm].add(output.epoch)
    name = "one server state an arm"
    if split := sorted(arm for arm, each in epochs.items() if len(each) > 1):
        detail = f"the server of {_some(split)} was restarted, slept or got other weights while it was measured"
        return Check(name=name, ok=False, detail=detail)
    if any(output.epoch is None for output in ended):
        return Check(name=name, ok=None, detail="not known of every request")
    return Check(name=name, ok=True, detail=f"in {len(epochs)} arms")


def _verified(ended: Sequence[Output]) -> Check:
    """A stream whose text is not that of its tokens says nothing of the model."""
    name = "streams verified"
    if failed := [output.request_id for output in ended if output.verdict == "fail"]:
        return Check(name=name, ok=False, detail=f"verify-tokens failed {len(failed)}: {_some(failed)}")
    passed = sum(output.verdict == "pass" for output in ended)
    if passed < len(ended):
        return Check(
            name=name, ok=None, detail=f"{passed} of {len(ended)} passed, the others were not or not wholly checked"
        )
    return Check(name=name, ok=True, detail=f"all {passed} passed")


def _log_probabilities(ended: Sequence[Output], compared: Sequence[Compared]) -> Check:
    """Two or more at each token, or there is no margin."""
    name = "log probabilities"
    unknown = sum(d.kind == "UNKNOWN" for each in compared for d in each.differences)
    if unknown:
        return Check(name=name, ok=False, detail=f"{unknown} first differences have none on either side")
    without = sorted({output.arm for output in ended if not _logged(output)})
    if without:
        return Check(name=name, ok=None, detail=f"not all of {_some(without)} have two; the margin of one side is used")
    return Check(name=name, ok=True, detail="two or more at every token")


def _cut(compared: Sequence[Compared], contract: Contract) -> Check | None:
    """They are compared as far as both go, which is not the whole that bitwise equality is about. None: no pair was."""
    cut = [(each.name, *each.cut()) for each in compared]
    pairs = sum(number for _, number, _, _ in cut)
    if not pairs:
        return None
    whole = {each.name: sum(max(len(a.ids), len(b.ids)) for (a, b), _ in each.pairs) for each in compared}
    enough = all(longer - positions <= _CUT * whole[name] for name, _, positions, longer in cut)
    detail = (
        f"in {pairs} pairs one output was cut earlier than the other, and they are compared up to there: "
        "does max_model_len, or another limit of the servers, differ?"
    )
    return Check(
        name="outputs cut at one length", ok=None if enough and contract != "bitwise" else False, detail=detail
    )


def _logged(output: Output) -> bool:
    return len(output.top) == len(output.ids) and len(output.top[0]) >= 2


def _beyond_budget(ended: Sequence[Output], budget: int, least: float) -> Check:
    """Below its budget a sparse attention is a dense one."""
    candidate = [output for output in ended if output.arm == "b"] or ended
    name = "beyond the sparsity budget"
    beyond = tokens = 0
    for output in candidate:
        if output.prompt_tokens is None:
            return Check(name=name, ok=False, detail="the prompts' lengths are not known")
        length = len(output.ids)
        tokens += length
        beyond += min(length, max(0, output.prompt_tokens + length - 1 - budget))
    share = beyond / tokens if tokens else 0.0
    detail = f"{share:.0%} of tokens were generated with a context of more than {budget}"
    if share < least:
        detail += f", {least:.0%} are needed: take longer prompts"
    return Check(name=name, ok=share >= least, detail=detail)


def failures(found: Sequence[Check]) -> Iterator[str]:
    """Why nothing is concluded."""
    yield from (f"{check.name}: {check.detail}" for check in found if check.ok is False)
