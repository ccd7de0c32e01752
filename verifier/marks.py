"""Where to go on reading a log after a restart, and what has to be known there. Pure data."""

import msgspec

from sparseety.records import EngineStart, Gap, LogOpen
from verifier.logs import Writer

Spans = list[tuple[int, int]]
"""(first, last) of numbers that follow each other."""


class LogState(msgspec.Struct):
    """A log, as far as it was read: the fields of verifier.logs.Log of these names."""

    first_ts: float | None
    last_ts: float
    last_line: int
    closed: bool
    sampled: bool
    silent: str | None
    damaged: bool
    goes_on: bool
    next_segment: int
    opening: LogOpen | None
    engine: EngineStart | None
    lost: int  # how many losses were known
    losses: list[tuple[float | None, float, Gap]] = []  # those of them that may concern a request not judged


class Mark(msgspec.Struct):
    """A line of a log's file, and what was known before it."""

    writer: Writer
    path: str  # of the file, as before packing
    segment: int  # of the file
    number: int  # of the line, from 1
    offset: int  # of the line, bytes of unpacked content
    line_offset: int = 0  # from a line of the file to one of the log
    records: int = 0  # of the file before it
    holes: bool = False  # lines of the file before it could not be used
    waiting: int = 0  # requests that have begun in this log and are not judged
    state: LogState | None = None  # None: nothing of the log was read
    captures: Spans = []  # requests that are judged, whose records from here on are to be passed over
    served: Spans = []
