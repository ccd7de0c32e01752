"""Writes the capture log: a bounded queue that never makes its caller wait, and a thread that fills segments."""

import contextlib
import errno
import logging
import os
import threading
import time
from pathlib import Path

import msgspec

import sparseety
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.metrics import FLUSH_SECONDS, observe
from sparseety.records import (
    FORMAT_VERSION,
    AnyRecord,
    EngineEvent,
    EngineStart,
    Gap,
    LogClose,
    LogOpen,
    Record,
    Scope,
    Source,
)
from sparseety.segments import Displaced, Rotation, Segment, segment_name, this_host
from sparseety.tidy import Tidier
from sparseety.written import Loss, Written

log = logging.getLogger("sparseety.log")

_encoder = msgspec.json.Encoder()
_encode, _encode_lines = _encoder.encode, _encoder.encode_lines
_decode = msgspec.json.Decoder(AnyRecord).decode

_BLOCK_OVERHEAD = 48  # bytes that lines queued together take in memory besides their own
_BLOCK_RECORDS = 256
_BATCH_BYTES = 1 << 20  # of one write: joining lines holds the interpreter's lock
_STUCK_SECONDS = 5.0  # a write that takes longer is trouble
_CLOSE_SECONDS = 10.0  # what a disk that does not answer may hold up the end of the program
_SAY_AGAIN_SECONDS = 60.0
_ENOUGH = 1.05  # times min_free_bytes: recording resumes
_LOOK_SECONDS = 5.0  # how old the free space on the disk may be, as told to others


class LowDisk(OSError):
    """Less is free than has to be left."""


