"""What `sparseety doctor` is made of. Each program checks what only it knows, and contributes its checks by the
entry-point group `sparseety.checks`, so that none imports another and each can be missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sparseety.records import EngineStart, LogOpen
from sparseety.segments import Rotation

GROUP = "sparseety.checks"


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, and something is not as it should be
    FAIL = "fail"  # something that was to work does not
    UNKNOWN = "unknown"  # it could not be looked at: never ok


@dataclass(frozen=True, slots=True)
class Result:
    """One check and what came of it. `name` is stable, for scripts; a check that fails or warns names the way out."""

    name: str
    status: Status
    text: str
    fix: str | None = None


def ok(name: str, text: str) -> Result:
    return Result(name, Status.OK, text)


def warn(name: str, text: str, fix: str) -> Result:
    return Result(name, Status.WARN, text, fix)


def fail(name: str, text: str, fix: str) -> Result:
    return Result(name, Status.FAIL, text, fix)


def unknown(name: str, text: str, fix: str | None = None) -> Result:
    return Result(name, Status.UNKNOWN, text, fix)


def count_of(value: str) -> int:
    """A metric's value as it stands on a page; 0 where it is no number that counts anything."""
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return 0


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A writer's log in the folder."""

    path: Path  # of its newest segment
    opening: LogOpen
    engine: EngineStart | None  # of an engine's
    alive: bool | None  # somebody writes it; None: that cannot be told from here
    age: float  # seconds since it was last written to


@dataclass(slots=True, kw_only=True)
class Subject:
    """What is looked at. None: nobody has said; a program may fill in what its own settings say, before any check."""

    config: Path | None = None  # of the proxy's settings
    log_dirs: list[Path] = field(default_factory=list)
    upstream: str | None = None
    upstream_ca: Path | None = None
    admin: str | None = None  # the proxy's admin port, as a URL
    admin_token: str | None = field(default=None, repr=False)
    verifier: str | None = None  # where a watch publishes its metrics, as a URL
    prometheus: str | None = None
    tokenizers: list[Path] = field(default_factory=list)
    model_map: dict[str, Path] = field(default_factory=dict)
    min_free_bytes: int = Rotation().min_free_bytes
    seconds: float = 5.0  # for each answer
    # Found out before the programs' checks:
    upstream_version: str | None = None  # of vLLM, as it says itself
    upstream_metrics: str | None = None  # its page of metrics
    logs: list[FoundLog] = field(default_factory=list)  # of the folder, the newest first; each writer once
    unread: list[tuple[Path, str]] = field(default_factory=list)  # logs and folders that cannot be read, and why

    def newest(self, source: str) -> list[FoundLog]:
        """The logs that count now: those that are written, else the one written last."""
        of_source = [log for log in self.logs if log.opening.source == source]
        return [log for log in of_source if log.alive] or of_source[:1]


@dataclass(frozen=True, slots=True)
class Part:
    """A program's checks."""

    check: Callable[[Subject], Iterable[Result]]
    settle: Callable[[Subject], Iterable[Result]] | None = (
        None  # fills in what its settings say; comes before all checks
    )
