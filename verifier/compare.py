"""Does this text come from these ids? The text axis of one choice. Pure.

Tried in this order: the byte table, with each rule by which a server rightly sends less than all bytes; then, only
where bytes alone cannot decide, vLLM's own detokenizer. Nothing is compared by likeness.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verifier.classify import Difference, classify, common_prefix
from verifier.detokenizer import TooManyHeld
from verifier.expect import (
    REPLACEMENT,
    Expected,
    TextRules,
    from_replay,
    from_table,
    strips_leading_space,
    without_leading_space,
)
from verifier.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ending:
    """How the choice ended, as the client was told."""

    by_token: bool = False  # an end token: the last id has no text
    stop: str | None = None  # the stop string that ended it
    min_tokens: int = 0  # a stop string completed by an earlier token did not count
    broken_off: bool = False  # the client left, or the stream broke: any prefix is right
    engine_open: bool = False  # the engine's log ends before the request does: more ids may follow


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it: `codes` where the text is explained, else a difference, a missing stop string, or undecided."""

    tokens: int  # ids whose text was found right, the end token included
    codes: list[str] = field(default_factory=list)  # why it matches: EXACT, TRIMMED_STOP, ...
    kept: int | None = None  # ids up to the one completing the stop string; None: all of them
    difference: Difference | None = None
    token_index: int | None = None  # the first token concerned by the difference
    stop_missing: bool = False  # the text of the ids does not hold the stop string that ended it
    undecided: str | None = None  # what would have to be known to decide
    piece: int | None = None  # index of the delivered piece where the difference shows; None: by its offset
    left_out: int = 0  # code points that a parser threw away by its own rule


@dataclass(frozen=True, slots=True)
class Due:
    """A text that the server may have had of these ids, before a parser laid it into channels."""

    expected: Expected
    ids: Sequence[int]  # those with text
    text: str  # a beginning of expected.text
    codes: list[str]  # why it is not all of it
    kept: int | None = None  # ids up to the one completing the stop string; None: all of them


def dues(tokenizer: Tokenizer, ids: Sequence[int], rules: TextRules, ending: Ending) -> Iterator[Due]:
    """The texts these ids can have had, likeliest first. Broken off: any beginning of them has come.

    Raises TooManyHeld.
    """
    with_text = _with_text(ids, rules, ending)
    for candidate in _candidates(tokenizer, with_text, rules):
        expected, codes = candidate.expected, candidate.codes
        if candidate.uncertain:
            continue
        if ending.stop is not None and not ending.broken_off:
            if cut := _stop_cut(expected, ending):
                end = cut[0] + (len(ending.stop) if rules.include_stop_str_in_output else 0)
                yield Due(expected, with_text, expected.text[:end], ["TRIMMED_STOP", *codes], cut[1])
            continue
        broken_off = ["ABORTED_PREFIX"] if ending.broken_off else []
        yield Due(expected, with_text, expected.text, [*broken_off, *codes])
        if not ending.broken_off and (clean := expected.clean()) != expected.text:
            yield Due(expected, with_text, clean, ["INCOMPLETE_UTF8_TAIL", *codes])


@dataclass(frozen=True, slots=True)
class _Candidate:
    expected: Expected
    codes: list[str]
    uncertain: str | None = None  # a match proves nothing unless this is known


def compare(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    rules: TextRules,
    came: str,
    ending: Ending,
    chunk_ends: Sequence[int] = (),
) -> Comparison:
    """Explain `came` by `ids`, or say where they part. chunk_ends: where its chunks end in `came`, in code points."""
    try:
        return _compare(tokenizer, ids, rules, came, ending, chunk_ends)
    except TooManyHeld:
        return Comparison(0, undecided="the text of a long run of ids that this tokenizer's decoder holds back")


def _compare(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    rules: TextRules,
    came: str,
    ending: Ending,
    chunk_ends: Sequence[int],
) -> Comparison:
    with_text = _with_text(ids, rules, ending)
    special = rules.skip_special_tokens and not tokenizer.special.isdisjoint(with_text)
    tried: list[_Candidate] = []
    for candidate in _candidates(tokenizer, with_text, rules):
        tried.append(candidate)
        if match := _match(candidate, came, rules, ending):
            code, kept = match
            if candidate.uncertain:
                return Comparison(0, undecided=candidate.uncertain)
            codes = [code, *candidate.codes, *(["SPECIAL_SKIPPED"] if special else [])]
            return Comparison(_tokens_checked(candidate, came, ending, len(ids)), codes, kept)
    return _difference(tokenizer, tried, rules, came, ending, chunk_ends)


