"""How many tokens a difference of texts is about. For sums, never for a verdict. Pure."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from verifier.classify import Difference
from verifier.tokenizer import Tokenizer


class Concerned(NamedTuple):
    missing: int = 0  # ids whose text did not come
    altered: int = 0  # ids whose text came as another, or in another place
    extra: int = 0  # tokens that it takes to make the text that came and that no id stands for


def concerned(tokenizer: Tokenizer, ids: Sequence[int], difference: Difference) -> Concerned:
    """ids: from the first one concerned on."""
    if difference.code in ("EXTRA_TEXT", "DUPLICATED_TEXT", "PROMPT_LEAK"):
        return Concerned(extra=max(1, len(tokenizer.encode(difference.came))))
    count = max(1, _spelling(tokenizer, ids, difference.due))
    return Concerned(missing=count) if difference.code == "MISSING_TEXT" else Concerned(altered=count)


def _spelling(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """How many of these ids it takes to make so much text."""
    table, size = tokenizer.table, len(text.encode("utf-8", "surrogatepass"))
    pieces = (len(table.get(i, b"") if table is not None else tokenizer.text([i]).encode()) for i in ids)
    return next((count for count, made in enumerate(accumulate(pieces), 1) if made >= size), len(ids))
