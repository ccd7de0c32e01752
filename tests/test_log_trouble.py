"""Trouble with the disk under the log: real small file systems, and writes that hang. Nobody who serves notices."""

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.kill9 import kill_one
from sparseety import logwriter
from sparseety.clock import monotonic_clock
from sparseety.logreader import find_logs, in_order, read_log
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, EngineEvent, Gap, Kv, KvBlocks, RequestStart, Scope, StreamDone
from sparseety.segments import Rotation
from tests.logbook import WAIT, captures, until
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    RawClient,
    RunningProxy,
    chunked,
    post,
    running_proxy,
    running_upstream,
)
from tests.raw_upstream import chunk as http_chunk

STREAMS = 64
ANY_DISK = Rotation(min_free_bytes=0, compress=False)


def writer(folder: Path, *, rotation: Rotation = ANY_DISK, **options: object) -> LogWriter:
    return LogWriter(folder, "proxy", Scope(), clock=monotonic_clock(), rotation=rotation, **options)  # type: ignore[arg-type]


def chunk(number: int, text: str = "a") -> Chunk:
    return Chunk(ts=1.0, capture=number, wire_index=1, chunk_index=1, delta_text=text, accumulated_len=len(text))


def records(folder: Path) -> list[AnyRecord]:
    paths = in_order(find_logs([str(folder)]))
    return [record for path in paths for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]


def gaps(found: list[AnyRecord]) -> list[Gap]:
    return [record for record in found if isinstance(record, Gap)]


class Disk:
    """A file system of its own, of so many bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self) -> None:
        with self.filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass

    def empty(self) -> None:
        self.filler.unlink()


def mount(folder: Path, options: str) -> None:
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip(f"mounting is not permitted: {result.stderr.strip()}")


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o700)
    try:
        mount(folder, "size=1m,mode=0700")
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class HangingWrites:
    """Writes of the log's thread wait while `hang` is on; those of others do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go_on = threading.Event()
        self._go_on.set()
        self._real = os.write
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, fd: int, data: bytes) -> int:
        if threading.current_thread().name.startswith("sparseety-log"):
            assert self._go_on.wait(WAIT)
        return self._real(fd, data)

    def start(self) -> None:
        self._go_on.clear()

    def end(self) -> None:
        self._go_on.set()


