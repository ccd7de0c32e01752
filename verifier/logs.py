"""Gather the records of both logs by request: what a client got, what an engine did. Pure: records in, requests out.

A log proves a good deal about itself: its events, chunks and characters are counted. Where those counts contradict each
other, lines were lost or changed, and nothing that this could explain may be blamed on a server.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.records import (
    AnyRecord,
    Chunk,
    EngineStart,
    Gap,
    LogClose,
    LogOpen,
    RequestAdded,
    RequestFinished,
    RequestStart,
    Response,
    Row,
    Step,
    StreamDone,
    ToolCall,
    Usage,
)
from verifier.findings import place

Writer = tuple[str, str, int, float] | Path
"""Who wrote a file: (source, host, pid, start); its path where the first line is lost."""

CLOCK_SKEW = 1.0  # seconds by which the clocks of two witnesses may differ

TEXT_KINDS = frozenset({"text", "reasoning", "tool_call"})


@dataclass(frozen=True, slots=True)
class Loss:
    """Records that are missing from a log, and when they were due."""

    begin: float
    end: float
    gap: Gap

    @property
    def unnamed(self) -> bool:
        return not self.gap.captures and not self.gap.requests


@dataclass(slots=True)
class Log:
    """One writer's log, of one file or several segments, and what it says about itself."""

    path: Path  # of its first file
    opening: LogOpen | None = None  # of the first file; None: its first line is lost
    engine: EngineStart | None = None
    first_ts: float | None = None
    last_ts: float = 0.0
    closed: bool = False  # in order, with nothing to follow
    damaged: bool = False  # something of it is unusable or missing: what is not here may have stood there
    miscounted: bool = False  # it was closed with more or fewer records than could be read
    losses: list[Loss] = field(default_factory=list)
    next_segment: int = 0
    parts: list[tuple[int, int, Path]] = field(default_factory=list)  # of each file: last line before it, offset, path

    def place(self, line: int) -> str:
        """Where to look up a line of this log."""
        index = bisect_right(self.parts, (line - 1, math.inf)) - 1
        _, offset, path = self.parts[index]
        return place(path, line - offset)

    def begin_file(self, path: Path, last_line: int, offset: int) -> None:
        """Lines of the log after `last_line` are those of this file; its own numbers are less by `offset`."""
        self.parts.append((last_line, offset, path))

    def opened(self, opening: LogOpen) -> None:
        """A segment begins. Where those before it are gone (the cap on disk space does that), their time is a loss."""
        if opening.segment > self.next_segment:
            begin = self.last_ts if self.opening else -math.inf
            first, last = self.next_segment, opening.segment - 1
            which = f"segment {first}" if first == last else f"segments {first} to {last}"
            gap = Gap(ts=opening.ts, reason=f"{which} of the log is not here", count=0)
            self.losses.append(Loss(begin, opening.ts, gap))
        self.opening = self.opening or opening
        self.next_segment = opening.segment + 1
        self.closed = False

    def lost_between(self, begin: float, end: float) -> list[Gap]:
        """Losses of that time, those that name their requests too."""
        return [loss.gap for loss in self.losses if loss.begin <= end and loss.end >= begin]

    def unnamed_between(self, begin: float, end: float) -> list[Gap]:
        """Losses that any request of that time may have suffered."""
        return [loss.gap for loss in self.losses if loss.unnamed and loss.begin <= end and loss.end >= begin]


@dataclass(slots=True)
class Delivered:
    """One choice as the client got it."""

    pieces: list[str] = field(default_factory=list)  # text-bearing deltas in wire order
    piece_lines: list[int] = field(default_factory=list)  # their lines in the log
    piece_kinds: list[str] = field(default_factory=list)  # text, reasoning or tool_call, for each piece
    length: int = 0  # code points of the pieces
    kinds: set[str] = field(default_factory=set)
    calls: dict[int, ToolCall] = field(default_factory=dict)  # tool calls by index, their parts joined
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add_piece(self, kind: str, text: str, line: int) -> None:
        self.pieces.append(text)
        self.piece_kinds.append(kind)
        self.piece_lines.append(line)
        self.kinds.add(kind)
        self.length += len(text)

    def add_calls(self, calls: list[ToolCall]) -> None:
        for part in calls:
            self.kinds.add("tool_call")
            known = self.calls.get(part.index, ToolCall(index=part.index))
            name = part.name if known.name is None else known.name + (part.name or "")
            self.calls[part.index] = ToolCall(index=part.index, name=name, arguments=known.arguments + part.arguments)

    def add_ids(self, ids: list[int] | None) -> None:
        if ids is not None:
            self.token_ids = (self.token_ids or []) + ids

    def end(self, finish_reason: str | None, stop_reason: int | str | None) -> None:
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason


