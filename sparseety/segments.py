"""The files of a log: their names, their locks, whole lines or none.

A writer's log is cut into segments `<source>-<host>-<pid>-<start>.<number>.jsonl`, packed ones end in `.zst`. A segment
is locked (flock) as long as somebody writes or packs it, and the lock goes with the process, however that ends.
"""

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseety.records import Source

PACKED = ".zst"
PARTIAL = PACKED + ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """When a segment ends, and how much disk the logs may take."""

    segment_bytes: int = 256 << 20  # before compression
    segment_seconds: float = 900.0
    total_bytes: int = 20 << 30  # of all segments of one source in the folder, looked after whenever one ends
    min_free_bytes: int = 5 << 30  # with less on the disk nothing is recorded
    compress: bool = True  # closed segments, where the package zstandard is installed

    def __str__(self) -> str:
        return (
            f"segments of {_size(self.segment_bytes)} or {self.segment_seconds / 60:g} min, the oldest go beyond "
            f"{_size(self.total_bytes)}; recording stops below {_size(self.min_free_bytes)} of free disk"
        )


def _size(count: int) -> str:
    return f"{count >> 30} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Displaced:
    """Why a writer has to leave its segment."""

    reason: str
    lossy: bool  # what was written to it may be gone, or cannot be ended in order


class Segment:
    """A file that one writer appends whole lines to."""

    def __init__(self, path: Path, header: Sequence[bytes], opened: float) -> None:
        """Create the file and write its first lines. Raises OSError, and leaves no file behind then."""
        self.path, self.opened = path, opened
        self.size = self.records = 0
        self._torn = False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody tidies this file away either
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._inode = _inode(os.fstat(self._fd))
            _, error = self.append(b"".join(header))
            if error:
                raise error
        except OSError:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self.header_records = self.records

    def append(self, lines: bytes) -> tuple[int, OSError | None]:
        """Write whole lines; returns how many bytes of them are in the file now, and what kept the others out.

        A line that the disk took only in part is taken back, so that only a killed writer tears a line.
        """
        view = memoryview(lines)
        done, error = 0, None
        while done < len(view) and error is None:
            try:
                done += os.write(self._fd, view[done:])
            except OSError as caught:
                error = caught
        whole = lines.rfind(b"\n", 0, done) + 1
        self.size += whole
        self.records += lines.count(b"\n", 0, whole)
        if whole < done:
            try:
                os.ftruncate(self._fd, self.size)
            except OSError:
                self._torn = True
        return whole, error

    def displaced(self) -> Displaced | None:
        """What others did to this file, or a failing disk, so that no more may be appended to it. Raises OSError."""
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            return Displaced("was deleted", lossy=True)
        if self._torn:
            return Displaced("ends in a torn line that the disk would not take back", lossy=True)
        if status.st_size < self.size:
            return Displaced("was cut short by another program (copytruncate?)", lossy=True)
        if status.st_size > self.size:
            return Displaced("was written to by another program", lossy=True)
        try:
            moved = _inode(self.path.stat()) != self._inode
        except FileNotFoundError:
            moved = True
        return Displaced("was moved away", lossy=False) if moved else None

    def free_bytes(self) -> int:
        """Free for this user on the disk that holds it. Raises OSError."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def segment_name(source: Source, host: str, pid: int, start: float, number: int) -> str:
    return f"{source}-{host}-{pid}-{round(start * 1e6)}.{number:05d}.jsonl"


def this_host() -> str:
    """The name that this machine goes by in logs."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "host"


_NAME = re.compile(r"(?P<source>[a-z]+)-(?P<host>.+)-\d+-\d+\.\d+\.jsonl(\.zst)?")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment somebody wrote, as its name tells."""

    path: Path
    host: str
    status: os.stat_result

    @property
    def packed(self) -> bool:
        return self.path.suffix == PACKED


def segments_of(folder: Path, source: Source) -> list[SegmentFile]:
    """All segments of a source in the folder, oldest first. Raises OSError."""
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match["source"] == source:
            with contextlib.suppress(FileNotFoundError):  # somebody else tidies too
                found.append(SegmentFile(path, match["host"], path.stat()))
    return sorted(found, key=lambda file: (file.status.st_mtime_ns, file.path))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Hold the lock of a segment that nobody writes; None: somebody does, or the file is gone, or locks do not work."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        usable = os.fstat(fd).st_nlink > 0
    except OSError:
        usable = False
    try:
        yield fd if usable else None
    finally:
        os.close(fd)
