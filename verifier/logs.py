"""One writer's log, and what it says about itself. Pure."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.records import EngineStart, Gap, LogOpen
from verifier.findings import place

CLOCK_SKEW = 1.0  # seconds by which the clocks of two witnesses may differ


Writer = tuple[str, str, int, float]
"""Who wrote a file: (source, host, pid, start). Where the first line is lost, its path stands for the host."""


def within(begin: float, life: tuple[float, float]) -> bool:
    """Can an engine have begun this during the request that a proxy had from when to when? It begins after the proxy,
    and ends before it."""
    start, end = life
    return start - CLOCK_SKEW <= begin <= end + CLOCK_SKEW


@dataclass(frozen=True, slots=True)
class Loss:
    """Records that are missing from a log, and when they were due."""

    begin: float
    end: float
    gap: Gap

    @property
    def unnamed(self) -> bool:
        return not self.gap.captures and not self.gap.requests


@dataclass(slots=True)
class Log:
    """One writer's log, of one file or several segments, and what it says about itself."""

    path: Path  # of its first file
    writer: Writer
    opening: LogOpen | None = None  # of the first file; None: its first line is lost
    engine: EngineStart | None = None
    first_ts: float | None = None
    last_ts: float = 0.0
    closed: bool = False  # in order, with nothing to follow
    goes_on: bool = False  # its last segment here was closed, and another one was to follow
    sampled: bool = False  # not every request was to be recorded, for some time at least
    silent: str | None = None  # what the plugin wrapped and vLLM never called; None: nothing of the kind
    damaged: bool = False  # something of it is unusable or missing: what is not here may have stood there
    losses: list[Loss] = field(default_factory=list)
    next_segment: int = 0
    parts: list[tuple[int, int, Path]] = field(default_factory=list)  # of each file: last line before it, offset, path

    def place(self, line: int) -> str:
        """Where to look up a line of this log."""
        index = bisect_right(self.parts, (line - 1, math.inf)) - 1
        _, offset, path = self.parts[index]
        return place(path, line - offset)

    def begin_file(self, path: Path, last_line: int, offset: int) -> None:
        """Lines of the log after `last_line` are those of this file; its own numbers are less by `offset`."""
        self.parts.append((last_line, offset, path))

    def opened(self, opening: LogOpen) -> Loss | None:
        """A segment begins. Where those before it are gone (the cap on disk space does that), their time is a loss.

        Where the one before it was not closed, so is the time until now.
        """
        loss = None
        if self.opening and opening.segment == self.next_segment and not (self.closed or self.goes_on):
            gap = Gap(ts=opening.ts, reason=f"the end of segment {opening.segment - 1} of the log is not here", count=0)
            loss = Loss(self.last_ts, opening.ts, gap)
            self.losses.append(loss)
        if opening.segment > self.next_segment:
            begin = self.last_ts if self.opening else -math.inf
            first, last = self.next_segment, opening.segment - 1
            which = f"segment {first}" if first == last else f"segments {first} to {last}"
            gap = Gap(ts=opening.ts, reason=f"{which} of the log is not here", count=0)
            loss = Loss(begin, opening.ts, gap)
            self.losses.append(loss)
        self.opening = self.opening or opening
        self.sampled |= opening.scope.sample < 1
        self.next_segment = opening.segment + 1
        self.closed = self.goes_on = False
        return loss

    def covers(self, end: float) -> bool:
        """Would it hold what was over at that time, by a clock that may differ?

        One that was closed had no duty after its end; one that was not may be cut, or lack what its writer still had.
        """
        return end <= self.last_ts + (CLOCK_SKEW if self.closed else -CLOCK_SKEW)

    def lost_between(self, begin: float, end: float) -> list[Gap]:
        """Losses of that time, those that name their requests too."""
        return [loss.gap for loss in self.losses if loss.begin <= end and loss.end >= begin]

    def unnamed_between(self, begin: float, end: float) -> list[Gap]:
        """Losses that any request of that time may have suffered."""
        return [loss.gap for loss in self.losses if loss.unnamed and loss.begin <= end and loss.end >= begin]