def _with_text(ids: Sequence[int], rules: TextRules, ending: Ending) -> Sequence[int]:
    """The ids less the end token, which has no text."""
    return ids[:-1] if ending.by_token and ids and not rules.include_stop_str_in_output else ids


def _candidates(tokenizer: Tokenizer, ids: Sequence[int], rules: TextRules) -> Iterator[_Candidate]:
    """The texts these ids can have, likeliest first; replay last, and only where it can differ."""
    expected = from_table(tokenizer, ids, rules)
    if expected is not None:
        strips = strips_leading_space(tokenizer, rules)
        if strips is not True or not expected.text.startswith(" "):
            yield _Candidate(expected, [])
        if strips is not False and expected.text.startswith(" "):
            uncertain = None if strips else "whether the prompt has any text (it is longer than what was logged of it)"
            yield _Candidate(without_leading_space(expected), ["LEADING_SPACE"], uncertain)
    if expected is None or tokenizer.byte_fallback or REPLACEMENT in expected.text:
        yield _Candidate(from_replay(tokenizer, ids, rules), ["REPLAY_ONLY"])


def _match(candidate: _Candidate, came: str, rules: TextRules, ending: Ending) -> tuple[str, int | None] | None:
    expected = candidate.expected
    if ending.broken_off:
        return ("ABORTED_PREFIX", None) if expected.text.startswith(came) else None
    if ending.stop is not None:
        cut = _stop_cut(expected, ending)
        if cut is None:
            return None
        start, kept = cut
        end = start + len(ending.stop) if rules.include_stop_str_in_output else start
        return ("TRIMMED_STOP", kept) if came == expected.text[:end] else None
    if came == expected.text:
        return "EXACT", None
    if came == expected.clean():
        return "INCOMPLETE_UTF8_TAIL", None
    return None


def _stop_cut(expected: Expected, ending: Ending) -> tuple[int, int] | None:
    """(offset of the stop string that counts, ids up to the one completing it); None: the text does not hold it."""
    assert ending.stop is not None
    start = expected.text.find(ending.stop)
    while start >= 0:
        kept = expected.tokens_emitting(start + len(ending.stop))
        if kept > ending.min_tokens:
            return start, kept
        start = expected.text.find(ending.stop, start + 1)
    return None


def _tokens_checked(candidate: _Candidate, came: str, ending: Ending, total: int) -> int:
    return candidate.expected.token_at(len(came)) if ending.broken_off else total


def _due(candidate: _Candidate, rules: TextRules, ending: Ending) -> str:
    """The text that should have come, by this candidate."""
    text = candidate.expected.text
    if ending.stop is not None and (cut := _stop_cut(candidate.expected, ending)):
        return text[: cut[0] + (len(ending.stop) if rules.include_stop_str_in_output else 0)]
    return text if ending.broken_off else candidate.expected.clean()


def _difference(
    tokenizer: Tokenizer,
    tried: list[_Candidate],
    rules: TextRules,
    came: str,
    ending: Ending,
    chunk_ends: Sequence[int],
) -> Comparison:
    """Report against the candidate that agrees longest; of two, the later one, which is nearer to the server."""
    best = max(reversed(tried), key=lambda candidate: common_prefix(candidate.expected.text, came))
    due = _due(best, rules, ending)
    equal = common_prefix(due, came)
    checked = best.expected.token_at(equal)
    if ending.engine_open and equal == len(due):
        return Comparison(checked, undecided="the ids sampled after the end of the engine's log")
    stop_missing = ending.stop is not None and not any(_stop_cut(candidate.expected, ending) for candidate in tried)
    if came == due:
        return Comparison(checked, stop_missing=stop_missing)
    prompt = tokenizer.text(rules.prompt_tail)
    difference = classify(due, came, prompt, best.expected.ends(), chunk_ends)
    token_index = best.expected.token_at(difference.offset)
    return Comparison(token_index, difference=difference, token_index=token_index, stop_missing=stop_missing)
