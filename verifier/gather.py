"""Put together what the logs hold of each request, block by block. Pure: fragments in, requests out."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.logreader import LogProblem
from sparseety.records import EngineEvent, EngineStart, Gap, LogClose, LogOpen
from sparseety.segments import PACKED
from verifier.findings import Problems
from verifier.fragments import CapturePart, Parsed, Section, ServedPart, Single
from verifier.logs import Log, Loss, Writer
from verifier.marks import LogState, Mark
from verifier.numbers import Numbers
from verifier.packed import OpenCapture, Served
from verifier.pending import HORIZON, Pending, Waiting

Segment = tuple[Writer, int]


@dataclass(slots=True)
class Ledger:
    """Which requests of a log were seen so far, judged ones too."""

    log: Log
    last_line: int = 0
    captures: Numbers = field(default_factory=Numbers)
    served: Numbers = field(default_factory=Numbers)
    old_captures: Numbers = field(default_factory=Numbers)  # judged before a restart: passed over
    old_served: Numbers = field(default_factory=Numbers)

    def state(self) -> LogState:
        log = self.log
        return LogState(
            log.first_ts,
            log.last_ts,
            self.last_line,
            log.closed,
            log.sampled,
            log.silent,
            log.damaged,
            log.goes_on,
            log.next_segment,
            log.opening,
            log.engine,
            len(log.losses),
        )

    def restore(self, state: LogState) -> None:
        log = self.log
        log.first_ts, log.last_ts, self.last_line = state.first_ts, state.last_ts, state.last_line
        log.closed, log.sampled, log.damaged = state.closed, state.sampled, state.damaged
        log.silent = state.silent
        log.goes_on, log.next_segment = state.goes_on, state.next_segment
        log.opening, log.engine = state.opening, state.engine
        log.losses = [Loss(-math.inf if begin is None else begin, end, gap) for begin, end, gap in state.losses]
        state.lost = len(log.losses)


class Logs:
    """Everything that was read and is not judged. A request is known by its writer and the writer's number for it."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.files: list[Log] = []  # one for each writer
        self.block = 0  # number of the block that is being taken
        self.notes: list[str] = []
        self.problems = Problems()
        self.files_read = self.usable_files = 0
        self.whole = True  # False: lines are missing or unusable, and with them perhaps whole requests
        self.unfinished: set[LogFile] = set()  # files that are read
        self._ledgers: dict[Writer, Ledger] = {}
        self.segments: dict[Segment, int] = {}  # those that were begun, and how many records they had

    @property
    def engine_logs(self) -> list[Log]:
        return [log for log in self.files if log.opening and log.opening.source == "engine"]

    @property
    def any_captures(self) -> bool:
        return any(ledger.captures for ledger in self._ledgers.values())

    def engines_in_use(self) -> list[Log]:
        """Logs with requests of an engine."""
        return [ledger.log for ledger in self._ledgers.values() if ledger.served]

    def file(self, path: Path, mark: Mark | None = None) -> "LogFile":
        """Take a file; a writer's segments in their order. mark: what comes begins there."""
        file = LogFile(self, path)
        self.unfinished.add(file)
        if mark is not None and mark.number > 1:
            file.resume(mark)
        return file

    def restore(self, mark: Mark) -> None:
        """Before anything is read."""
        ledger = self.ledger(mark.writer, Path(mark.path), 0.0)
        ledger.captures, ledger.old_captures = Numbers(mark.captures), Numbers(mark.captures)
        ledger.served, ledger.old_served = Numbers(mark.served), Numbers(mark.served)
        if mark.state is not None:
            ledger.restore(mark.state)

    def known(self, writer: Writer) -> Ledger | None:
        return self._ledgers.get(writer)

    def with_judged(self, mark: Mark, waiting: Waiting, since: float) -> Mark:
        """Add which requests are not to be judged again, and losses that may concern those that began `since`."""
        if (ledger := self._ledgers.get(mark.writer)) is not None:
            mark.captures = ledger.captures.without(waiting.captures)
            mark.served = ledger.served.without(waiting.served)
            mark.waiting = len(waiting.captures)
            if mark.state is not None:
                known = ledger.log.losses[: mark.state.lost]
                mark.state.losses = [(loss.begin, loss.end, loss.gap) for loss in known if loss.end >= since]
        return mark

    def since(self) -> float:
        """What was lost before then matters to no request that is not judged."""
        return min([self.pending.earliest(), *(log.last_ts for log in self.files)], default=math.inf) - HORIZON

    def missing_of(self, ledger: Ledger) -> list[int]:
        """Numbers that this log has given and whose records it does not hold. Some, where many."""
        log = ledger.log
        if not log.closed:
            return []
        first = 1 if log.opening and log.opening.segment == 0 else None
        return list(itertools.islice(ledger.captures.missing(first), 1000))

    def ledger(self, writer: Writer, path: Path, ts: float) -> Ledger:
        if writer not in self._ledgers:
            log = Log(path, writer, first_ts=ts)
            self.files.append(log)
            self._ledgers[writer] = Ledger(log)
        return self._ledgers[writer]

    def end(self) -> None:
        """No more will be read."""
        for log in self.pending.logs_without_added():  # whose steps these are stood in a line that is not here
            log.damaged = True
        for log in self.files:
            self.end_of(log)
            log.damaged |= log.goes_on
            self.whole = self.whole and not self._holes_in(log)

    def end_of(self, log: Log) -> None:
        """No more will be read of it."""
        if log.goes_on:
            self.whole = False
            path = log.parts[-1][2]
            self.notes.append(f"{path}: its log goes on in segment {log.next_segment}, which is not here")

    @property
    def whole_so_far(self) -> bool:
        """The same while files are read: a log that is closed one day may show that no line was missing."""
        return self.whole and not any(file.has_holes for file in self.unfinished)

    def _holes_in(self, log: Log) -> bool:
        """Does a proxy's log lack whole requests, and say that it lost records without saying whose?"""
        losses = any(loss.unnamed and loss.begin > -math.inf for loss in log.losses)
        return losses and any(self._ledgers[log.writer].captures.missing(None))

    def missing_captures(self) -> list[tuple[Log, list[int]]]:
        """Requests that a proxy's log has numbered and does not hold: its lines were taken out. Some, where many.

        In a log that is still written, a number without records may be a request whose body is still arriving.
        """
        missing = ((ledger.log, self.missing_of(ledger)) for ledger in self._ledgers.values())
        return [(log, numbers) for log, numbers in missing if numbers]


