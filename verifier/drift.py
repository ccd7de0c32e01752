"""Does the text, tokenized anew, give other ids than those sampled? Information, never a fault. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from verifier.expect import REPLACEMENT
from verifier.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Retokenized:
    """code: DRIFT, NOT_COMPARABLE, or "" where the ids are the same."""

    code: str
    detail: str = ""
    drifted: int = 0  # sampled ids that stand for no piece of the new ones
    compared: int = 0  # sampled ids


def retokenize(tokenizer: Tokenizer, ids: Sequence[int], end_ids: frozenset[int], text: str) -> Retokenized:
    """Compare `ids`, whose text is `text`, with what the tokenizer makes of that text. end_ids: those without text."""
    ids = ids[:-1] if ids and ids[-1] in end_ids else ids
    if REPLACEMENT in text:
        return Retokenized("NOT_COMPARABLE", "the text has characters that could not be decoded")
    if not tokenizer.special.isdisjoint(ids):
        return Retokenized("NOT_COMPARABLE", "special tokens stand among the ids")
    again = tokenizer.encode(text)
    if again == list(ids):
        return Retokenized("", compared=len(ids))
    if tokenizer.text(again) != tokenizer.text(ids):
        return Retokenized("NOT_COMPARABLE", "the tokenizer changes this text (a normalizer) before it makes ids of it")
    pairs = zip(again, ids, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(again), len(ids)))
    detail = f"tokenized anew, the text gives {len(again)} ids instead of {len(ids)}, other from token {first} on"
    other = _other(tokenizer, ids, again)
    drifted, stretches = sum(other), sum(1 for is_other, _ in groupby(other) if is_other)
    if other:
        detail += f"; {drifted} tokens in {stretches} {'stretch' if stretches == 1 else 'stretches'} drifted"
    return Retokenized("DRIFT", detail, drifted, len(ids))


def _other(tokenizer: Tokenizer, ids: Sequence[int], again: Sequence[int]) -> list[bool]:
    """For each sampled id: is the piece of text it stands for none of the new pieces? Empty: not known."""
    if tokenizer.table is None:
        return []
    pieces = [_pieces(tokenizer.table, some) for some in (ids, again)]
    known = set(pieces[1])
    return [piece not in known for piece in pieces[0]]


def _pieces(table: dict[int, bytes], ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first byte, byte behind the last) of each id."""
    ends = list(accumulate(len(table.get(token_id, b"")) for token_id in ids))
    return list(zip([0, *ends], ends, strict=False))
