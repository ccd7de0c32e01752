"""Reads capture logs: finds the files, survives what crashes, full disks and other programs did to them."""

import contextlib
import gzip
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sparseety.errors import SparseetyError
from sparseety.records import FORMAT_VERSION, AnyRecord, LogOpen
from sparseety.segments import PACKED

MAX_LINE_BYTES = 64 << 20  # a longer line is skipped
_BLOCK = 1 << 20
_ZSTD_HEAD = 18  # bytes of a frame's head, at most

_decode = msgspec.json.Decoder(AnyRecord).decode
_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

# A record's start cannot stand inside another record: quotes in strings are escaped, and records do not nest.
_PIECES = re.compile(rb'\x00+|(?=\{"event":")')
_WHERE = re.compile(r"at `\$\.?([\w.\[\]]*)`")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_LOG_NAME = re.compile(r".+\.jsonl([.-]\d+)*(\.zst|\.gz)?")  # logrotate adds numbers and .gz


@dataclass(frozen=True, slots=True)
class LogProblem:
    """A line that could not be used."""

    path: Path
    line: int  # from 1
    code: str  # TORN_RECORD or SCHEMA_UNKNOWN
    message: str
    tail: bool = False  # the end of a file that is still written, or whose writer was killed: to be expected

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


OnProblem = Callable[[LogProblem], None]


def find_logs(arguments: Iterable[str]) -> list[Path]:
    """The log files that folders, files and globs name, each once, in name order. Raises SparseetyError."""
    found: set[Path] = set()
    for argument in arguments:
        if not argument:
            raise SparseetyError('"" names no file or folder')
        path = Path(argument)
        try:
            if path.is_dir():
                found.update(entry for entry in path.iterdir() if _LOG_NAME.fullmatch(entry.name) and entry.is_file())
            elif path.is_file():
                found.add(path)
            elif matches := [Path(match) for match in glob(argument, recursive=True)]:  # noqa: PTH207
                found.update(match for match in matches if match.is_file())
            else:
                raise SparseetyError(f"{argument}: no such file or folder")
        except OSError as error:
            raise SparseetyError(f"{argument[:200]}: {error.strerror}") from None
    # A writer that packs a segment removes the plain file last: for a moment there are both. And one file may have been
    # named in several ways.
    once = {path.resolve(): path for path in sorted(found, reverse=True)}
    return sorted(path for path in once.values() if path.suffix != PACKED or path.with_suffix("") not in found)


def in_order(paths: Iterable[Path]) -> list[Path]:
    """The same files, each writer's segments in the order in which it wrote them, whatever their names are now."""

    def key(path: Path) -> tuple[float, str, str, int, int]:
        opening = _opening(path)
        if opening is None:
            return 0.0, "", "", 0, 0
        return opening.start, opening.source, opening.host, opening.pid, opening.segment

    return sorted(paths, key=key)  # by name where that does not decide: sorting is stable


def _opening(path: Path) -> LogOpen | None:
    with contextlib.suppress(OSError):
        for _, record in read_log(path, lambda problem: None):
            return record if isinstance(record, LogOpen) else None
    return None


def read_log(path: Path, on_problem: OnProblem) -> Iterator[tuple[int, AnyRecord]]:
    """Yield (line number, record) for each usable record of one file; what is not usable goes to `on_problem`.

    A file of a format version this release cannot read yields nothing. Memory is bounded by the longest line that is
    read. Raises OSError.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in _lines(path, file, on_problem):
                for record in _records(path, number, line, on_problem):
                    if isinstance(record, LogOpen) and record.format != FORMAT_VERSION:
                        message = f"format {record.format}; this release reads format {FORMAT_VERSION} only"
                        on_problem(LogProblem(path, number, "SCHEMA_UNKNOWN", message))
                        return
                    yield number, record
    except _Damaged as error:
        on_problem(LogProblem(path, number + 1, "TORN_RECORD", str(error)))


# ------------------------------------------------------------------------------------------------- bytes to lines


class _Damaged(Exception):
    """A packed file that cannot be unpacked any further."""


class _Unpacked(io.RawIOBase):
    """What a decompressor yields. Raises _Damaged."""

    def __init__(self, file: BinaryIO, read: Callable[[int], bytes], size: int) -> None:
        """size: bytes that the file promises, 0 where it does not say. zstandard takes a cut file for a whole one."""
        self._file, self._read, self._missing = file, read, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 -- each library has its own, and damage has many forms
            raise _Damaged(f"the compressed file is damaged from here on: {error}") from None
        self._missing -= len(data)
        if not data and self._missing > 0:
            raise _Damaged("the compressed file is cut off")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path) -> BinaryIO:
    """The file's content, unpacked. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        path = path.with_name(path.name + PACKED)  # packed since it was found
        file = path.open("rb")
    if path.suffix == ".gz":
        return io.BufferedReader(_Unpacked(file, gzip.GzipFile(fileobj=file).read1, 0), _BLOCK)
    if path.suffix == PACKED:
        return io.BufferedReader(_unpack(path, file), _BLOCK)
    return file


