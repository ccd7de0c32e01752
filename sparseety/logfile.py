"""Log files: a bounded writer that never makes its caller wait, and a reader that survives damage.

One writer, one file: `<source>-<host>-<pid>-<start>.jsonl` in a folder of mode 0700, the file of mode 0600.
"""

import glob
import itertools
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import sparseety
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.records import FORMAT_VERSION, AnyRecord, Gap, LogClose, LogOpen, Scope, Source, subjects

log = logging.getLogger("sparseety.log")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyRecord).decode
_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

# ------------------------------------------------------------------------------------------------------ writing


@dataclass(slots=True)
class _Loss:
    """Records lost since the last gap was written."""

    reason: str = ""
    count: int = 0
    captures: set[int] = field(default_factory=set)
    requests: set[int] = field(default_factory=set)

    def add(self, record: AnyRecord, reason: str) -> None:
        captures, requests = subjects(record)
        self.reason = reason
        self.count += record.count if isinstance(record, Gap) else 1  # a gap that is lost stands for its records
        self.captures.update(captures)
        self.requests.update(requests)

    def gap(self, ts: float) -> Gap:
        return Gap(
            ts=ts,
            reason=self.reason,
            count=self.count,
            captures=sorted(self.captures),
            requests=sorted(self.requests),
        )


class LogWriter:
    """Writes records from any thread, through a queue of bounded size, with one thread of its own.

    `put` encodes, appends and returns; it never blocks and never raises. What the queue cannot hold or the disk
    does not take is counted, and a `gap` naming the requests concerned goes into the file before anything later.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        scope: Scope,
        *,
        clock: Clock,
        max_queue_bytes: int = 64 << 20,
        flush_seconds: float = 0.05,
    ) -> None:
        """Open the file. Raises SparseetyError where the folder cannot be made or written."""
        self._clock, self._max_queue_bytes, self._flush_seconds = clock, max_queue_bytes, flush_seconds
        start = clock()
        host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "host"
        self.path = folder / f"{source}-{host}-{os.getpid()}-{round(start * 1e6)}.jsonl"
        opening = LogOpen(
            ts=start,
            format=FORMAT_VERSION,
            source=source,
            host=host,
            pid=os.getpid(),
            start=start,
            program=f"sparseety {sparseety.__version__}",
            scope=scope,
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._size = self._write(0, _encode(opening) + b"\n")
        except OSError as error:
            raise SparseetyError(
                f"cannot write logs in {folder}/: {error.strerror}; give a folder that this user may write"
            ) from None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._lines: list[bytes] = []
        self._queued_bytes = 0
        self._loss = _Loss()
        self._failing = False
        self.written = 1  # records in the file
        self.lost = 0  # records that never got there
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sparseety-log-{source}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """The writing thread lives, and the disk took what was last given to it."""
        return self._thread.is_alive() and not self._failing

    @property
    def fill(self) -> float:
        """Share of the queue in use, 0..1."""
        return self._queued_bytes / self._max_queue_bytes

    def put(self, record: AnyRecord) -> bool:
        """Queue a record. False: it was lost, which is counted and will be said in the file."""
        try:
            line = _encode(record) + b"\n"
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
            return self._lose(record, f"not encodable: {type(error).__name__}")
        with self._lock:
            if not self._stop.is_set() and self._queued_bytes + len(line) <= self._max_queue_bytes:
                self._lines.append(line)
                self._queued_bytes += len(line)
                return True
        return self._lose(record, "queue full" if not self._stop.is_set() else "written after the log was closed")

    def flush(self) -> None:
        """Write what is queued, now, in the caller's thread."""
        with self._flushing:
            with self._lock:
                lines, self._lines, self._queued_bytes = self._lines, [], 0
                loss, self._loss = self._loss, _Loss()
            if loss.count:
                lines.insert(0, _encode(loss.gap(self._clock())) + b"\n")
            if lines:
                self._write_lines(lines)

    def close(self) -> None:
        """Write the rest and the closing record. Called twice, it does nothing the second time."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
        self._thread.join()
        self.flush()
        with self._flushing:
            self._write_lines([_encode(LogClose(ts=self._clock(), records=self.written, lost=self.lost)) + b"\n"])
            os.close(self._fd)

    def _run(self) -> None:
        while not self._stop.wait(self._flush_seconds):
            try:
                self.flush()
            except Exception:
                log.exception("a bug while writing %s; writing goes on", self.path)

    def _lose(self, record: AnyRecord, reason: str) -> bool:
        with self._lock:
            self._loss.add(record, reason)
            self.lost += 1
        return False

    def _write_lines(self, lines: list[bytes]) -> None:
        """Write whole lines; a line that the disk took only in part is taken back, so no line is ever torn here."""
        data = b"".join(lines)
        try:
            end = self._write(self._size, data)
        except OSError as error:
            self._failed(lines, error)
            return
        self._size = end
        self.written += len(lines)
        if self._failing:
            self._failing = False
            log.warning("log %s is written again; %d records were lost so far", self.path, self.lost)

    def _write(self, offset: int, data: bytes) -> int:
        """Write all of `data` at `offset`; returns the offset after it. Raises OSError with part of it written."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
        return offset

    def _failed(self, lines: list[bytes], error: OSError) -> None:
        written = max(0, os.fstat(self._fd).st_size - self._size)
        kept = 0
        for line in lines:
            if len(line) > written:
                break
            written -= len(line)
            self._size += len(line)
            kept += 1
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            log.exception("log %s may hold a torn line", self.path)
        self.written += kept
        reason = f"not written: {error.strerror}"
        for line in lines[kept:]:
            record = _decode(line)
            self._lose(record, reason)
            if isinstance(record, Gap):
                self.lost -= 1  # its records are counted already
        if not self._failing:
            self._failing = True
            log.error("cannot write %s: %s; recording goes on when it can, serving is not touched", self.path, error)