def full_disk(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ----------------------------------------------------------------------------------------------------- the writer


def test_on_a_full_disk_each_record_is_written_or_named_in_a_gap_and_recording_resumes(disk, caplog):
    log = writer(disk.folder, flush_seconds=0.005)
    disk.fill()
    number = 0
    while log.lost < 2000:
        number += 1
        log.put(chunk(number, "x" * 50))
        if number % 100 == 0:
            time.sleep(0.001)
        assert number < 1_000_000
    assert not log.healthy
    disk.empty()
    until(lambda: log.healthy)
    assert log.put(chunk(number + 1))
    log.close()
    found = records(disk.folder)
    written, named = captures(found), {n for gap in gaps(found) for n in gap.captures}
    assert written[-1] == number + 1
    assert set(written) | named == set(range(1, number + 2))
    assert not set(written) & named
    assert sum(gap.count for gap in gaps(found)) == log.lost == number + 1 - len(written)
    assert all("No space left" in gap.reason for gap in gaps(found))
    assert len(caplog.records) == 2, "one message when it stops, one when it goes on"


def test_a_gap_says_when_what_was_lost_concerns_no_request_and_when_it_may_concern_any(tmp_path, monkeypatch):
    log = writer(tmp_path, flush_seconds=600)
    evicted = Kv(ts=1.0, step=1, events=[KvBlocks(kind="evicted", first=0, tokens=16, blocks=[7])])
    control = EngineEvent(ts=1.0, kind="control", sample=0.5)
    named = Chunk(ts=1.0, capture=4, wire_index=1, chunk_index=1, delta_text="a", accumulated_len=1)
    for lost in ([evicted], [evicted, named], [named, control]):
        monkeypatch.setattr(os, "write", full_disk)
        for _ in range(2):  # the gap of the first is lost with the second
            for record in lost:
                log.put(record)
            log.flush()
        monkeypatch.undo()
        log.put(named)
        log.flush()
    log.close()
    found = gaps(records(tmp_path))
    assert [(gap.count, gap.captures, gap.no_request) for gap in found] == [
        (2, [], True),
        (4, [4], False),
        (4, [], False),
    ]


def test_recording_stops_before_the_disk_is_full_and_goes_on_when_there_is_room_again(disk):
    log = writer(disk.folder, rotation=Rotation(min_free_bytes=512 << 10, compress=False))
    log.put(chunk(1))
    log.flush()
    disk.filler.write_bytes(bytes(600 << 10))
    log.put(chunk(2))
    log.flush()
    assert not log.healthy
    left = os.statvfs(disk.folder).f_bavail * os.statvfs(disk.folder).f_frsize
    assert 256 << 10 < left < 512 << 10
    disk.empty()
    log.put(chunk(3))
    log.close()
    found = records(disk.folder)
    assert captures(found) == [1, 3]
    [gap] = gaps(found)
    assert gap.captures == [2]
    assert "MiB free" in gap.reason


def test_while_a_write_hangs_nobody_waits_and_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logwriter, "_STUCK_SECONDS", 0.05)
    disk = HangingWrites(monkeypatch)
    log = writer(tmp_path, max_queue_bytes=100_000, flush_seconds=0.001)
    disk.start()
    log.put(chunk(1))
    until(lambda: not log.healthy)  # the thread hangs in its write
    taken = [log.put(chunk(number, "x" * 100)) for number in range(2, 3000)]
    kept = sum(taken)
    assert taken == [True] * kept + [False] * (len(taken) - kept), "what came first is kept"
    assert 300 < kept < 100_000 / 200
    disk.end()
    until(lambda: log.healthy)
    until(lambda: log.put(chunk(3000)))
    log.close()
    found = records(tmp_path)
    assert captures(found) == [*range(1, kept + 2), 3000]
    assert [gap.reason for gap in gaps(found)] == ["queue full"]
    assert gaps(found)[0].captures == list(range(kept + 2, 3000))


def test_a_disk_that_never_answers_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    disk = HangingWrites(monkeypatch)
    log = writer(tmp_path, flush_seconds=0.001)
    disk.start()
    log.put(chunk(1))
    time.sleep(0.02)
    log.put(chunk(2))
    log.close(seconds=0.05)
    assert "does not answer" in caplog.text
    assert log.lost >= 1
    disk.end()
    until(lambda: not log.healthy)


def test_a_torn_line_that_the_disk_does_not_take_back_ends_its_segment(tmp_path, monkeypatch):
    real_write, real_truncate = os.write, os.ftruncate
    broken = True

    def write(fd: int, data: memoryview) -> int:
        if not broken:
            return real_write(fd, data)
        if len(data) > 40:
            return real_write(fd, data[:40])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def truncate(fd: int, size: int) -> None:
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_truncate(fd, size)

    log = writer(tmp_path, flush_seconds=3600)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", truncate)
    log.put(chunk(1))
    log.flush()
    broken = False
    log.put(chunk(2))
    log.close()
    torn, whole = find_logs([str(tmp_path)])
    problems: list[object] = []
    list(read_log(torn, problems.append))
    assert len(problems) == 1
    found = [record for _, record in read_log(whole, lambda problem: pytest.fail(str(problem)))]
    assert captures(found) == [2]
    assert {number for gap in gaps(found) for number in gap.captures} == {1}


def test_a_gap_of_a_long_outage_does_not_grow_without_end(tmp_path):
    log = writer(tmp_path, max_queue_bytes=1000, flush_seconds=3600)
    for number in range(20_000):
        log.put(chunk(number, "x" * 100))
    log.close()
    [gap] = gaps(records(tmp_path))
    assert (gap.captures, gap.count) == ([], log.lost)


# ----------------------------------------------------------------------------------- the proxy, with open streams

