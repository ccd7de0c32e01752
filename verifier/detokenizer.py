"""vLLM's detokenizer, step for step, at a cost that grows with the number of ids and no faster. Pure.

vLLM feeds ids to `tokenizers.decoders.DecodeStream`, which with each id decodes anew all that it holds back: a run of
ids that never becomes valid UTF-8 costs it the square of their number. Whether the text ends in U+FFFD, and so whether
anything is emitted, can be told from its last bytes; here the library decodes only what will be emitted.
Source: step_decode_stream of tokenizers 0.23.
"""

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

REPLACEMENT = "\ufffd"
MOST_HELD = 4096  # ids held back at once, where only decoding all of them tells how their text ends


class TooManyHeld(Exception):
    """More ids are held back than can be decoded again and again."""


class Ending(Protocol):
    """How the text of some ids ends, followed id by id."""

    def add(self, token_id: int) -> bool:
        """One more id. False: the library leaves it out, so the text stays as it is."""

    def broken(self) -> bool:
        """Does the text end in U+FFFD? False also where that is not known."""


class ByteLevelEnding:
    """The bytes of all ids are decoded together."""

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int]) -> None:
        self._table, self._skipped = table, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = ""

    def add(self, token_id: int) -> bool:
        if token_id in self._skipped or (piece := self._table.get(token_id)) is None:
            return False
        self._last = self._decoder.decode(piece)[-1:] or self._last
        return True

    def broken(self) -> bool:
        return bool(self._decoder.getstate()[0]) or self._last == REPLACEMENT


class ByteFallbackEnding:
    """Byte tokens that follow each other are decoded together: where that is no valid UTF-8, each is a U+FFFD."""

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int], byte_tokens: Collection[int]) -> None:
        self._table, self._skipped, self._byte_tokens = table, skipped, byte_tokens
        self._run: codecs.IncrementalDecoder | None = None  # None: the last id was no byte token
        self._invalid = False  # the run is, whatever follows in it
        self._last = ""

    def add(self, token_id: int) -> bool:
        if token_id in self._skipped or (piece := self._table.get(token_id)) is None:
            return False
        if token_id not in self._byte_tokens:
            self._run, self._invalid, self._last = None, False, piece.decode(errors="replace")[-1:] or self._last
            return True
        if self._run is None:
            self._run = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            self._last = self._run.decode(piece)[-1:] or self._last
        except UnicodeDecodeError:
            self._invalid, self._last = True, REPLACEMENT
        return True

    def broken(self) -> bool:
        return self._invalid or (self._run is not None and bool(self._run.getstate()[0])) or self._last == REPLACEMENT


class UnknownEnding:
    """A decoder whose ways are not known: the library has to decode to tell."""

    def add(self, token_id: int) -> bool:
        return True

    def broken(self) -> bool:
        return False


@dataclass(slots=True)
class Window:
    """What a DecodeStream holds: ids, of which the first `index` have been emitted as `prefix`."""

    decode: Callable[[Sequence[int]], str]  # the library's
    ending: Ending
    ids: list[int] = field(default_factory=list)
    prefix: str = ""
    index: int = 0
    _text: str | None = ""  # of the ids; None: not decoded so far

    def add(self, token_id: int) -> None:
        self.ids.append(token_id)
        if self.ending.add(token_id):
            self._text = None

    def step(self, token_id: int) -> str | None:
        """What one more id makes the stream emit. Raises ValueError where the text no longer begins as it did."""
        if not self.prefix and self.ids and (text := self._emittable()) is not None:
            self.prefix, self.index = text, len(self.ids)
        self.add(token_id)
        text = self._emittable()
        if text is None or len(text.encode()) <= len(self.prefix.encode()):
            return None
        if not text.startswith(self.prefix):
            raise ValueError("the text of the ids no longer begins with what was emitted")
        new, self.ids = text[len(self.prefix) :], self.ids[self.index :]
        self._text = self.prefix = self.decode(self.ids)
        self.index = len(self.ids)
        return new

    def _emittable(self) -> str | None:
        """The text of the ids; None where it ends in U+FFFD."""
        if self.ending.broken():
            return None
        if self._text is None:
            if isinstance(self.ending, UnknownEnding) and len(self.ids) > MOST_HELD:
                raise TooManyHeld
            self._text = self.decode(self.ids)
        return None if self._text.endswith(REPLACEMENT) else self._text
