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
_HEAD = 1 << 12  # enough for a first line, as a rule
_ZSTD_HEAD = 18  # bytes of a frame's head, at most

_decode = msgspec.json.Decoder(AnyRecord).decode
_decode_lines = msgspec.json.Decoder(AnyRecord).decode_lines
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


def find_logs(arguments: Iterable[str], *, again: bool = False) -> list[Path]:
    """The log files that folders, files and globs name, each once, in name order. Raises SparseetyError.

    again: they were there before, and some may be gone since.
    """
    found: set[Path] = set()
    for argument in arguments:
        if not argument:
            raise SparseetyError('"" names no file or folder')
        path = Path(argument)
        try:
            if path.is_dir():
                for _ in range(2):  # one that is packed while a folder is listed may be missed in both its forms
                    found.update(each for each in path.iterdir() if _LOG_NAME.fullmatch(each.name) and each.is_file())
            elif path.is_file():
                found.add(path)
            elif matches := [Path(match) for match in glob(argument, recursive=True)]:  # noqa: PTH207
                found.update(match for match in matches if match.is_file())
            elif not again:
                raise SparseetyError(f"{argument}: no such file or folder")
        except OSError as error:
            if again and isinstance(error, FileNotFoundError):
                continue
            raise SparseetyError(f"{argument[:200]}: {error.strerror}") from None
    # A writer that packs a segment removes the plain file last: for a moment there are both. And one file may have been
    # named in several ways.
    once = {path.resolve(): path for path in sorted(found, reverse=True)}
    return sorted(path for path in once.values() if path.suffix != PACKED or path.with_suffix("") not in found)


def in_order(paths: Iterable[Path]) -> list[Path]:
    """The same files, each writer's segments in the order in which it wrote them, whatever their names are now."""
    return [path for path, _ in opened(paths)]


def opened(paths: Iterable[Path]) -> list[tuple[Path, LogOpen | None]]:
    """The same with how each begins; None: its first line is lost, or the file is."""

    def key(item: tuple[Path, LogOpen | None]) -> tuple[float, str, str, int, int]:
        _, opening = item
        if opening is None:
            return 0.0, "", "", 0, 0
        return opening.start, opening.source, opening.host, opening.pid, opening.segment

    # By name where that does not decide: sorting is stable.
    return sorted(((path, opening_of(path)) for path in paths), key=key)


def opening_of(path: Path) -> LogOpen | None:
    with contextlib.suppress(OSError), BlockReader(path, lambda problem: None, _HEAD) as reader:
        if (block := reader.read()) is not None:
            for _, record in block_records(path, block, lambda problem: None):
                return record if isinstance(record, LogOpen) else None
    return None


def read_log(path: Path, on_problem: OnProblem) -> Iterator[tuple[int, AnyRecord]]:
    """Yield (line number, record) for each usable record of one file; what is not usable goes to `on_problem`.

    A file of a format version this release cannot read yields nothing. Memory is bounded by the longest line that is
    read. Raises OSError.
    """
    with BlockReader(path, on_problem) as reader:
        while block := reader.read():
            for number, record in block_records(path, block, on_problem):
                if refusal := refused(path, number, record):
                    on_problem(refusal)
                    return
                yield number, record