# ------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class LogProblem:
    """A line that could not be used."""

    path: Path
    line: int  # from 1
    code: str  # TORN_RECORD or SCHEMA_UNKNOWN
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


OnProblem = Callable[[LogProblem], None]


def find_logs(arguments: Iterable[str]) -> list[Path]:
    """The log files that folders, files and globs name, each once, in name order. Raises SparseetyError."""
    found: set[Path] = set()
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            found.update(path.glob("*.jsonl"))
        elif path.is_file():
            found.add(path)
        elif matches := [Path(match) for match in glob.glob(argument, recursive=True)]:  # noqa: PTH207 -- absolute patterns
            found.update(match for match in matches if match.is_file())
        else:
            raise SparseetyError(f"{argument}: no such file or folder")
    return sorted(found)


def read_log(path: Path, on_problem: OnProblem) -> Iterator[tuple[int, AnyRecord]]:
    """Yield (line number, record) for each usable line of one file; the others go to `on_problem`.

    A file of a format version this release cannot read yields nothing. Raises OSError.
    """
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline()
            if not line:
                return
            if line.isspace():
                continue
            try:
                record = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                on_problem(_problem(path, number, line, error))
                continue
            if isinstance(record, LogOpen) and record.format != FORMAT_VERSION:
                message = f"format {record.format}; this release reads format {FORMAT_VERSION} only"
                on_problem(LogProblem(path, number, "SCHEMA_UNKNOWN", message))
                return
            yield number, record


_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def _problem(path: Path, number: int, line: bytes, error: Exception) -> LogProblem:
    """Name what is wrong with a line, without quoting it: it may hold a user's text."""
    if not line.endswith(b"\n"):
        return LogProblem(path, number, "TORN_RECORD", "the last line is torn (the writer was killed, or writes still)")
    try:
        event = msgspec.json.decode(_decode_any(line)["event"], type=str)
    except KeyError:
        return LogProblem(path, number, "SCHEMA_UNKNOWN", 'JSON without an "event": not a line of a capture log')
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LogProblem(path, number, "TORN_RECORD", "not a JSON object: damaged, or not a line of a capture log")
    if missing := _MISSING_FIELD.search(str(error)):
        message = f'record "{event[:40]}" lacks field "{missing[1]}" (format {FORMAT_VERSION})'
    else:
        message = f'record "{event[:40]}" is not of format {FORMAT_VERSION}: {error}'
    return LogProblem(path, number, "SCHEMA_UNKNOWN", message)
