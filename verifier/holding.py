"""Text that a server holds back and sends later, with more: stop strings and characters of several tokens. Pure."""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from verifier.expect import Expected
from verifier.requests import Delivered


def held_back(delivered: Delivered, expected: Expected) -> int:
    """How many chunks came after an event without text and hold text of two ids or more.

    Goes by lengths alone, so it is for text that is right. An id without text (a special token that is left out) makes
    an event without text too: a chunk behind one does not count.
    """
    ends, pieces = expected.ends(), expected.pieces
    chunk_ends = list(accumulate(map(len, delivered.pieces)))
    chunks = 0
    for chunk in delivered.held:
        begin, end = chunk_ends[chunk - 1] if chunk else 0, chunk_ends[chunk]
        first = bisect_right(ends, begin)
        last = max(bisect_left(ends, end) + 1, bisect_right(ends, end))  # one that goes on behind the chunk counts
        without_text = first > 0 and ends[first - 1] == begin and not pieces[first - 1]
        chunks += not without_text and sum(1 for piece in pieces[first:last] if piece) > 1
    return chunks
