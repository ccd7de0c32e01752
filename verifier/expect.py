"""The text that a client should have got for these ids: exact rules, no thresholds. Pure.

Rules: docs/architecture.md, "How a request is judged".
"""

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from verifier.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextRules:
    """What decides an output's text besides its ids."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_len: int = 0  # tokens
    prompt_tail: Sequence[int] = ()  # the prompt's last ids: what primes vLLM's detokenizer


@dataclass(slots=True)
class Expected:
    """The text of some ids. Offsets are code points of `text`.

    From the byte table, `text` is the lenient decoding of all bytes, a character cut at the end included as U+FFFD.
    By replay, it is what vLLM's detokenizer emits, which never ends inside a character.
    """

    text: str
    pieces: Sequence[bytes] | Sequence[str]
    by_replay: bool = False
    _ends: list[int] | None = field(default=None, repr=False)
    _emitted: list[int] | None = field(default=None, repr=False)

    def ends(self) -> list[int]:
        """Where each id's text ends; never falling."""
        self._measure()
        assert self._ends is not None
        return self._ends

    def token_at(self, offset: int) -> int:
        """Index of the id whose text holds the code point at `offset`; the number of ids at and past the end."""
        return bisect_right(self.ends(), offset)

    def tokens_emitting(self, length: int) -> int:
        """How many ids it takes until the server has emitted the first `length` code points; all ids if it never has.

        The server emits up to the last id at which the text does not end inside a character.
        """
        self._measure()
        assert self._emitted is not None
        return min(bisect_left(self._emitted, length) + 1, len(self._emitted)) if length else 0

    def clean(self) -> str:
        """What the server has emitted after the last id: `text` less everything since the last clean boundary."""
        if not self.text.endswith(REPLACEMENT):
            return self.text
        self._measure()
        return self.text[: self._emitted[-1]] if self._emitted else ""

    def _measure(self) -> None:
        """Where each id's text ends, and how much has been emitted by then. Needed for faults and cuts only."""
        if self._ends is not None:
            return
        if self.by_replay:
            self._ends = self._emitted = list(accumulate(map(len, self.pieces)))
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends, self._emitted = [], []
        length, emitted = 0, 0
        for piece in self.pieces:
            assert isinstance(piece, bytes)
            length += len(decoder.decode(piece))
            begun = bool(decoder.getstate()[0])  # an id that begins a character is the first to hold it
            if not begun and not self.text.endswith(REPLACEMENT, 0, length):
                emitted = length
            self._ends.append(length + begun)
            self._emitted.append(emitted)


def from_table(tokenizer: Tokenizer, ids: Sequence[int], rules: TextRules) -> Expected | None:
    """Join the bytes of the ids; None where the tokenizer has no table. Ids without an entry have no text."""
    table = tokenizer.table
    if table is None:
        return None
    skip = tokenizer.special if rules.skip_special_tokens else frozenset()
    pieces = [b"" if token_id in skip else table.get(token_id, b"") for token_id in ids]
    return Expected(b"".join(pieces).decode("utf-8", "replace"), pieces)


def from_replay(tokenizer: Tokenizer, ids: Sequence[int], rules: TextRules) -> Expected:
    """Feed the ids to vLLM's own detokenizer, primed with the prompt's last ids.

    A prompt that ends inside a character makes that detokenizer stream the prompt back (vLLM issue 48853). That is a
    fault to be found, not a rule, so the prompt is cut back to where it is whole.
    """
    prompt = list(rules.prompt_tail)
    while prompt and tokenizer.text(prompt, skip_special=rules.skip_special_tokens).endswith(REPLACEMENT):
        prompt.pop()
    pieces = tokenizer.replay(
        prompt,
        ids,
        skip_special=rules.skip_special_tokens,
        spaces_between_special=rules.spaces_between_special_tokens,
    )
    return Expected("".join(pieces), pieces, by_replay=True)


def strips_leading_space(tokenizer: Tokenizer, rules: TextRules) -> bool | None:
    """Is one leading space dropped? Only SentencePiece does it, and only behind a prompt without text.

    None: the prompt is longer than what was logged of it, and that much has no text.
    """
    if not tokenizer.strips:
        return False
    if tokenizer.text(rules.prompt_tail, skip_special=rules.skip_special_tokens):
        return False
    return True if rules.prompt_len == len(rules.prompt_tail) else None


def without_leading_space(expected: Expected) -> Expected:
    """The same without the leading space of its first non-empty piece."""
    pieces = list(expected.pieces)
    for index, piece in enumerate(pieces):
        if piece:
            assert isinstance(piece, bytes)
            pieces[index] = piece.removeprefix(b" ")
            break
    return Expected(expected.text.removeprefix(" "), pieces)  # type: ignore[arg-type]  # bytes, as asserted