@dataclass(slots=True)
class Capture:
    """One request as the proxy saw it."""

    log: Log
    number: int
    line: int  # of its first record
    start: RequestStart | None = None
    done: StreamDone | None = None
    response: Response | None = None
    response_ids: list[str] = field(default_factory=list)  # distinct ids; more than one is a fault of the stream
    choices: dict[int, Delivered] = field(default_factory=dict)
    error_events: int = 0
    unparsed_events: int = 0
    gaps: list[Gap] = field(default_factory=list)
    contradiction: str | None = None  # what in its records cannot be true of a log that is whole
    events_seen: int = 0  # highest wire_index
    chunks_seen: int = 0  # text-bearing records

    def contradicts(self, what: str) -> None:
        self.contradiction = self.contradiction or what

    @property
    def response_id(self) -> str | None:
        return self.response_ids[0] if self.response_ids else None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.response is not None

    @property
    def place(self) -> str:
        return self.log.place(self.line)

    @property
    def losses(self) -> list[Gap]:
        """What this log lost of the request, for certain or perhaps."""
        ending = self.done or self.response
        begin = self.start.ts if self.start else -math.inf
        return [*self.gaps, *self.log.unnamed_between(begin, ending.ts if ending else math.inf)]

    @property
    def usage(self) -> Usage | None:
        ending = self.done or self.response
        return ending.usage if ending else None


@dataclass(slots=True)
class EngineRequest:
    """One request as the engine saw it: one choice of one prompt."""

    log: Log
    number: int
    line: int
    added: RequestAdded | None = None
    finished: RequestFinished | None = None
    ids: list[int] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=list)  # index of each row's first id
    row_lines: list[int] = field(default_factory=list)
    contradiction: str | None = None  # why the ids cannot be trusted
    gaps: list[Gap] = field(default_factory=list)

    @property
    def place(self) -> str:
        return self.log.place(self.line)

    @property
    def life(self) -> tuple[float, float]:
        """From when to when the engine had it, as far as that is known."""
        return self.added.ts if self.added else -math.inf, self.finished.ts if self.finished else math.inf

    @property
    def losses(self) -> list[Gap]:
        """What this log lost of the request, for certain or perhaps."""
        return [*self.gaps, *self.log.unnamed_between(*self.life)]

    @property
    def complete(self) -> bool:
        """Every id is here: the engine said how many there were, and no row is missing."""
        return self.finished is not None and self.contradiction is None and self.finished.total_ids == len(self.ids)


@dataclass(slots=True)
class Logs:
    """Everything that was read, by request. A request is known by its writer and the writer's number for it."""

    files: list[Log] = field(default_factory=list)  # one for each writer
    captures: dict[tuple[int, int], Capture] = field(default_factory=dict)  # by (id(log), number)
    engine: dict[tuple[int, int], EngineRequest] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _writers: dict[Writer, tuple[Log, int]] = field(default_factory=dict)  # and the last line of its log so far
    _segments: set[tuple[Writer, int]] = field(default_factory=set)

    def add_file(self, path: Path, records: Iterable[tuple[int, AnyRecord]]) -> list[Log]:
        """Take the records of one file; a writer's segments in their order. Returns the logs that it held part of.

        A file is of one writer, as a rule. One that was put together from several is taken apart again; a segment
        that was read before (a copy) is left out.
        """
        touched: list[Log] = []
        log: Log | None = None
        writer: Writer = path
        offset = count = 0
        skipping = False
        for number, record in records:
            if isinstance(record, LogOpen):
                writer = (record.source, record.host, record.pid, record.start)
                skipping = (writer, record.segment) in self._segments
                if skipping:
                    self.notes.append(f"{path}: a copy of what was read already; it is left out")
                    continue
                self._segments.add((writer, record.segment))
                log = None
            if skipping:
                continue
            if log is None:
                log, offset = self._open(writer, path, number, record.ts)
                touched.append(log)
                count = 0
            line = offset + number
            if isinstance(record, LogClose) and record.records != count:
                log.damaged = log.miscounted = True
                self.notes.append(f"{path}: it had {record.records} records when it was closed; {count} could be read")
            self._add(log, line, record)
            count += 1
            log.last_ts = record.ts
            self._writers[writer] = log, line
        return touched

    def _open(self, writer: Writer, path: Path, number: int, ts: float) -> tuple[Log, int]:
        """The writer's log, and what to add to a line number of this file for its number in the log."""
        known = self._writers.get(writer)
        if known is None:
            log, last_line = Log(path, first_ts=ts), 0
            self.files.append(log)
        else:
            log, last_line = known
        offset = last_line - (number - 1)
        log.begin_file(path, last_line, offset)
        return log, offset

    def _add(self, log: Log, line: int, record: AnyRecord) -> None:
        match record:
            case Chunk():
                _add_chunk(self._capture(log, line, record.capture), line, record)
            case Step():
                for row in record.rows:
                    _add_row(self._engine(log, line, row.request), line, row)
            case RequestStart():
                capture = self._capture(log, line, record.capture)
                if capture.start is not None:
                    capture.contradicts("it begins twice")
                capture.start = record
            case StreamDone():
                _add_done(self._capture(log, line, record.capture), record)
            case Response():
                _add_response(self._capture(log, line, record.capture), line, record)
            case RequestAdded():
                self._engine(log, line, record.request).added = record
            case RequestFinished():
                self._engine(log, line, record.request).finished = record
            case Gap():
                for number in record.captures:
                    self._capture(log, line, number).gaps.append(record)
                for number in record.requests:
                    self._engine(log, line, number).gaps.append(record)
                log.losses.append(Loss(log.last_ts, record.ts, record))
            case LogOpen():
                log.opened(record)
            case LogClose():
                log.closed = not record.continued
            case EngineStart():
                log.engine = record

    def _capture(self, log: Log, line: int, number: int) -> Capture:
        capture = self.captures.get((id(log), number))
        if capture is None:
            capture = self.captures[id(log), number] = Capture(log, number, line)
        return capture

    def _engine(self, log: Log, line: int, number: int) -> EngineRequest:
        request = self.engine.get((id(log), number))
        if request is None:
            request = self.engine[id(log), number] = EngineRequest(log, number, line)
        return request

    def missing_captures(self) -> list[tuple[Log, list[int]]]:
        """Requests that a proxy's log has numbered and does not hold: its lines were taken out.

        In a log that is still written, a number without records may be a request whose body is still arriving.
        """
        numbers: dict[int, set[int]] = {}
        for log_id, number in self.captures:
            numbers.setdefault(log_id, set()).add(number)
        found = []
        for log in self.files:
            known = numbers.get(id(log))
            if known and log.closed:
                first = 1 if log.opening and log.opening.segment == 0 else min(known)
                if missing := sorted(set(range(first, max(known) + 1)) - known):
                    found.append((log, missing))
        return found


