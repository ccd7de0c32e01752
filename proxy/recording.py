"""Between relay and capture: gives requests their numbers, writes their records, keeps any trouble from serving."""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.catalogue import BYTES, OTHER, OVERHEAD, RECORDS, SOURCE, UPSTREAM_ERRORS
from proxy.counters import Counters, LiveStream, ModelNames
from proxy.headers import HeaderList, get, is_event_stream
from proxy.protect import Guard, Thresholds
from proxy.spans import Ended, Spans, carried
from proxy.tally import Book, Decision, Tally
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.metrics import observe
from sparseety.records import AnyRecord, Chunk, Gap, Outcome, RequestStart, Response, Stamps, StreamDone

log = logging.getLogger("sparseety.proxy")


# What happens to requests is recorded in batches, each batch in short turns: done between two reads, the same work
# costs more, because its code is cold each time, and whoever waits for the next read waits for it too.
BATCH_SECONDS = 0.1
BATCH_STEPS = 1024  # at which a batch waits no longer: more of it would only be colder, and longer in memory
TURN_STEPS = 64  # or what has come since the turn before: so that no read waits for long, and the turns keep up
WAITING_BYTES = 1 << 22  # that may wait, of all requests
TIMED_READS = 16  # of so many reads of replies, one is looked at for what the proxy adds to it

Step = tuple[Callable[..., Iterable[AnyRecord]], tuple[Any, ...]]
"""A method of the capture, and what it is to be called with."""


_EVENTS: dict[type, str] = {
    RequestStart: "request_start",
    Chunk: "chunk",
    StreamDone: "stream_done",
    Response: "response",
    Gap: "gap",
}


class Recorder:
    """One for each log writer: requests are numbered within its file. Without a writer it records nothing."""

    def __init__(
        self,
        writer: LogWriter | None,
        clock: Clock,
        counters: Counters,
        limits: Limits | None = None,
        guard: Guard | None = None,
        names: ModelNames | None = None,
        spans: Spans | None = None,
        span_content: bool = False,
    ) -> None:
        """span_content: spans hold the replies' text."""
        self.spans, self.span_content = spans, span_content
        self.writer, self.clock, self.counters = writer, clock, counters
        self.limits = limits or Limits()
        self.guard = guard or Guard(Thresholds())
        self.book = Book(counters, names or ModelNames())
        self.bytes_in, self.bytes_out = (counters.cell(BYTES, way) for way in ("request", "response"))
        self.chunk_overhead = counters.cell(OVERHEAD, "chunk")
        self.untimed = 0  # reads of replies until the next one that is timed
        self.open: dict[int, Recording] = {}
        self._numbers = itertools.count(1)
        self._waiting: deque[Recording] = deque()  # those with something to be recorded, each once
        self._waiting_bytes = 0
        self._came = 0  # steps since the last turn
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None  # of a batch that is still being gathered

    def later(self, recording: "Recording", size: int, *, first: bool) -> None:
        """A step with so many bytes waits to be recorded; first: the only one of this request."""
        self._waiting_bytes += size
        self._came += 1
        if first:
            self._waiting.append(recording)
        if self._waiting_bytes > WAITING_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._begin_turns)
        elif self._came > BATCH_STEPS and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            asyncio.get_running_loop().call_soon(self._begin_turns)

    def flush(self) -> None:
        """Record all that waits. To be called before the log is closed."""
        while self._waiting:
            self._record()

    async def caught_up(self) -> None:
        """When this returns, all that has happened by now is recorded and counted. In turns, as ever."""
        self._came = 0
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            self._record()
            await asyncio.sleep(0)

    def put(self, records: list[AnyRecord]) -> None:
        assert self.writer is not None  # without one, nothing is recorded
        self.writer.put_all(records)
        for kind, count in Counter(map(type, records)).items():
            self.counters.add(count, RECORDS, SOURCE, _EVENTS[kind])

    def _begin_turns(self) -> None:
        self._timer, self._came = None, 0
        self._turn()

    def _turn(self) -> None:
        self._record()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)

    def _record(self) -> None:
        """What waits, as far as one turn goes."""
        begun = time.perf_counter()
        due, self._came = max(TURN_STEPS, self._came), 0
        steps, records = 0, list[AnyRecord]()
        while self._waiting and steps < due:
            recording = self._waiting.popleft()
            self._waiting_bytes -= recording.waiting_bytes
            steps += recording.catch_up(records)
        if records:
            self.put(records)
        self.guard.spent += time.perf_counter() - begun

    def begin(self, head: RequestHead) -> "Recording":
        number = next(self._numbers)
        self.open[number] = recording = Recording(number, head, self)
        return recording