def refused(path: Path, number: int, record: AnyRecord) -> LogProblem | None:
    """Why no more of this file can be read: it begins with a format that this release does not know."""
    if not isinstance(record, LogOpen) or record.format == FORMAT_VERSION:
        return None
    message = f"format {record.format}; this release reads format {FORMAT_VERSION} only"
    return LogProblem(path, number, "SCHEMA_UNKNOWN", message)


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


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file; at its very end perhaps a torn one."""

    number: int  # of the first line, from 1
    offset: int  # of the first line, bytes of unpacked content
    data: bytes


class BlockReader:
    """Cuts a file into blocks of whole lines, so that lines can be decoded many at a time, and elsewhere."""

    def __init__(self, path: Path, on_problem: OnProblem, size: int = _BLOCK, number: int = 1, offset: int = 0) -> None:
        """Begin at a line and its offset in the unpacked content. Raises OSError."""
        self._path, self._on_problem, self._size = path, on_problem, size
        self._number, self._offset = number, offset
        self._rest = bytearray()  # of a line whose end was not read so far
        self._rest_bytes = 0  # what it took in the file
        self._skipping = False  # in a line that is too long
        self._file = _open(path)
        if offset and path.suffix in (PACKED, ".gz"):
            while offset and (data := self._file.read(min(offset, _BLOCK))):
                offset -= len(data)
        elif offset:
            self._file.seek(offset)

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def position(self) -> tuple[int, int]:
        """(number, offset) of the line after those that were read."""
        return self._number, self._offset

    def read(self, *, grows: bool = False) -> Block | None:
        """The next block; None: there is none, so far. grows: a last line without its end may still get one."""
        while True:
            try:
                data = self._file.read1(self._size)  # type: ignore[attr-defined]  # each that _open returns has it
            except _Damaged as error:
                self._on_problem(LogProblem(self._path, self._number, "TORN_RECORD", str(error)))
                data = b""
            if not data:
                return None if grows else self._end()
            if self._skipping:
                data = self._skip(data)
            if block := self._cut(data):
                return block

    def _end(self) -> Block | None:
        if self._skipping:
            self._too_long()
        if not self._rest:
            return None
        block = Block(self._number, self._offset, bytes(self._rest))
        self._number, self._offset = self._number + 1, self._offset + self._rest_bytes
        self._rest, self._rest_bytes = bytearray(), 0
        return block

    def _cut(self, data: bytes) -> Block | None:
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._rest += data
            self._rest_bytes += len(data)
            if len(self._rest) >= MAX_LINE_BYTES and self._rest.startswith(b"\0"):
                self._rest[:] = b"\0" + self._rest.lstrip(b"\0")  # a hole: the file was cut under its writer
            if len(self._rest) >= MAX_LINE_BYTES:
                self._offset += self._rest_bytes
                self._skipping, self._rest, self._rest_bytes = True, bytearray(), 0
            return None
        block = Block(self._number, self._offset, bytes(self._rest) + data[:cut])
        self._number += block.data.count(b"\n")
        self._offset += self._rest_bytes + cut
        self._rest, self._rest_bytes = bytearray(data[cut:]), len(data) - cut
        return block

    def _skip(self, data: bytes) -> bytes:
        """What follows the line that is too long."""
        cut = data.find(b"\n") + 1
        self._offset += cut or len(data)
        if not cut:
            return b""
        self._too_long()
        return data[cut:]

    def _too_long(self) -> None:
        message = f"a line of more than {MAX_LINE_BYTES >> 20} MiB; it is skipped"
        self._on_problem(LogProblem(self._path, self._number, "TORN_RECORD", message))
        self._number, self._skipping = self._number + 1, False


# ----------------------------------------------------------------------------------------------- lines to records


def block_records(path: Path, block: Block, on_problem: OnProblem) -> Iterable[tuple[int, AnyRecord]]:
    """(line number, record) of each usable record; what is not usable goes to `on_problem`."""
    data = block.data
    lines = data.count(b"\n")
    # Each line begins an object, and there are as many objects as lines: then one stands on each.
    if data.startswith(b"{") and data.endswith(b"\n") and data.count(b"\n{") == lines - 1:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            records = _decode_lines(data)
            if len(records) == lines:
                return enumerate(records, block.number)
    return _line_by_line(path, block, on_problem)


def _line_by_line(path: Path, block: Block, on_problem: OnProblem) -> Iterator[tuple[int, AnyRecord]]:
    for number, line in enumerate(io.BytesIO(block.data), block.number):
        if not line.isspace():
            for record in _records(path, number, line, on_problem):
                yield number, record


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
