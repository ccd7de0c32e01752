"""Name the difference between the text that was due and the text that came. Pure.

Rules: strip what both have in common at the start and the end; what is left on each side decides the class.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.expect import REPLACEMENT


@dataclass(frozen=True, slots=True)
class Difference:
    """Offsets in code points: `offset` in both texts, for they are equal up to there."""

    code: str  # MISSING_TEXT, EXTRA_TEXT, DUPLICATED_TEXT, REORDERED, ALTERED_TEXT or PROMPT_LEAK
    offset: int
    due: str  # what the ids say should stand here
    came: str  # what the client got instead
    broken_utf8: bool = False  # U+FFFD came where none was due


def common_prefix(one: str, other: str) -> int:
    """Length of the common prefix."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit  # equal up to low, different somewhere before high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def classify(
    due: str, came: str, prompt_tail: str = "", due_ends: Sequence[int] = (), came_ends: Sequence[int] = ()
) -> Difference:
    """Name how `came` differs from `due`, which it does.

    prompt_tail: the end of the prompt's text, if known. due_ends, came_ends: where tokens and chunks end, so that a
    difference that could stand at several offsets is put where a token or a chunk begins.
    """
    start = common_prefix(due, came)
    end = common_prefix(due[start:][::-1], came[start:][::-1])
    missing, extra = due[start : len(due) - end], came[start : len(came) - end]
    code = _code(due, missing, extra, start, prompt_tail)
    broken = REPLACEMENT in extra and REPLACEMENT not in missing
    if not missing or not extra:
        size = len(missing or extra)
        start = _slide(due, start, size, due_ends) if missing else _slide(came, start, size, came_ends)
        missing, extra = (due[start : start + size], "") if missing else ("", came[start : start + size])
    else:  # show the whole first token
        begin = due_ends[bisect_right(due_ends, start) - 1] if due_ends and start >= due_ends[0] else 0
        missing, extra, start = due[begin:start] + missing, came[begin:start] + extra, begin
    return Difference(code, start, missing, extra, broken)


def _slide(text: str, start: int, size: int, ends: Sequence[int]) -> int:
    """Where a lone piece text[start : start + size] begins, if moving it left over equal text reaches a border."""
    borders, offset = {0, *ends}, start
    while offset not in borders:
        if text[offset - 1] != text[offset + size - 1]:
            return start
        offset -= 1
    return offset


def _code(due: str, missing: str, extra: str, start: int, prompt_tail: str) -> str:
    if not extra:
        return "MISSING_TEXT"
    if not missing:
        size = len(extra)
        # The common prefix may have eaten into a repeat ("ab" + "ab" | "c"), so look at each rotation's neighbours.
        beside = due[max(0, start - size) : start + size]
        if extra in beside or (size >= 8 and extra in due):
            return "DUPLICATED_TEXT"
        if size >= 4 and extra in prompt_tail:
            return "PROMPT_LEAK"
        return "EXTRA_TEXT"
    if sorted(missing) == sorted(extra):
        return "REORDERED"
    if _within(extra, missing):  # lost in several places
        return "MISSING_TEXT"
    if _within(missing, extra):
        return "EXTRA_TEXT"
    return "ALTERED_TEXT"


def _within(part: str, whole: str) -> bool:
    """Does `whole` become `part` by leaving characters out?"""
    rest = iter(whole)
    return all(character in rest for character in part)
