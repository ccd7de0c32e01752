"""Keeps a log folder small: packs closed segments, removes the oldest ones. In a thread of low priority."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sparseety.records import Source
from sparseety.segments import PACKED, PARTIAL, Rotation, SegmentFile, locked, segments_of

log = logging.getLogger("sparseety.log")

_BLOCK = 1 << 20
_LEVEL = 9  # 10 to 20 % smaller than 3, and at 80 MB/s still a hundred times as fast as logs are written
# A lock may not reach from one machine to another, so other hosts' plain files must have lain still for a while too.
_OTHER_HOSTS_SECONDS = 3600.0


class Tidier:
    """Tidies when it starts and whenever it is woken. Several may work on one folder, in processes of their own."""

    def __init__(
        self, folder: Path, source: Source, host: str, rotation: Rotation, counts: dict[str, int] | None = None
    ) -> None:
        """counts: gets what has been packed and deleted."""
        self._folder, self._source, self._host, self._rotation = folder, source, host, rotation
        self._counts = counts if counts is not None else {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name=f"sparseety-tidy-{source}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A segment was closed."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Give up what is half done; the next writer in this folder goes on with it."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Linux: of this thread alone
        while self._wake.wait() and not self._stopping.is_set():
            self._wake.clear()
            try:
                tidy(self._folder, self._source, self._host, self._rotation, self._stopping.is_set, self._counts)
            except FileNotFoundError:
                pass  # somebody deleted the folder; the writer makes it anew
            except OSError as error:
                log.warning("cannot tidy %s/: %s; recording goes on", self._folder, error)
            except Exception:
                log.exception("a bug while tidying %s/; recording goes on", self._folder)


def tidy(
    folder: Path,
    source: Source,
    host: str,
    rotation: Rotation,
    stopping: Callable[[], bool] = lambda: False,
    counts: dict[str, int] | None = None,
) -> None:
    """Pack all closed segments of this source, then remove the oldest until the rest fits. Raises OSError."""
    if rotation.compress:
        for file in segments_of(folder, source):
            if not file.packed and _may_touch(file, host) and not stopping():
                _count(counts, "packed", _pack(file.path, stopping))
    files = segments_of(folder, source)
    excess = sum(file.status.st_size for file in files) - rotation.total_bytes
    for file in files:
        if excess <= 0:
            return
        if _may_touch(file, host) and _remove(file):
            log.info("removed %s: the logs exceed %d bytes", file.path, rotation.total_bytes)
            excess -= file.status.st_size
            _count(counts, "deleted")


def _count(counts: dict[str, int] | None, what: str, so_many: int = 1) -> None:
    if counts is not None:
        counts[what] = counts.get(what, 0) + so_many


def _may_touch(file: SegmentFile, host: str) -> bool:
    return file.packed or file.host == host or time.time() - file.status.st_mtime > _OTHER_HOSTS_SECONDS


def _remove(file: SegmentFile) -> bool:
    """False: somebody writes it."""
    with locked(file.path) as fd:
        if fd is not None or not file.path.exists():
            file.path.unlink(missing_ok=True)
            _beside(file.path, PARTIAL).unlink(missing_ok=True)
            return True
    return False


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _pack(path: Path, stopping: Callable[[], bool]) -> bool:
    """Put a packed file in the place of a plain one that nobody writes. What it is killed in leaves the plain one."""
    try:
        import zstandard  # here, because it is optional: the extras proxy and verifier have it
    except ImportError:
        return False
    target, partial = _beside(path, PACKED), _beside(path, PARTIAL)
    with locked(path) as source:
        if source is None:
            return False
        status = os.fstat(source)
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as out:
                # The size in the frame's head tells a reader of a cut file that there was more.
                packer = zstandard.ZstdCompressor(_LEVEL, write_checksum=True).compressobj(size=status.st_size)
                while block := os.read(source, _BLOCK):
                    if stopping():
                        raise InterruptedError
                    out.write(packer.compress(block))
                out.write(packer.flush())
                out.flush()
                os.utime(out.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))  # its age decides what goes first
                os.fsync(out.fileno())
            partial.rename(target)
            path.unlink()
            return True
        except (OSError, zstandard.ZstdError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if not isinstance(error, InterruptedError):
                log.warning("cannot pack %s: %s; it stays as it is", path, error)
    return False
