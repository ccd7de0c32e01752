"""Between relay and capture: gives requests their numbers, writes their records, keeps any trouble from serving."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from uuid import uuid4

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.counters import Counters, LiveStream
from proxy.headers import HeaderList, get
from proxy.protect import Guard, Thresholds
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, Gap, Outcome, RequestStart, Response, Stamps

log = logging.getLogger("sparseety.proxy")


# Reads of replies are recorded in batches, each batch in short turns: done between two reads, the same work costs more,
# because its code is cold each time.
BATCH_SECONDS = 0.05
TURN_READS = 32  # so that no read waits behind more than a fraction of a millisecond of recording
WAITING_BYTES = 1 << 22  # that may wait, of all requests


class Recorder:
    """One for each log writer: requests are numbered within its file. Without a writer it records nothing."""

    def __init__(
        self,
        writer: LogWriter | None,
        clock: Clock,
        counters: Counters,
        limits: Limits | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.writer, self.clock, self.counters = writer, clock, counters
        self.limits = limits or Limits()
        self.guard = guard or Guard(Thresholds())
        self.open: dict[int, Recording] = {}
        self._numbers = itertools.count(1)
        self._waiting: deque[Recording] = deque()  # those with reads to be recorded, each once
        self._waiting_bytes = 0
        self._scheduled = False

    def later(self, recording: "Recording", size: int, *, first: bool) -> None:
        """A read of so many bytes waits to be recorded; first: the only one of this request."""
        self._waiting_bytes += size
        if first:
            self._waiting.append(recording)
        if self._waiting_bytes > WAITING_BYTES:
            while self._waiting:
                self._waiting.popleft().catch_up()
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(BATCH_SECONDS, self._turn)

    def done(self, size: int) -> None:
        self._waiting_bytes -= size

    def _turn(self) -> None:
        reads = 0
        while self._waiting and reads < TURN_READS:
            reads += self._waiting.popleft().catch_up()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)

    def begin(self, head: RequestHead) -> "Recording":
        number = next(self._numbers)
        self.open[number] = recording = Recording(number, head, self)
        return recording


class Recording:
    """Feeds one request's capture. No method raises: a fault ends the capture of this request, and a gap says so."""

    def __init__(self, number: int, head: RequestHead, recorder: Recorder) -> None:
        self._number, self._head, self._recorder = number, head, recorder
        self._guard, self._writer = recorder.guard, recorder.writer
        self.uuid, self._arrived = str(uuid4()), recorder.clock()
        self._status: int | None = None
        self._reads = self._bytes = 0
        self._started = False  # request_start is written
        self._unread: list[tuple[bytes, float]] = []  # reads of the reply that are not recorded yet
        self._skipped = False  # not recorded, or not to its end, because the capture was paused
        self._capture: RequestCapture | None = None
        try:
            if self._writer and self._guard.paused:
                self._skip()
            elif self._writer:
                self._capture = RequestCapture(number, self.uuid, head, self._arrived, recorder.limits)
        except Exception as error:  # noqa: BLE001 -- serving goes on whatever is wrong with the capture
            self._failed(error)

    def request_body(self, data: bytes) -> None:
        if capture := self._capture:
            self._write(lambda: capture.request_body(data, self._recorder.clock()))

    def request_ended(self) -> None:
        if capture := self._capture:
            self._write(lambda: capture.request_ended(self._recorder.clock()))

    def reply_head(self, status: int, headers: HeaderList, ts: float) -> None:
        self._status = status
        if capture := self._capture:
            self._write(lambda: capture.reply_head(status, headers, ts))

    def reply_body(self, data: bytes, ts: float) -> None:
        self._reads += 1
        self._bytes += len(data)
        if self._capture:
            self._unread.append((data, ts))
            self._recorder.later(self, len(data), first=len(self._unread) == 1)

    def catch_up(self) -> int:
        """Record the reads that wait; returns how many those were."""
        reads, self._unread = self._unread, []
        self._recorder.done(sum([len(data) for data, _ in reads]))
        if reads and (capture := self._capture):
            self._write(lambda: [record for data, ts in reads for record in capture.reply_body(data, ts)])
        return len(reads)

    def ended(self, outcome: Outcome, error: str | None) -> None:
        self._recorder.open.pop(self._number, None)
        self.catch_up()
        if capture := self._capture:
            self._write(lambda: capture.ended(outcome, self._recorder.clock(), error))
        if self._skipped:
            self._put_all([self._ending_unread(outcome, error)])

    def live(self) -> LiveStream:
        return LiveStream(
            id=self.uuid,
            endpoint=self._head.endpoint or "other",
            began=self._arrived,
            reads=self._reads,
            bytes=self._bytes,
            captured=self._capture is not None,
        )

    def _write(self, step: Callable[[], list[AnyRecord]]) -> None:
        begun = time.perf_counter()
        try:
            if self._guard.paused:
                self._skip()
            else:
                self._put_all(step())
        except Exception as error:  # noqa: BLE001 -- serving goes on whatever is wrong with the capture
            self._failed(error)
        finally:
            self._guard.spent += time.perf_counter() - begun

    def _put_all(self, records: list[AnyRecord]) -> None:
        if not records:
            return
        assert self._writer is not None
        self._writer.put_all(records)
        for record in records:
            if type(record) is Chunk:
                self._recorder.counters.chunks += 1
            elif type(record) is RequestStart:
                self._started = True

    def _skip(self) -> None:
        """The capture is paused: nothing more of this request is read. That it was there is recorded all the same."""
        records: list[AnyRecord] = []
        if not self._started:
            x_request_id = get(self._head.headers, b"x-request-id")
            records.append(
                RequestStart(
                    ts=self._arrived,
                    capture=self._number,
                    uuid=self.uuid,
                    method=self._head.method,
                    path=self._head.path,
                    endpoint=self._head.endpoint,
                    x_request_id=x_request_id.decode("latin-1") if x_request_id is not None else None,
                )
            )
        reason = f"capture paused ({self._guard.paused})"
        records.append(Gap(ts=self._recorder.clock(), reason=reason, count=1, captures=[self._number]))
        self._capture, self._skipped = None, True
        self._recorder.counters.uncaptured += 1
        self._put_all(records)

    def _ending_unread(self, outcome: Outcome, error: str | None) -> Response:
        ts = self._recorder.clock()
        return Response(
            ts=ts,
            capture=self._number,
            outcome=outcome,
            stamps=Stamps(end=ts),
            status=self._status,
            bytes=self._bytes,
            unread="capture paused",
            error=error,
        )

    def _failed(self, error: Exception) -> None:
        self._capture = None
        self._recorder.counters.capture_failures += 1
        log.error("capture %d is given up, its request goes on", self._number, exc_info=error)
        reason = f"capture failed: {type(error).__name__}"
        if self._writer:
            self._writer.put(Gap(ts=self._recorder.clock(), reason=reason, count=1, captures=[self._number]))
