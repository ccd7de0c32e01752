"""What the proxy counts: plain integers in each worker, added up by the parent. Without a metrics library, so that the
capture can be mounted where there is none."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import get_args

import msgspec

from sparseety.records import Endpoint, Outcome

PAUSE_REASONS = ("lag", "queue")


@dataclass(slots=True)
class Counters:
    """Of one worker, or of several. Those marked "now" are of the moment; all others only grow."""

    requests: dict[tuple[str, str], int] = field(default_factory=Counter)  # by (endpoint, outcome), ended ones
    chunks: int = 0  # records of stream events
    open_streams: int = field(default=0, metadata={"now": True})
    open_requests: int = field(default=0, metadata={"now": True})
    capture_failures: int = 0  # requests whose capture was switched off by an exception
    uncaptured: int = 0  # requests of which nothing, or not all, was recorded because the capture was paused
    pauses: int = 0  # times that the capture was paused
    records_written: int = 0
    records_lost: int = 0

    def add(self, other: "Counters") -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(theirs, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, each.name, mine + theirs)

    def forget_now(self) -> None:
        """What they are of has ended: its sums stay, its present does not."""
        for each in fields(self):
            if each.metadata.get("now"):
                setattr(self, each.name, 0)


class LiveStream(msgspec.Struct, frozen=True):
    """A request that is open. No text, no path, no header: this is shown to whoever may see the admin port."""

    id: str  # its uuid, as in request_start
    endpoint: str
    began: float  # Unix seconds
    reads: int  # of the reply's body
    bytes: int  # of the reply's body
    captured: bool


class Report(msgspec.Struct):
    """What one worker says of itself."""

    counters: Counters
    log_healthy: bool = True
    paused: str | None = None  # why the capture is paused
    streams: list[LiveStream] = []  # filled only when it was asked for


@dataclass(slots=True)
class Overview:
    """What all workers together say."""

    counters: Counters
    reports: list[Report]  # of the workers that live
    workers: int = 1  # that there should be
    restarts: int = 0
    silent: int = 0  # workers that live and do not answer

    @property
    def alive(self) -> int:
        return len(self.reports)

    def troubles(self) -> list[str]:
        """Why traffic should go elsewhere, as far as the workers know."""
        found = []
        if self.alive < self.workers:
            found.append(f"{self.workers - self.alive} of {self.workers} workers are down")
        if self.silent:
            found.append(f"{self.silent} of {self.workers} workers do not answer")
        if not all(report.log_healthy for report in self.reports):
            found.append("the capture log cannot be written")
        return found


def overview_of(
    reports: list[Report], *, gone: Counters | None = None, workers: int = 1, restarts: int = 0
) -> Overview:
    """gone: the sums of workers that have ended; without them a counter would go down when one dies."""
    total = Counters()
    total.requests = {(endpoint, outcome): 0 for endpoint in _ENDPOINTS for outcome in get_args(Outcome)}
    for counters in [*([gone] if gone else []), *(report.counters for report in reports)]:
        total.add(counters)
    return Overview(total, reports, workers, restarts)


_ENDPOINTS = (*get_args(Endpoint), "other")