EVENTS = [b'data: {"choices":[{"index":0,"delta":{"content":" w%d"}}]}\n\n' % n for n in range(40)]
BODY = b"".join(EVENTS) + b"data: [DONE]\n\n"
HALF = b"".join(EVENTS[:20])


def serve_through(proxy: RunningProxy, second_half: threading.Event, trouble: Callable[[], None]) -> None:
    """Streams that are half done when the trouble begins: each gets every byte of its reply."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(proxy.client()) for _ in range(STREAMS)]
        for client in clients:
            client.send(post(b'{"stream":true}'))
        for client in clients:
            assert b" 200 " in client.read_until(b"\r\n\r\n")
        halves = [read_body(client, len(HALF)) for client in clients]
        trouble()
        second_half.set()
        bodies = [half + read_body(client, len(BODY) - len(half)) for half, client in zip(halves, clients, strict=True)]
        assert all(client.read_chunk() == b"" for client in clients)
    assert set(bodies) == {BODY}


def read_body(client: RawClient, size: int) -> bytes:
    body = b""
    while len(body) < size:
        body += client.read_chunk()
    return body


def script(second_half: threading.Event) -> tuple[bytes | threading.Event, ...]:
    first, second = EVENTS[:20], [*EVENTS[20:], b"data: [DONE]\n\n"]
    return (chunked(EVENT_STREAM), *map(http_chunk, first), second_half, *map(http_chunk, second), LAST_CHUNK)


def check_log(folder: Path, *, lost: int) -> None:
    """Each request is whole in the log or named in a gap; the last one, made after the trouble, is whole."""
    found = records(folder)
    starts = {record.capture for record in found if isinstance(record, RequestStart)}
    whole = {
        record.capture
        for record in found
        if isinstance(record, StreamDone)
        and record.capture in starts
        and captures(found).count(record.capture) == record.events == len(EVENTS) + 1
    }
    named = {number for gap in gaps(found) for number in gap.captures}
    assert whole | named == set(range(1, STREAMS + 2))
    assert not whole & named
    assert STREAMS + 1 in whole
    assert sum(gap.count for gap in gaps(found)) == lost


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_with_its_log_disk_full_or_read_only_the_proxy_delivers_every_byte(tmp_path, disk, kind, caplog):
    second_half = threading.Event()
    with running_upstream(*script(second_half)) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        log = proxy.service.writer

        def begin() -> None:
            if kind == "full":
                disk.fill()
            else:
                mount(disk.folder, "ro")

        serve_through(proxy, second_half, begin)
        until(lambda: log.lost > 0)
        assert proxy.admin("/readyz")[0] == 503
        if kind == "full":
            disk.empty()
        else:
            subprocess.run(["umount", str(disk.folder)], check=True)
        until(lambda: log.healthy)
        with proxy.client() as client:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, BODY)
    assert proxy.summary is not None
    assert proxy.summary.lost > 0
    check_log(disk.folder, lost=proxy.summary.lost)
    assert len([record for record in caplog.records if "cannot write" in record.message]) == 1


def test_with_its_log_writer_stalled_the_proxy_delivers_every_byte_and_records_it_later(tmp_path, monkeypatch):
    monkeypatch.setattr(logwriter, "_STUCK_SECONDS", 0.1)
    hanging = HangingWrites(monkeypatch)
    second_half = threading.Event()
    with running_upstream(*script(second_half)) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        serve_through(proxy, second_half, hanging.start)
        until(lambda: not proxy.service.writer.healthy)
        assert proxy.admin("/readyz")[0] == 503
        hanging.end()
        until(lambda: proxy.service.writer.healthy)
        with proxy.client() as client:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, BODY)
    check_log(tmp_path / "logs", lost=0)


@pytest.mark.parametrize("bursts", [1, 30, 90])
def test_of_a_writer_killed_under_load_every_flushed_record_reads_back(tmp_path, bursts):
    found = kill_one(tmp_path / "logs", bursts)
    assert found.flushed >= bursts * 200
    assert found.read >= found.flushed
    assert found.torn_in_one_file <= 1
