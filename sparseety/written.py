"""What a log's writer has done so far, and what it has lost since it last said so. No file, no thread."""

from dataclasses import dataclass, field

from sparseety.metrics import FLUSH_SECONDS, Cell, new_cell
from sparseety.records import AnyRecord, Gap, concerns_none, subjects
from sparseety.writer_metrics import DROP_REASONS, SEGMENT_EVENTS

_NAMES_IN_A_GAP = 10_000  # requests; a gap that concerns more names none, and covers the time since the record before


@dataclass(slots=True)
class Loss:
    """Records lost since the last gap was written."""

    reason: str = ""
    count: int = 0
    captures: set[int] = field(default_factory=set)
    requests: set[int] = field(default_factory=set)
    concerned: bool = False  # by something that was lost, a request is
    unnamed: bool = False  # it may be any

    def add(self, record: AnyRecord, reason: str) -> None:
        self.reason = reason
        self.count += record.count if isinstance(record, Gap) else 1  # a gap that is lost stands for its records
        if concerns_none(record):
            return
        self.concerned = True
        captures, requests = subjects(record)
        self.captures.update(captures)
        self.requests.update(requests)
        if not captures and not requests:
            self.unnamed = True
        if self.unnamed or len(self.captures) + len(self.requests) > _NAMES_IN_A_GAP:
            self.unnamed = True
            self.captures.clear()
            self.requests.clear()

    def gap(self, ts: float) -> Gap:
        return Gap(
            ts=ts,
            reason=self.reason,
            count=self.count,
            captures=sorted(self.captures),
            requests=sorted(self.requests),
            no_request=not self.concerned,
        )


@dataclass(slots=True)
class Written:
    """What a writer has done so far, for whoever publishes it. Read it from any thread."""

    records: int = 0  # in the log
    bytes: int = 0  # in the log, before compression
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    flushes: Cell = field(default_factory=lambda: new_cell(FLUSH_SECONDS))  # seconds of each write
    last: float | None = None  # when the disk last took something, by the writer's clock
    disk_free: int | None = None  # bytes
    segments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SEGMENT_EVENTS, 0))