class Recording:
    """Feeds one request's capture. No method raises: a fault ends the capture of this request, and a gap says so."""

    def __init__(self, number: int, head: RequestHead, recorder: Recorder) -> None:
        self._number, self._head, self._recorder = number, head, recorder
        self._guard = recorder.guard
        self._arrived = recorder.clock()
        self._uuid = ""  # not asked for yet
        self.tally = Tally(recorder.book, head.endpoint, self._arrived)
        if recorder.span_content:
            self.tally.texts = {}
        self._reads = self._bytes = 0
        self._steps: list[Step] = []  # that are not recorded yet
        self.waiting_bytes = 0  # in them
        self._decision: Decision = "captured" if recorder.writer else "skipped"
        self._ending: tuple[Outcome, float, str | None] | None = None
        self._capture: RequestCapture | None = None  # made with its first record: here its code would be cold

    @property
    def _captured(self) -> bool:
        """There is a log, and the capture is neither paused nor failed."""
        return self._decision == "captured"

    @property
    def uuid(self) -> str:
        self._uuid = self._uuid or str(uuid4())
        return self._uuid

    @property
    def streams(self) -> bool:
        """Its reply is an event stream, on its way."""
        return self.tally.streams

    @property
    def endpoint(self) -> str:
        return self._head.endpoint or OTHER

    def request_body(self, data: bytes) -> None:
        self._recorder.bytes_in[0] += len(data)
        if self._captured:
            self._later(len(data), RequestCapture.request_body, data, self._recorder.clock())

    def request_ended(self, waited: float = 0.0) -> None:
        """waited: seconds since the client's last byte was received."""
        self.tally.sent = now = self._recorder.clock()
        self.tally.began = now - waited
        if self._captured:
            self._later(0, RequestCapture.request_ended, now)

    def reply_head(self, status: int, headers: HeaderList, ts: float) -> None:
        tally = self.tally
        tally.status, tally.headers, tally.streams = status, ts, is_event_stream(headers)
        if status >= 400:
            self._recorder.counters.add(1, UPSTREAM_ERRORS, "http_5xx" if status >= 500 else "http_4xx")
        if self._captured:
            self._later(0, RequestCapture.reply_head, status, headers, ts)

    def reply_body(self, data: bytes, ts: float) -> None:
        recorder = self._recorder
        recorder.untimed -= 1
        if recorder.untimed < 0:
            recorder.untimed = TIMED_READS - 1
            observe(recorder.chunk_overhead, OVERHEAD.bounds, recorder.clock() - ts)
        self._reads += 1
        self._bytes += len(data)
        recorder.bytes_out[0] += len(data)
        if self._captured:
            self._later(len(data), RequestCapture.reply_body, data, ts)

    def ended(self, outcome: Outcome, error: str | None) -> None:
        self._recorder.open.pop(self._number, None)
        self._ending = outcome, self._recorder.clock(), error
        if self._captured:
            self._later(0, RequestCapture.ended, *self._ending)
            return
        if self._decision == "paused":
            self._recorder.put([self._ending_unread(*self._ending)])
        self._over()

    def _over(self) -> None:
        """All that will be read of it has been."""
        if self._ending is None:
            return
        outcome, at, _ = self._ending
        try:
            self.tally.ended(outcome, at, self._decision)
            if (spans := self._recorder.spans) and (endpoint := self._head.endpoint):
                headers = carried(self._head.headers)
                spans.put(Ended(self.uuid, endpoint, headers, self._arrived, at, outcome, self.tally))
        except Exception:
            log.exception("request %d is not counted", self._number)

    def _later(self, size: int, step: Callable[..., Iterable[AnyRecord]], *arguments: Any) -> None:
        steps = self._steps
        steps.append((step, arguments))
        self.waiting_bytes += size
        self._recorder.later(self, size, first=len(steps) == 1)

    def catch_up(self, records: list[AnyRecord]) -> int:
        """Add the records of the steps that wait; returns how many steps those were."""
        steps, self._steps, self.waiting_bytes = self._steps, [], 0
        if self._guard.paused:
            records += self._skip()
        else:
            try:
                capture = self._capture = self._capture or self._begin()
                for step, arguments in steps:
                    records += step(capture, *arguments)
            except Exception as error:  # noqa: BLE001 -- serving goes on whatever is wrong with the capture
                records.append(self._failed(error))
        self._over()
        return len(steps)

    def _begin(self) -> RequestCapture:
        return RequestCapture(self._number, self.uuid, self._head, self._arrived, self._recorder.limits, self.tally)

    def live(self) -> LiveStream:
        return LiveStream(
            id=self.uuid,
            endpoint=self.endpoint,
            began=self._arrived,
            reads=self._reads,
            bytes=self._bytes,
            captured=self._captured,
        )

    def _skip(self) -> list[AnyRecord]:
        """The capture is paused: nothing more of this request is read. That it was there is recorded all the same."""
        records: list[AnyRecord] = []
        if self._capture is None or not self._capture.started:
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
        self._give_up("paused")
        if self._ending:
            records.append(self._ending_unread(*self._ending))
        return records

    def _give_up(self, why: Decision) -> None:
        self._capture, self._decision = None, why

    def _ending_unread(self, outcome: Outcome, ts: float, error: str | None) -> Response:
        return Response(
            ts=ts,
            capture=self._number,
            outcome=outcome,
            stamps=Stamps(end=ts),
            status=self.tally.status,
            bytes=self._bytes,
            unread="capture paused",
            error=error,
        )

    def _failed(self, error: Exception) -> Gap:
        self._give_up("failed")
        log.error("capture %d is given up, its request goes on", self._number, exc_info=error)
        reason = f"capture failed: {type(error).__name__}"
        return Gap(ts=self._recorder.clock(), reason=reason, count=1, captures=[self._number])
