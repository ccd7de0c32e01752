"""Read the logs of many writers at a time, the one furthest behind first. Only reads files.

The order decides how much waits in memory, and nothing else: a reply's records and those of its engine come close
together if the logs are read at one speed. Logs that grow are read to their end, and again when there is more.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.errors import SparseetyError
from sparseety.logreader import BlockReader, LogProblem, opened
from sparseety.records import LogOpen
from sparseety.segments import PACKED
from verifier.executor import Executor, Task, WorkerDied
from verifier.fragments import Parsed, parse
from verifier.gather import LogFile, Logs
from verifier.logs import Writer
from verifier.marks import Mark
from verifier.pending import NOTHING

BLOCK_BYTES = 1 << 20  # read and decoded at once
_FIRST_LINE = 1 << 16  # bytes of a first line, at most


@dataclass(slots=True)
class _Item:
    """A block that is being read, or the end of a file."""

    file: LogFile
    path: Path
    number: int  # of its first line
    offset: int
    task: Task[Parsed] | None
    problems: list[LogProblem]

    def mark(self, writer: Writer) -> Mark:
        """Where it begins, and what is known there. To be asked before it is taken."""
        return self.file.mark(writer, self.number, self.offset)


@dataclass(slots=True)
class _Source:
    """The files of one writer, in their order."""

    writer: Writer
    position: float  # up to when it was read; before that, when it begins
    engine: bool  # it may be an engine's
    paths: deque[Path] = field(default_factory=deque)
    segments: set[int] = field(default_factory=set)  # those of the paths, read or not
    reader: BlockReader | None = None
    file: LogFile | None = None
    ahead: deque[_Item] = field(default_factory=deque)
    problems: list[LogProblem] = field(default_factory=list)
    marks: deque[tuple[int, Mark]] = field(default_factory=deque)  # of blocks that may have to be read again
    resume: Mark | None = None  # where to begin
    number: int = 1  # of the line after what was read, and its offset
    offset: int = 0
    last: bool = False  # nothing more is written to its file
    ended: bool = False  # and all of it is read
    gone: bool = False  # its writer lives no more
    awaited: bool = False  # its files were listed again since the last one said that another follows

    def lacks(self, segment: int) -> bool:
        """Is the one before it not among those that were found, though older ones are?"""
        return bool(self.segments) and max(self.segments) + 1 < segment

    def here(self) -> Mark | None:
        """Where reading has come to. None: nowhere yet."""
        if self.ahead:
            return self.ahead[0].mark(self.writer)
        if self.file is None:
            return self.resume
        return self.file.mark(self.writer, self.number, self.offset)


class Reading:
    def __init__(self, executor: Executor, *, grows: bool = False) -> None:
        """grows: the files may still be written."""
        self._executor, self._grows = executor, grows
        self._sources: dict[Writer, _Source] = {}
        self._known: set[str] = set()  # names of files, as before packing
        self._marks: dict[Writer, Mark] = {}
        self._listed = False  # it is known which files there are
        self._held: set[Path] = set()  # files that wait for the one before them
        self._notes: list[str] = []
        self.gone: list[Mark] = []  # where to go on, in files that are not there any more

    def resume(self, marks: Iterable[Mark]) -> None:
        """Begin there, not at the logs' beginnings."""
        self._marks = {mark.writer: mark for mark in marks}

    def add(self, paths: Iterable[Path]) -> None:
        """Files to read, those that are known already among them."""
        first, self._listed = [] if self._listed else list(self._marks.values()), True
        for path, opening in opened(path for path in paths if _stem(path) not in self._known):
            if self._grows and opening is None and _is_new(path):
                continue  # it is known next time whose it is
            self._known.add(_stem(path))
            source = self._source(path, opening)
            mark = source.resume
            if self._grows and opening is not None and opening.segment in source.segments:
                self._notes.append(f"{path}: a copy of what is read already; it is left out")
                continue  # else the other one would be taken for finished
            if self._grows and opening is not None and source.lacks(opening.segment) and path not in self._held:
                self._held.add(path)  # one that is packed at this moment may not be found: look again
                self._known.discard(_stem(path))
                continue
            if mark is None or opening is None or opening.segment >= mark.segment:
                if opening is not None:
                    source.segments.add(opening.segment)
                source.paths.append(path)
                source.last = source.ended = source.awaited = False
        for mark in first:
            source_of = self._sources.get(mark.writer)
            if source_of is None or (source_of.segments and mark.segment not in source_of.segments):
                self.gone.append(mark)

    def _source(self, path: Path, opening: LogOpen | None) -> _Source:
        if opening is None:
            writer: Writer = ("", _stem(path), 0, 0.0)
        else:
            writer = (opening.source, opening.host, opening.pid, opening.start)
        if writer not in self._sources:
            engine = opening is None or opening.source == "engine"
            source = _Source(writer, opening.ts if opening else -math.inf, engine, resume=self._marks.get(writer))
            self._sources[writer] = source
        return self._sources[writer]

    def close(self) -> None:
        for source in self._sources.values():
            if source.reader is not None:
                source.reader.close()

    def engine_to_come(self) -> float:
        """When the first log begins that may be an engine's and was not opened; inf: there is none."""
        if self._grows:  # until there is one, there may be one at any time
            return math.inf if any(source == "engine" for source, *_ in self._sources) else -math.inf
        return min((source.position for source in self._sources.values() if source.engine), default=math.inf)

    def into(self, logs: Logs) -> Iterator[float]:
        """Read all there is. Yields again and again the time up to which all logs are read. Raises SparseetyError."""
        notes, self._notes[:] = self._notes[:], []
        logs.notes += notes
        heap = [(source.position, source.writer) for source in self._sources.values() if not source.ended]
        heapq.heapify(heap)
        while heap:
            _, writer = heapq.heappop(heap)
            source = self._sources[writer]
            if self._next(source, logs):
                heapq.heappush(heap, (source.position, writer))
            yield heap[0][0] if heap else math.inf

    def ended(self, is_dead: Callable[[Writer, Path], bool]) -> Iterator[Writer]:
        """Writers that have closed their logs or are gone, once each; call when all is read that there is."""
        for source in self._sources.values():
            file = source.file
            if source.ended or source.paths or source.ahead or file is None:
                continue
            if file.goes_on and not source.awaited:
                source.awaited = True  # the next segment may be there and not found so far
                continue
            closed = source.last or file.closed
            if source.reader is None and closed:
                source.ended = True
            source.last = closed or not file.path.exists()  # then it is read once more, to the very end
            dead = source.ended or is_dead(source.writer, file.path)
            if dead and not source.gone:
                yield source.writer
            source.gone = dead

    @property
    def all_ended(self) -> bool:
        """Both kinds of witnesses were here, and all of them have closed their logs."""
        kinds = {source for source, *_ in self._sources}
        return kinds >= {"proxy", "engine"} and all(source.ended for source in self._sources.values())

    def marks(self, logs: Logs) -> Iterator[Mark]:
        """Where each log would have to be read from, to see again what is needed of the requests not judged."""
        if not self._listed:  # else those that are in no source have no file any more
            yield from self._marks.values()
            return
        waiting, since = logs.pending.waiting(), logs.since()
        for source in self._sources.values():
            ledger = logs.known(source.writer)
            here = waiting.get(id(ledger.log), NOTHING) if ledger else NOTHING
            while source.marks and (here.first is None or (len(source.marks) > 1 and source.marks[1][0] <= here.first)):
                source.marks.popleft()
            mark = source.marks[0][1] if source.marks else source.here()
            if mark is not None:
                yield logs.with_judged(mark, here, since)

    def _next(self, source: _Source, logs: Logs) -> bool:
        """Take the next block of a source; False: it has none, so far."""
        # Enough that no process is idle while this one waits for the oldest.
        while len(source.ahead) <= self._executor.slots and (item := self._read(source, logs)):
            source.ahead.append(item)
        if not source.ahead:
            source.engine = False
            return False
        item = source.ahead.popleft()
        if self._grows:
            logs.block += 1
            source.marks.append((logs.block, item.mark(source.writer)))
        if item.problems:
            item.file.take(Parsed([], item.problems, refused=False))
        if item.task is None:
            item.file.end()
        elif not item.file.refused:
            parsed = _result(item)
            item.file.take(parsed)
            source.engine = source.engine and not parsed.parts  # it is known from its first record on
            source.position = parsed.last_ts(source.position)
        return True

    def _read(self, source: _Source, logs: Logs) -> _Item | None:
        while source.reader is None:
            if not source.paths:
                return None
            self._open(source, source.paths.popleft(), logs)
        assert source.file is not None  # it comes with the reader
        file, path = source.file, source.file.path
        complete = not self._grows or source.last or bool(source.paths) or path.suffix in (PACKED, ".gz")
        try:
            block = None if file.refused else source.reader.read(grows=not complete)
        except OSError as error:
            raise SparseetyError(f"{path}: {error.strerror}") from None
        if block is None and not complete and not file.refused:
            return None
        problems, source.problems[:] = source.problems[:], []
        source.number, source.offset = source.reader.position
        if block is None:
            source.reader.close()
            source.reader = None
            return _Item(file, path, source.number, source.offset, None, problems)
        task = self._executor.submit(parse, path, block)
        return _Item(file, path, block.number, block.offset, task, problems)

    def _open(self, source: _Source, path: Path, logs: Logs) -> None:
        mark, source.resume = source.resume, None
        here = mark is not None and mark.path == _stem(path)
        number, offset = (mark.number, mark.offset) if mark is not None and here else (1, 0)
        try:
            source.reader = BlockReader(path, source.problems.append, BLOCK_BYTES, number, offset)
        except FileNotFoundError:
            logs.notes.append(f"{path}: it is gone since it was found")
            return
        except OSError as error:
            raise SparseetyError(f"{path}: {error.strerror}") from None
        source.number, source.offset = number, offset
        source.file = logs.file(path, mark if here else None)


def _result(item: _Item) -> Parsed:
    assert item.task is not None  # asked of no others
    try:
        return item.task.result()
    except WorkerDied:
        raise SparseetyError(f"{item.path}: a process that read it was killed twice (out of memory?)") from None


def _stem(path: Path) -> str:
    """The file's path, as before packing."""
    return str(path.with_suffix("") if path.suffix == PACKED else path)


def _is_new(path: Path) -> bool:
    """Its writer has not written its first line."""
    try:
        with path.open("rb") as file:
            head = file.read(_FIRST_LINE)
            return len(head) < _FIRST_LINE and b"\n" not in head
    except OSError:
        return True
