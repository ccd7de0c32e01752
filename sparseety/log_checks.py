"""Checks of the log folder, and of who writes there."""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import sparseety
from sparseety.checks import FoundLog, Result, Subject, fail, ok, unknown, warn
from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs, opening_of, read_log
from sparseety.records import FORMAT_VERSION, EngineStart
from sparseety.segments import this_host

_JUST_NOW = 2.0  # seconds: who has just made a file may not hold its lock yet
_SHOWN = 3
_DENIED, _DAMAGED = "cannot be read by this user", "do not begin as logs do"


def check(subject: Subject) -> Iterator[Result]:
    if not subject.log_dirs:
        yield unknown("logs.folder", "nobody has said where the logs are", "--log-dir FOLDER")
    for folder in subject.log_dirs:
        yield from _folder(folder, subject.min_free_bytes)
    yield from _unread(subject)
    yield from _writers(subject)


def _folder(folder: Path, min_free: int) -> Iterator[Result]:
    name = "logs.folder"
    try:
        status = folder.stat()
    except OSError as error:
        yield fail(name, f"{folder}: {error.strerror}", "the proxy makes it at its start; or name another: --log-dir")
        return
    if not stat.S_ISDIR(status.st_mode):
        yield fail(name, f"{folder} is no folder", "--log-dir FOLDER")
        return
    if reason := _unwritable(folder):
        user = f"user {os.geteuid()} cannot write to {folder}: {reason}"
        yield fail(name, user, f"it belongs to user {status.st_uid}: run all that write there as that one, or chown it")
    elif status.st_mode & 0o077:
        text = f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}: others than its owner get in"
        yield warn(name, text, f"chmod 700 {folder}")
    else:
        yield ok(name, f"{folder} is writable, mode {stat.S_IMODE(status.st_mode):04o}")
    if readable := [file for file in folder.glob("*.jsonl*") if _open_to_others(file)]:
        some = ", ".join(file.name for file in readable[:_SHOWN])
        yield warn(
            "logs.files", f"{len(readable)} log files are readable by others: {some}", f"chmod 600 {folder}/*.jsonl*"
        )
    yield _free(folder, min_free)


def _unwritable(folder: Path) -> str | None:
    """Why a file cannot be written there; asked by writing one, for rights are not all that can be in the way."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _open_to_others(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & 0o077)
    except OSError:
        return False


def _free(folder: Path, min_free: int) -> Result:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    text = f"{_size(free)} are free where {folder} is"
    if free < min_free:
        fix = "make room, move the folder, or lower the proxy's --log-min-free-bytes"
        return fail("logs.disk", f"{text}; below {_size(min_free)} nothing is recorded", fix)
    if free < 2 * min_free:
        return warn("logs.disk", f"{text}; below {_size(min_free)} nothing is recorded", "make room")
    return ok("logs.disk", text)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _unread(subject: Subject) -> Iterator[Result]:
    """What is there and could not be looked at: no check may say that it is not there."""
    for reason, fix in (
        (_DENIED, "look as the user that writes them: log files are for their owner only (0600)"),
        (_DAMAGED, "verify-tokens LOGS names file and line, and uses what is left of them"),
    ):
        if files := [path for path, why in subject.unread if why == reason]:
            some = ", ".join(map(str, files[:_SHOWN]))
            text = f"{len(files)} log files or folders {reason}: {some}"
            yield (fail if reason == _DENIED else warn)("logs.readable", text, fix)


def _writers(subject: Subject) -> Iterator[Result]:
    """Is what is written there what this release reads?"""
    for log in subject.logs:
        if log.opening.format != FORMAT_VERSION:
            text = f"{log.path} has format {log.opening.format}; this release reads format {FORMAT_VERSION}"
            yield fail("logs.format", text, "install one release everywhere")
    programs = {log.opening.program: log for log in subject.logs if log.alive}
    here = f"sparseety {sparseety.__version__}"
    for program, log in programs.items():
        if program != here and log.opening.format == FORMAT_VERSION:
            text = f"{log.path} is written by {program}; here is {here}"
            yield warn("logs.release", text, "install one release everywhere")


# ------------------------------------------------------------------------------------------------- what is there


def find(subject: Subject) -> None:
    """The log of each writer, the newest first; and what could not be read."""
    newest: dict[tuple[str, str, int, float], FoundLog] = {}
    for folder in subject.log_dirs:
        try:
            files = find_logs([str(folder)])
        except SparseetyError:
            if _denied(folder, os.R_OK | os.X_OK):
                subject.unread.append((folder, _DENIED))
            continue
        for file in files:
            found = _found(file)
            if isinstance(found, str):
                subject.unread.append((file, found))
            elif found is not None:
                opening = found.opening
                key = (opening.source, opening.host, opening.pid, opening.start)
                if key not in newest or newest[key].opening.segment < opening.segment:
                    newest[key] = found
    subject.logs = sorted(newest.values(), key=lambda log: log.age)


def _found(path: Path) -> FoundLog | str | None:
    """A text says why it cannot be read. None: there is nothing in it yet, it is gone, or it is packed and zstandard is
    not here."""
    if _denied(path, os.R_OK):
        return _DENIED
    try:
        status = path.stat()
        opening = opening_of(path)
    except (OSError, SparseetyError):
        return None
    age = time.time() - status.st_mtime
    if opening is None:
        return _DAMAGED if status.st_size and age > _JUST_NOW else None
    engine = _engine(path) if opening.source == "engine" else None
    return FoundLog(path, opening, engine, _alive(path, opening.host, age), age)


def _denied(path: Path, mode: int) -> bool:
    """It is there, and this user may not."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(path, mode, effective_ids=True)


def _engine(path: Path) -> EngineStart | None:
    """What the engine said of itself: it stands at the beginning of each segment."""
    try:
        for number, record in read_log(path, lambda problem: None):
            if isinstance(record, EngineStart):
                return record
            if number > 100:
                break
    except (OSError, SparseetyError):
        pass
    return None


def _alive(path: Path, host: str, age: float) -> bool | None:
    """Whether somebody writes it. A writer's lock goes with its process; it may not be seen from another machine."""
    if age < _JUST_NOW:
        return True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False if host == this_host() else None
