"""Between relay and capture: gives requests their numbers, writes their records, keeps any trouble from serving."""

import itertools
import logging
from collections.abc import Callable, Iterable
from uuid import uuid4

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.counters import Counters
from proxy.headers import HeaderList
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, Gap, Outcome

log = logging.getLogger("sparseety.proxy")


class Recorder:
    """One for each log writer: requests are numbered within its file."""

    def __init__(self, writer: LogWriter, clock: Clock, counters: Counters, limits: Limits | None = None) -> None:
        self._writer, self._clock, self._counters = writer, clock, counters
        self._limits = limits or Limits()
        self._numbers = itertools.count(1)

    def begin(self, head: RequestHead) -> "Recording":
        number = next(self._numbers)
        return Recording(
            number,
            self._writer,
            self._clock,
            self._counters,
            lambda: RequestCapture(number, str(uuid4()), head, self._clock(), self._limits),
        )


class Recording:
    """Feeds one request's capture. No method raises: a fault ends the capture of this request, and a gap says so."""

    def __init__(
        self, number: int, writer: LogWriter, clock: Clock, counters: Counters, make: Callable[[], RequestCapture]
    ) -> None:
        self._number, self._writer, self._clock, self._counters = number, writer, clock, counters
        self._capture: RequestCapture | None = None
        try:
            self._capture = make()
        except Exception as error:  # noqa: BLE001 -- serving goes on whatever is wrong with the capture
            self._failed(error)

    def request_body(self, data: bytes) -> None:
        if capture := self._capture:
            self._write(lambda: capture.request_body(data, self._clock()))

    def request_ended(self) -> None:
        if capture := self._capture:
            self._write(lambda: capture.request_ended(self._clock()))

    def reply_head(self, status: int, headers: HeaderList, ts: float) -> None:
        if capture := self._capture:
            self._write(lambda: capture.reply_head(status, headers, ts))

    def reply_body(self, data: bytes, ts: float) -> None:
        if capture := self._capture:
            self._write(lambda: capture.reply_body(data, ts))

    def ended(self, outcome: Outcome, error: str | None) -> None:
        if capture := self._capture:
            self._write(lambda: capture.ended(outcome, self._clock(), error))

    def _write(self, step: Callable[[], Iterable[AnyRecord]]) -> None:
        try:
            for record in step():
                self._writer.put(record)
                if isinstance(record, Chunk):
                    self._counters.chunks += 1
        except Exception as error:  # noqa: BLE001 -- serving goes on whatever is wrong with the capture
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._capture = None
        self._counters.capture_failures += 1
        log.error("capture %d is given up, its request goes on", self._number, exc_info=error)
        reason = f"capture failed: {type(error).__name__}"
        self._writer.put(Gap(ts=self._clock(), reason=reason, count=1, captures=[self._number]))