def _unpack(path: Path, file: BinaryIO) -> _Unpacked:
    try:
        import zstandard  # here, because it is optional: the extra verifier has it
    except ImportError:
        file.close()
        hint = "pip install 'sparseety[verifier]'"
        raise SparseetyError(f"{path} is compressed, and the package zstandard is missing; {hint}") from None
    head = file.read(_ZSTD_HEAD)
    file.seek(0)
    try:
        size = zstandard.frame_content_size(head)
    except zstandard.ZstdError:
        size = len(head)  # cut within its head: something is missing
    return _Unpacked(file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read, size)


def _lines(path: Path, file: BinaryIO, on_problem: OnProblem) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is neither blank nor too long."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        while len(line) == MAX_LINE_BYTES and not line.strip(b"\0"):  # a hole: the file was cut under its writer
            line = b"\0" + file.readline(MAX_LINE_BYTES - 1)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            message = f"a line of more than {MAX_LINE_BYTES >> 20} MiB; it is skipped"
            on_problem(LogProblem(path, number, "TORN_RECORD", message))
        elif not line.isspace():
            yield number, line


# ----------------------------------------------------------------------------------------------- lines to records


def _records(path: Path, number: int, line: bytes, on_problem: OnProblem) -> Iterator[AnyRecord]:
    """The records of a line: one, but for damage. A torn record does not take along the one that is glued to it."""
    try:
        yield _decode(line)
        return
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = _problem(path, number, line, error)
    pieces = [piece for piece in _PIECES.split(line) if piece and not piece.isspace()]
    usable = []
    if len(pieces) > 1 or b"\0" in line:
        for piece in pieces:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                usable.append(_decode(piece))
    if usable:
        what = (
            "NUL bytes (cut by another program, or a crash)" if b"\0" in line else "a torn record, or two on one line"
        )
        taken = f"of {len(pieces)} pieces {len(usable)} could be read"
        problem = LogProblem(path, number, "TORN_RECORD", f"{what}; {taken}")
    on_problem(problem)
    yield from usable


def _problem(path: Path, number: int, line: bytes, error: Exception) -> LogProblem:
    """Name what is wrong with a line, without quoting it: it may hold a user's text."""
    if not line.endswith(b"\n"):
        message = "the last line is torn (the writer was killed, or writes still)"
        return LogProblem(path, number, "TORN_RECORD", message, tail=True)
    try:
        event = msgspec.json.decode(_decode_any(line)["event"], type=str)
    except KeyError:
        return LogProblem(path, number, "SCHEMA_UNKNOWN", 'JSON without an "event": not a line of a capture log')
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LogProblem(path, number, "TORN_RECORD", "not a JSON object: damaged, or not a line of a capture log")
    name = ascii(event[:40])[1:-1]
    if missing := _MISSING_FIELD.search(str(error)):
        message = f'record "{name}" lacks field "{missing[1]}" (format {FORMAT_VERSION})'
    else:  # of the library's own words only where it is: the rest may quote a value
        where = _WHERE.search(str(error))
        message = f'record "{name}" is not of format {FORMAT_VERSION}' + (
            f": {where[1]} is of another type" if where else ""
        )
    return LogProblem(path, number, "SCHEMA_UNKNOWN", message)