class LogFile:
    """One file of a log. It is of one writer, as a rule: one that was put together from several is taken apart again,
    and a segment that was read before (a copy) is left out."""

    def __init__(self, logs: Logs, path: Path) -> None:
        self._logs, self.path, self._pending = logs, path, logs.pending
        self._touched: list[Log] = []
        self._problems = False
        self._holes = False  # an unusable line within it
        self._writer: Writer = ("", str(path), 0, 0.0)
        self._ledger: Ledger | None = None
        self._offset = 0  # from a line of this file to one of the log
        self._count = 0
        self._segment: Segment | None = None
        self._copy = False
        self.refused = False  # of an unknown format: no more of it is read

    @property
    def has_holes(self) -> bool:
        """Lines within it cannot be used, and were part of it as far as is known."""
        return self._holes and not self.closed

    @property
    def closed(self) -> bool:
        """Its writer has closed it in order, and goes on nowhere."""
        return bool(self._touched) and all(log.closed for log in self._touched)

    def mark(self, writer: Writer, number: int, offset: int) -> Mark:
        """Of one of its lines, which is the next to be taken."""
        ledger = self._logs.known(writer)
        segment = max(0, ledger.log.next_segment - (self._ledger is not None)) if ledger else 0
        mark = Mark(writer, self.path.name, segment, number, offset, self._offset, self._count)
        mark.path = str(self.path.with_suffix("") if self.path.suffix == PACKED else self.path)
        mark.state = ledger.state() if ledger else None
        mark.holes = self._holes
        return mark

    def resume(self, mark: Mark) -> None:
        """What is taken first stands there."""
        self._writer, self._offset, self._count = mark.writer, mark.line_offset, mark.records
        self._segment = (mark.writer, mark.segment)
        self._logs.segments[self._segment] = mark.records
        self._holes = mark.holes
        ledger = self._ledger = self._logs.ledger(mark.writer, self.path, 0.0)
        ledger.log.begin_file(self.path, mark.line_offset + mark.number - 1, mark.line_offset)
        self._touched.append(ledger.log)

    @property
    def goes_on(self) -> bool:
        """Its writer has closed it, and goes on in another one."""
        return any(log.goes_on for log in self._touched)

    def take(self, parsed: Parsed) -> None:
        self._note_problems(parsed.problems)
        self.refused = parsed.refused
        for part in parsed.parts:
            if isinstance(part, Single) and isinstance(part.record, LogOpen):
                self._begin(part.line, part.record)
            if self._copy:
                self._count += part.records if isinstance(part, Section) else 1
                continue
            ledger = self._ledger or self._open(part)
            if isinstance(part, Section):
                self._section(ledger, part)
            else:
                self._single(ledger, part)
            if self._segment is not None:
                self._logs.segments[self._segment] = self._count

    def end(self) -> None:
        """It is read."""
        self._logs.unfinished.discard(self)
        self._leave_copy()
        touched = self._touched
        if not touched and not self._problems and self._segment is None:
            self._logs.notes.append(f"{self.path}: it is empty")
        if any(log.opening is None for log in touched):
            said = f"{self.path}: its first line (log_open) is lost; it is read as the present format"
            self._logs.notes.append(said)
        # A closed log counts its records: where none is missing, the unusable lines were never part of it.
        if self.has_holes:
            self._logs.whole = False
        self._logs.files_read += 1
        self._logs.usable_files += bool(touched)

    def _note_problems(self, problems: list[LogProblem]) -> None:
        for problem in problems:
            self._logs.problems.add(problem)
        self._problems |= bool(problems)
        self._holes |= any(not problem.tail for problem in problems)
        if problems:
            for log in self._touched:
                log.damaged = True

    def _begin(self, line: int, opening: LogOpen) -> None:
        self._leave_copy()
        self._writer = (opening.source, opening.host, opening.pid, opening.start)
        self._segment = (self._writer, opening.segment)
        self._copy = self._segment in self._logs.segments
        if self._copy:
            self._logs.notes.append(f"{self.path}: a copy of what was read already; it is left out")
        self._ledger, self._count = None, 0

    def _leave_copy(self) -> None:
        """It is passed over: had it more to say than what was read?"""
        if self._copy and self._segment is not None and self._count > self._logs.segments[self._segment]:
            self._logs.notes.append(f"{self.path}: it holds more than the copy that was read; take the other one away")
            self._logs.whole = False
        self._copy = False

    def _open(self, part: Section | Single) -> Ledger:
        ts = part.first_ts if isinstance(part, Section) else part.record.ts
        ledger = self._ledger = self._logs.ledger(self._writer, self.path, ts)
        self._offset = ledger.last_line - (part.line - 1)
        ledger.log.begin_file(self.path, ledger.last_line, self._offset)
        ledger.log.damaged |= self._problems
        self._touched.append(ledger.log)
        self._count = 0
        return ledger

    def _section(self, ledger: Ledger, section: Section) -> None:
        for capture in section.captures:
            self._capture(ledger, capture)
        for served in section.served:
            self._serve(ledger, served)
        self._count += section.records
        ledger.log.last_ts = section.last_ts
        ledger.last_line = self._offset + section.last_line

    def _single(self, ledger: Ledger, single: Single) -> None:
        log, record = ledger.log, single.record
        line = self._offset + single.line
        match record:
            case LogOpen():
                if loss := log.opened(record):
                    self._pending.lost(log, loss)
            case LogClose():
                if record.records != self._count:
                    log.damaged, self._logs.whole = True, False
                    found = f"it had {record.records} records when it was closed; {self._count} could be read"
                    self._logs.notes.append(f"{self.path}: {found}")
                log.closed, log.goes_on = not record.continued, record.continued
            case EngineStart():
                log.engine = log.engine or record  # later segments repeat it
            case EngineEvent():
                log.sampled |= record.sample is not None and record.sample < 1
                if record.kind == "hook_silent":
                    log.silent = log.silent or record.detail or "something it wrapped"
            case Gap():
                self._gap(ledger, line, record)
        self._count += 1
        log.last_ts = record.ts
        ledger.last_line = line

    def _gap(self, ledger: Ledger, line: int, gap: Gap) -> None:
        for number in gap.captures:
            if (capture := self._open_capture(ledger, number, line)) is not None:
                capture.gaps.append(gap)
        for number in gap.requests:
            if (served := self._open_served(ledger, number, line)) is not None:
                served.gaps.append(gap)
        if gap.no_request:
            return
        loss = Loss(ledger.log.last_ts, gap.ts, gap)
        ledger.log.losses.append(loss)
        self._pending.lost(ledger.log, loss)

    # ---------------------------------------------------------------------------------------------- its requests

    def _open_capture(self, ledger: Ledger, number: int, line: int) -> OpenCapture | None:
        """None: it is judged already."""
        if ledger.captures.add(number):
            return self._pending.new_capture(OpenCapture(ledger.log, number, line, self._logs.block))
        if number in ledger.old_captures:
            return None
        return self._pending.capture(ledger.log, number)

    def _open_served(self, ledger: Ledger, number: int, line: int) -> Served | None:
        if ledger.served.add(number):
            return self._pending.new_served(Served(ledger.log, number, line, self._logs.block))
        if number in ledger.old_served:
            return None
        return self._pending.served(ledger.log, number)

    def _capture(self, ledger: Ledger, part: CapturePart) -> None:
        capture = self._open_capture(ledger, part.number, self._offset + part.line)
        if capture is None:
            return
        capture.parts.append((self._offset, part.packed))
        capture.begin = part.begin or capture.begin
        if part.end and (part.end.streamed or capture.end is None or not capture.end.streamed):
            capture.end = part.end
        named = bool(part.ids) and not capture.ids
        capture.ids += [one for one in part.ids if one not in capture.ids]
        if named:
            self._pending.named(capture)
        if capture.end:
            self._pending.ended(capture)

    def _serve(self, ledger: Ledger, part: ServedPart) -> None:
        served = self._open_served(ledger, part.number, self._offset + part.line)
        if served is None:
            return
        if part.packed is not None:
            served.parts.append((self._offset, part.packed))
        served.finished = part.finished or served.finished
        if part.added is not None:
            self._pending.added(served, part.added)
        if served.finished:
            self._pending.finished(served)
