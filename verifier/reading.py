"""Read the logs of many writers at a time, the one furthest behind first. Only reads files.

The order decides how much waits in memory, and nothing else: a reply's records and those of its engine come close
together if the logs are read at one speed.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.errors import SparseetyError
from sparseety.logreader import BlockReader, LogProblem, opened
from sparseety.records import LogOpen
from verifier.executor import Executor, Task, WorkerDied
from verifier.fragments import Parsed, parse
from verifier.gather import LogFile, Logs

BLOCK_BYTES = 1 << 20  # read and decoded at once


@dataclass(slots=True)
class _Item:
    """A block that is being read, or the end of a file."""

    file: LogFile
    path: Path
    task: Task[Parsed] | None
    problems: list[LogProblem]


@dataclass(slots=True)
class _Source:
    """The files of one writer, in their order."""

    paths: deque[Path]
    position: float  # up to when it was read; before that, when it begins
    engine: bool  # it may be an engine's
    reader: BlockReader | None = None
    file: LogFile | None = None
    ahead: deque[_Item] = field(default_factory=deque)
    problems: list[LogProblem] = field(default_factory=list)


class Reading:
    def __init__(self, paths: Iterable[Path], executor: Executor) -> None:
        self._executor = executor
        self._sources = _sources(opened(paths))
        # (position, number) of each that is not at its end
        self._heap = [(source.position, number) for number, source in enumerate(self._sources)]
        heapq.heapify(self._heap)
        self._started: set[int] = set()

    def engine_to_come(self) -> float:
        """When the first log begins that may be an engine's and was not opened; inf: there is none."""
        return min((source.position for source in self._sources if source.engine), default=math.inf)

    def into(self, logs: Logs) -> Iterator[float]:
        """Read all. Yields again and again the time up to which all logs are read. Raises SparseetyError."""
        while self._heap:
            _, number = heapq.heappop(self._heap)
            source = self._sources[number]
            if self._next(source, logs):
                heapq.heappush(self._heap, (source.position, number))
            yield self._heap[0][0] if self._heap else math.inf

    def _next(self, source: _Source, logs: Logs) -> bool:
        """Take the next block of a source; False: it has none."""
        # Enough that no process is idle while this one waits for the oldest.
        while len(source.ahead) <= self._executor.slots and (item := self._read(source, logs)):
            source.ahead.append(item)
        if not source.ahead:
            source.engine = False
            return False
        item = source.ahead.popleft()
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
            path = source.paths.popleft()
            try:
                source.reader = BlockReader(path, source.problems.append, BLOCK_BYTES)
            except FileNotFoundError:
                logs.notes.append(f"{path}: it is gone since it was found")
                continue
            except OSError as error:
                raise SparseetyError(f"{path}: {error.strerror}") from None
            source.file = logs.file(path)
        assert source.file is not None  # it comes with the reader
        file, path = source.file, source.file.path
        try:
            block = None if file.refused else source.reader.read()
        except OSError as error:
            raise SparseetyError(f"{path}: {error.strerror}") from None
        problems, source.problems[:] = source.problems[:], []
        if block is None:
            source.reader.close()
            source.reader = None
        return _Item(file, path, self._executor.submit(parse, path, block) if block else None, problems)


def _result(item: _Item) -> Parsed:
    assert item.task is not None  # asked of no others
    try:
        return item.task.result()
    except WorkerDied:
        raise SparseetyError(f"{item.path}: a process that read it was killed twice (out of memory?)") from None


def _sources(files: list[tuple[Path, LogOpen | None]]) -> list[_Source]:
    def writer(item: tuple[Path, LogOpen | None]) -> object:
        path, opening = item
        return (opening.source, opening.host, opening.pid, opening.start) if opening else path

    sources = []
    for _, group in itertools.groupby(files, writer):
        same = list(group)
        opening = same[0][1]
        engine = opening is None or opening.source == "engine"
        sources.append(_Source(deque(path for path, _ in same), opening.ts if opening else -math.inf, engine))
    return sources