def _add_chunk(capture: Capture, line: int, chunk: Chunk) -> None:
    if chunk.wire_index not in (capture.events_seen, capture.events_seen + 1):
        capture.contradicts(f"event {capture.events_seen + 1} was due, event {chunk.wire_index} stands there")
    capture.events_seen = max(capture.events_seen, chunk.wire_index)
    if chunk.response_id and chunk.response_id not in capture.response_ids:  # some servers begin with an empty one
        capture.response_ids.append(chunk.response_id)
    if chunk.kind == "error":
        capture.error_events += 1
        return
    if chunk.kind == "unparsed":
        capture.unparsed_events += 1
        return
    if chunk.kind not in TEXT_KINDS and chunk.kind not in ("role", "finish"):
        return
    choice = capture.choices.setdefault(chunk.choice, Delivered())
    if chunk.chunk_index is not None:
        capture.chunks_seen += 1
        choice.add_piece(chunk.kind, chunk.delta_text, line)
        if chunk.delta_len not in (None, len(chunk.delta_text)):
            capture.contradicts("the text of a chunk was not recorded")
        elif (chunk.chunk_index, chunk.accumulated_len) != (len(choice.pieces), choice.length):
            capture.contradicts(f"chunk {len(choice.pieces)} of choice {chunk.choice} does not follow the one before")
    choice.add_calls(chunk.tool_calls or [])
    choice.add_ids(chunk.token_ids)
    choice.end(chunk.finish_reason, chunk.stop_reason)


def _add_done(capture: Capture, done: StreamDone) -> None:
    if capture.ended:
        capture.contradicts("it ends twice")
    capture.done = done
    length = sum(choice.length for choice in capture.choices.values())
    if capture.events_seen < done.events and capture.events_seen:
        capture.contradicts(f"it had {done.events} events, the last one here is {capture.events_seen}")
    elif (capture.chunks_seen, length) != (done.chunk_count, done.total_text_len):
        capture.contradicts(
            f"it had {done.chunk_count} chunks of {done.total_text_len} characters, "
            f"{capture.chunks_seen} of {length} are here"
        )


def _add_response(capture: Capture, line: int, response: Response) -> None:
    if capture.ended:
        capture.contradicts("it ends twice")
    capture.response = response
    if response.response_id:
        capture.response_ids.append(response.response_id)
    for reply in response.choices:
        choice = capture.choices.setdefault(reply.choice, Delivered())
        for kind, text in (("reasoning", reply.reasoning), ("text", reply.text)):
            if text:
                choice.add_piece(kind, text, line)
        for call in reply.calls:
            choice.add_piece("tool_call", call.arguments, line)
        choice.add_calls(reply.calls)
        choice.add_ids(reply.token_ids)
        choice.end(reply.finish_reason, reply.stop_reason)


def _add_row(request: EngineRequest, line: int, row: Row) -> None:
    if not row.ids:
        return
    if row.first_index != len(request.ids) and request.contradiction is None:
        what = "are missing" if row.first_index > len(request.ids) else "stand twice"
        here = request.log.place(line)
        request.contradiction = f"ids {what}: index {len(request.ids)} was due at {here}, found {row.first_index}"
    request.row_starts.append(len(request.ids))
    request.row_lines.append(line)
    request.ids += row.ids
