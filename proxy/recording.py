"""Between relay and capture: gives requests their numbers, writes their records, keeps any trouble from serving."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from uuid import uuid4

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.counters import Counters, LiveStream
from proxy.headers import HeaderList, get
from proxy.protect import Guard, Thresholds
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, Gap, Outcome, RequestStart, Response, Stamps

log = logging.getLogger("sparseety.proxy")


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
        if capture := self._capture:
            self._write(lambda: capture.reply_body(data, ts))

    def ended(self, outcome: Outcome, error: str | None) -> None:
        self._recorder.open.pop(self._number, None)
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

    def _write(self, step: Callable[[], Iterable[AnyRecord]]) -> None:
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

    def _put_all(self, records: Iterable[AnyRecord]) -> None:
        assert self._writer is not None
        for record in records:
            self._writer.put(record)
            if isinstance(record, Chunk):
                self._recorder.counters.chunks += 1
            elif isinstance(record, RequestStart):
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
