"""Gather the records of all logs by request. Pure: records in, requests out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.records import (
    AnyRecord,
    Chunk,
    EngineEvent,
    EngineStart,
    Gap,
    LogClose,
    LogOpen,
    RequestAdded,
    RequestFinished,
    RequestStart,
    Response,
    Step,
    StreamDone,
)
from verifier.logs import Log, Loss
from verifier.requests import Capture, EngineRequest, add_chunk, add_done, add_response, add_row

Writer = tuple[str, str, int, float] | Path
"""Who wrote a file: (source, host, pid, start); its path where the first line is lost."""


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
                add_chunk(self._capture(log, line, record.capture), line, record)
            case Step():
                for row in record.rows:
                    add_row(self._engine(log, line, row.request), line, row)
            case RequestStart():
                capture = self._capture(log, line, record.capture)
                if capture.start is not None:
                    capture.contradicts("it begins twice")
                capture.start = record
            case StreamDone():
                add_done(self._capture(log, line, record.capture), record)
            case Response():
                add_response(self._capture(log, line, record.capture), line, record)
            case RequestAdded():
                self._engine(log, line, record.request).added = record
            case RequestFinished():
                self._engine(log, line, record.request).finished = record
            case Gap():
                for number in record.captures:
                    self._capture(log, line, number).gaps.append(record)
                for number in record.requests:
                    self._engine(log, line, number).gaps.append(record)
                if not record.no_request:
                    log.losses.append(Loss(log.last_ts, record.ts, record))
            case LogOpen():
                log.opened(record)
            case LogClose():
                log.closed = not record.continued
            case EngineStart():
                log.engine = record
            case EngineEvent():
                log.sampled |= record.sample is not None and record.sample < 1
                if record.kind == "hook_silent":
                    log.silent = log.silent or record.detail or "something it wrapped"

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
