"""Requests packed, as they wait and as they are handed to another process; and unpacked, to judge them. Pure."""

import math
import pickle
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from sparseety.records import AnyRecord, Chunk, Gap, RequestAdded, RequestFinished, RequestStart, Response, StreamDone
from verifier.fragments import Begin, End, Packed, Run
from verifier.logs import CLOCK_SKEW, Log, within
from verifier.requests import Capture, EngineRequest, Join, add_chunk, add_done, add_response, add_rows, add_run

_PAST = struct.Struct("<ddIQI")
_BEGIN = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of a judged reply: enough to see whether a later one of the same id changes anything."""

    start: float
    end: float
    begins: tuple[float, ...]  # of the engine requests that it was judged by
    externals: int  # how many ids these bore
    judged: int  # in which order

    def pack(self) -> bytes:
        """In a fifth of the memory: there is one for each request of a log."""
        return _PAST.pack(self.start, self.end, self.externals, self.judged, len(self.begins)) + b"".join(
            map(_BEGIN.pack, self.begins)
        )

    @staticmethod
    def unpack(data: bytes) -> "Iterator[Past]":
        """Of as many as were packed, one behind the other."""
        at = 0
        while at < len(data):
            start, end, externals, judged, count = _PAST.unpack_from(data, at)
            at += _PAST.size
            begins = tuple(_BEGIN.unpack_from(data, at + index * _BEGIN.size)[0] for index in range(count))
            at += count * _BEGIN.size
            yield Past(start, end, begins, externals, judged)

    def within(self, begin: float) -> bool:
        """Can the engine have begun this during that request?"""
        return within(begin, (self.start, self.end))

    @property
    def by_time(self) -> bool:
        """Would it be joined as it was, were its id not the only one of its kind?"""
        return all(map(self.within, self.begins))

    def changed_by(self, added: RequestAdded, name: str) -> bool:
        """By an engine request that bears the same id."""
        number = added.external_id.removeprefix(name)[1:]
        again = not number or (number.isdecimal() and int(number) < self.externals)
        return not (self.begins and again and self.by_time) or self.within(added.ts)

    def rivals(self, capture: "OpenCapture", begins: list[float]) -> bool:
        """With a reply that bears the same id, and the engine requests it would be judged by."""
        theirs = any(within(begin, capture.life) for begin in self.begins)
        return (
            theirs
            or not self.by_time
            or not all(within(begin, capture.life) and not self.within(begin) for begin in begins)
        )


@dataclass(slots=True)
class PastOfId:
    """The judged replies of one id, packed: all of a client's requests may bear it."""

    packed: bytearray = field(default_factory=bytearray)
    until: float = -math.inf  # the end of the last one and of all that belongs to it

    def add(self, past: Past) -> None:
        self.packed += past.pack()
        self.until = max(self.until, past.end, *past.begins) if past.begins and past.by_time else math.inf

    def is_over(self, after: float) -> bool:
        """Do none of them matter to what began after that time, being joined by time themselves?"""
        return self.until + CLOCK_SKEW < after


@dataclass(slots=True)
class OpenCapture:
    """A proxy's request that waits to be judged."""

    log: Log
    number: int
    line: int  # of its first record, in the log
    block: int = 0  # that holds it
    begin: Begin | None = None
    end: End | None = None
    ids: list[str] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    parts: list[tuple[int, Packed]] = field(default_factory=list)  # and what to add to their lines
    named: int = 0  # in which order, among what was named and judged
    queued: bool = False  # somebody will look whether it is ready
    late: bool = False  # and once more when it has waited for long
    past: Past | None = None  # it is judged

    @property
    def life(self) -> tuple[float, float]:
        return self.begin.ts if self.begin else -math.inf, self.end.ts if self.end else math.inf

    @property
    def id(self) -> str | None:
        return self.ids[0] if self.ids else None

    def unpack(self) -> Capture:
        capture = Capture(self.log, self.number, self.line, gaps=self.gaps)
        for offset, packed in self.parts:
            for item in pickle.loads(packed):
                if isinstance(item, Run):
                    add_run(capture, offset, item)
                else:
                    _add(capture, offset + item[0], item[1])
        return capture


def _add(capture: Capture, line: int, record: AnyRecord) -> None:
    if isinstance(record, Chunk):
        add_chunk(capture, line, record)
    elif isinstance(record, StreamDone):
        add_done(capture, record)
    elif isinstance(record, Response):
        add_response(capture, line, record)
    elif isinstance(record, RequestStart):
        if capture.start is not None:
            capture.contradicts("it begins twice")
        capture.start = record


@dataclass(slots=True)
class Served:
    """An engine's request that waits for the reply it belongs to."""

    log: Log
    number: int
    line: int  # of its first record, in the log
    block: int = 0  # that holds it
    added: RequestAdded | None = None
    finished: RequestFinished | None = None
    gaps: list[Gap] = field(default_factory=list)
    parts: list[tuple[int, Packed]] = field(default_factory=list)
    taken: bool = False  # a reply bears its id
    judged: bool = False  # and that reply is judged, by this among others
    shrunk: bool = False  # its ids were not kept

    @property
    def life(self) -> tuple[float, float]:
        """From when to when the engine had it, as far as that is known."""
        return self.added.ts if self.added else -math.inf, self.finished.ts if self.finished else math.inf

    def unpack(self) -> EngineRequest:
        request = EngineRequest(self.log, self.number, self.line, self.added, self.finished, gaps=self.gaps)
        for offset, packed in self.parts:
            add_rows(request, offset, pickle.loads(packed))
        return request


def any_within(begins: list[float], capture: OpenCapture) -> bool:
    """The same for any of these, which ascend."""
    start, end = capture.life
    index = bisect_left(begins, start - CLOCK_SKEW)
    return index < len(begins) and begins[index] <= end + CLOCK_SKEW


@dataclass(frozen=True, slots=True)
class Case:
    """A reply, and what the engines' logs have for it."""

    capture: OpenCapture
    choices: dict[int, list[Served]] = field(default_factory=dict)
    claims: int = 1

    @property
    def size(self) -> int:
        parts = [
            *self.capture.parts,
            *(part for choice in self.choices.values() for one in choice for part in one.parts),
        ]
        return sum(len(packed) for _, packed in parts)

    def unpack(self) -> tuple[Capture, Join]:
        known: dict[int, EngineRequest] = {}
        choices = {
            choice: [known.setdefault(id(one), one.unpack()) for one in served]
            for choice, served in self.choices.items()
        }
        return self.capture.unpack(), Join(choices, self.claims)