class LogWriter:
    """Writes records from any thread, through a queue of bounded size, with one thread of its own.

    `put` encodes, appends and returns; it never blocks and never raises. What the queue cannot hold or the disk
    does not take is counted, and a `gap` naming the requests concerned goes into the log before anything later.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        scope: Scope,
        *,
        clock: Clock,
        rotation: Rotation | None = None,
        max_queue_bytes: int = 64 << 20,
        flush_seconds: float = 0.05,
    ) -> None:
        """Open the first segment. Raises SparseetyError where the folder cannot be made or written."""
        self.rotation = rotation or Rotation()
        self._folder, self._clock = folder, clock
        self._max_queue_bytes, self._flush_seconds = max_queue_bytes, flush_seconds
        start = clock()
        self._opening = LogOpen(
            ts=start,
            format=FORMAT_VERSION,
            source=source,
            host=this_host(),
            pid=os.getpid(),
            start=start,
            program=f"sparseety {sparseety.__version__}",
            scope=scope,
        )
        self._next_segment = 0
        self.path = self._path(0)  # the segment that was opened last
        self._repeated: dict[type, bytes] = {}  # what each segment needs said again: earlier ones may be gone
        self._displacement: Gap | None = None  # said in the next segment's head
        self._segment: Segment | None = None
        self.done = Written()
        self._looked = -_LOOK_SECONDS  # at the free space, by the monotonic clock
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._blocks: list[bytes] = []  # whole lines each, one or more
        self._queued_bytes = 0  # of those not yet written, those being written too
        self._loss = Loss()
        self._failing: OSError | None = None
        self._said = -_SAY_AGAIN_SECONDS  # when a failure was logged last, by the monotonic clock
        self._said_failed = False  # and nothing since
        self._busy_since: float | None = None  # by the monotonic clock
        self._closed = False
        self._stop = threading.Event()
        try:
            self._segment = self._open_segment()
        except OSError as error:
            raise SparseetyError(
                f"cannot write logs in {folder}/: {error.strerror}; give a folder that this user may write"
            ) from None
        self._tidier = Tidier(folder, source, self._opening.host, self.rotation, self.done.segments)
        self._thread = threading.Thread(target=self._run, name=f"sparseety-log-{source}", daemon=True)
        self._thread.start()

    @property
    def written(self) -> int:
        """Records in the log."""
        return self.done.records

    @property
    def lost(self) -> int:
        """Records that never got there."""
        return sum(self.done.dropped.values())

    @property
    def healthy(self) -> bool:
        """The writing thread lives, does not wait for the disk, and the disk took what was last given to it."""
        since = self._busy_since
        stuck = since is not None and time.monotonic() - since > _STUCK_SECONDS
        return self._thread.is_alive() and self._failing is None and not stuck

    @property
    def closed(self) -> bool:
        """By its owner: it takes no more."""
        return self._closed

    @property
    def queue(self) -> tuple[int, int]:
        """Bytes in use, and how many there may be."""
        return self._queued_bytes, self._max_queue_bytes

    @property
    def fill(self) -> float:
        """Share of the queue in use, 0..1."""
        return self._queued_bytes / self._max_queue_bytes

    def put(self, record: AnyRecord) -> bool:
        """Queue a record. False: it was lost, which is counted and will be said in the log."""
        try:
            line = _encode(record) + b"\n"
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
            return self._lose(record, f"not encodable: {type(error).__name__}", "serialize_error")
        with self._lock:
            if self._queue(line):
                if record.__class__ is EngineStart or (record.__class__ is EngineEvent and record.kind == "control"):
                    self._repeated[record.__class__] = line
                return True
        if self._closed:
            return self._lose(record, "written after the log was closed", "shutdown")
        return self._lose(record, "queue full", "queue_full")

    def put_all(self, records: list[AnyRecord]) -> None:
        """As `put` for each of them, for less. Not for what later segments repeat."""
        for first in range(0, len(records), _BLOCK_RECORDS):
            self._put_block(records[first : first + _BLOCK_RECORDS])

    def _put_block(self, records: list[AnyRecord]) -> None:
        try:
            block = _encode_lines(records)
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
            block = b""
        if 0 < len(block) <= _BATCH_BYTES:
            with self._lock:
                if self._queue(block):
                    return
        for record in records:  # one by one, to keep what can be kept and to say which are lost
            self.put(record)

    def _queue(self, block: bytes) -> bool:
        """With the lock held. False: there is no room."""
        size = len(block) + _BLOCK_OVERHEAD
        if self._closed or self._queued_bytes + size > self._max_queue_bytes:
            return False
        self._blocks.append(block)
        self._queued_bytes += size
        return True

    def flush(self) -> None:
        """Write what is queued, now, in the caller's thread."""
        with self._flushing:
            with self._lock:
                blocks, self._blocks = self._blocks, []
                size = self._queued_bytes
                loss, self._loss = self._loss, Loss()
            self._busy_since = begun = time.monotonic()
            try:
                if loss.count:
                    blocks.insert(0, _line(loss.gap(self._clock())))
                self._write(blocks)
            except Exception as error:
                log.exception("a bug while writing %s; writing goes on", self.path)
                self._lose_lines(blocks, f"not written: {type(error).__name__}", "write_error")
            finally:
                self._busy_since = None
                if blocks:
                    observe(self.done.flushes, FLUSH_SECONDS, time.monotonic() - begun)
                with self._lock:
                    self._queued_bytes -= size

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Write the rest and the closing record. Called twice, it does nothing the second time.

        Waits no longer than so many seconds for a disk that does not answer; then the rest is lost. False: so it was.
        """
        with self._lock:
            if self._closed:
                return not self._thread.is_alive()
            self._closed = True
        self._stop.set()
        self._tidier.close(seconds)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return True
        with self._lock:
            self.done.dropped["shutdown"] += sum(block.count(b"\n") for block in self._blocks)
        log.error("the disk under %s does not answer; the last records are lost", self.path)
        return False

    # ----------------------------------------------------------------------------------------- the writing thread

    def _run(self) -> None:
        while not self._stop.wait(self._flush_seconds):
            self.flush()
        self.flush()
        with self._flushing:
            self._end_segment(continued=False)

    def _write(self, blocks: list[bytes]) -> None:
        done = 0  # blocks
        rest = b""  # of the batch that was not written as a whole
        try:
            if blocks or self._failing:
                self._usable_segment()
            else:
                self._end_segment_of_age()
            while done < len(blocks):
                segment = self._usable_segment()
                count = self._fitting(blocks, done, segment)
                batch = b"".join(blocks[done : done + count])
                kept, error = self._append(segment, batch)
                done += count
                if error:
                    rest = batch[kept:]
                    raise error
            self._look_at_disk()
        except OSError as error:
            self._look_at_disk()
            why = "disk_low" if isinstance(error, LowDisk) else "write_error"
            self._lose_lines([rest, *blocks[done:]], f"not written: {error.strerror}", why)
            self._say_failed(error)
            return
        self._say_works()

    def _append(self, segment: Segment, lines: bytes) -> tuple[int, OSError | None]:
        """As the segment's own, and counted."""
        before = segment.records
        kept, error = segment.append(lines)
        self._count(segment.records - before, kept)
        return kept, error

    def _count(self, records: int, size: int) -> None:
        if records:
            self.done.records += records
            self.done.bytes += size
            self.done.last = self._clock()

    def _look_at_disk(self) -> None:
        """In the writing thread, for on a disk that hangs to look hangs too."""
        now = time.monotonic()
        if self._segment and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError):
                self.done.disk_free = self._segment.free_bytes()

    def _fitting(self, blocks: list[bytes], first: int, segment: Segment) -> int:
        """How many blocks to write at once: what the segment still holds, and no less than one."""
        room = min(_BATCH_BYTES, self.rotation.segment_bytes - segment.size) - len(blocks[first])
        count = 1
        while first + count < len(blocks) and (room := room - len(blocks[first + count])) >= 0:
            count += 1
        return count

    # ----------------------------------------------------------------------------------------------- its segments

    def _path(self, number: int) -> Path:
        opening = self._opening
        return self._folder / segment_name(opening.source, opening.host, opening.pid, opening.start, number)

    def _open_segment(self) -> Segment:
        """Raises OSError; then the next try is for the same number, so that no number is missing."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = self._clock() if self._next_segment else self._opening.start
        while True:
            opening = msgspec.structs.replace(self._opening, ts=now, segment=self._next_segment)
            header: list[Record] = [opening, self._displacement] if self._displacement else [opening]
            try:
                segment = Segment(
                    self._path(self._next_segment), [*map(_line, header), *self._repeated_lines(now)], now
                )
                break
            except FileExistsError:
                self._next_segment += 1
        self._next_segment += 1
        self.path = segment.path
        self._displacement = None
        self._count(segment.records, segment.size)
        self.done.segments["opened"] += 1
        return segment

    def _repeated_lines(self, now: float) -> list[bytes]:
        """Those records, as of now: what stands in this segment has happened by its beginning."""
        return [_line(msgspec.structs.replace(_decode(line), ts=now)) for line in self._repeated.values()]

    def _usable_segment(self) -> Segment:
        """The segment to append to, after a look at what became of it. Raises OSError."""
        segment = self._segment
        if segment and (displaced := segment.displaced()):
            self._leave_segment(segment, displaced)
        elif segment and segment.size >= self.rotation.segment_bytes:
            self._end_segment(continued=True)
        else:
            self._end_segment_of_age()
        if self._segment is None:
            self._segment = self._open_segment()
        needed = self.rotation.min_free_bytes * (_ENOUGH if self._failing else 1)
        if needed and self._segment.free_bytes() < needed:
            raise LowDisk(errno.ENOSPC, f"less than {self.rotation.min_free_bytes >> 20} MiB free on the disk")
        return self._segment

    def _end_segment_of_age(self) -> None:
        """Also where nothing more comes, so that what was recorded can be shipped and packed."""
        segment = self._segment
        if segment is None or segment.records == segment.header_records:
            return
        if self._clock() - segment.opened >= self.rotation.segment_seconds:
            self._end_segment(continued=True)
            self._segment = self._open_segment()

    def _end_segment(self, *, continued: bool) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        closing = LogClose(ts=self._clock(), records=segment.records, lost=self.lost, continued=continued)
        _, error = self._append(segment, _line(closing))
        if error:
            log.warning("log %s could not be closed in order: %s", segment.path, error)
        else:
            self.done.segments["closed"] += 1
        segment.close()
        self._tidier.wake()

    def _leave_segment(self, segment: Segment, displaced: Displaced) -> None:
        """Go on in a new segment: another program had its hands on this one."""
        log.warning("log %s %s; recording goes on in a new segment", segment.path, displaced.reason)
        if displaced.lossy:
            reason = f"{segment.path.name} {displaced.reason}"
            self._displacement = Gap(ts=self._clock(), reason=reason, count=segment.records)
            self._segment = None
            segment.close()
        else:
            self._end_segment(continued=True)

    # -------------------------------------------------------------------------------------------------- its losses

    def _lose(self, record: AnyRecord, reason: str, why: str) -> bool:
        """reason: for the log; why: for the counter."""
        with self._lock:
            self._loss.add(record, reason)
            self.done.dropped[why] += 1
        return False

    def _lose_lines(self, blocks: list[bytes], reason: str, why: str) -> None:
        for line in b"".join(blocks).splitlines():
            record = _decode(line)
            with self._lock:
                self._loss.add(record, reason)
                self.done.dropped[why] += not isinstance(record, Gap)  # a gap's records are counted already

    def _say_failed(self, error: OSError) -> None:
        """Once, and not again within a minute: a disk that is full by and large takes a line now and then."""
        if self._failing is None and time.monotonic() - self._said >= _SAY_AGAIN_SECONDS:
            self._said = time.monotonic()
            self._said_failed = True
            log.error("cannot write %s: %s; recording goes on when it can, serving is not touched", self.path, error)
        self._failing = error

    def _say_works(self) -> None:
        if self._failing and self._said_failed:
            self._said_failed = False
            log.warning("log %s is written again; %d records were lost so far", self.path, self.lost)
        self._failing = None


def _line(record: Record) -> bytes:
    return _encode(record) + b"\n"
