"""Log files: what is put in comes out, losses are said, and nothing waits or raises."""

import errno
import os
import re
import stat
import threading
from pathlib import Path

import pytest

from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logreader import LogProblem, read_log
from sparseety.logwriter import LogWriter
from sparseety.records import Chunk, Gap, LogClose, LogOpen, RequestFinished, Row, Scope, Step
from sparseety.segments import Rotation


def writer(folder: Path, **options: object) -> LogWriter:
    defaults = {"rotation": Rotation(min_free_bytes=0)}
    return LogWriter(folder, "proxy", Scope(), clock=monotonic_clock(), **(defaults | options))  # type: ignore[arg-type]


def chunk(number: int, text: str = "a") -> Chunk:
    return Chunk(ts=1.0, capture=number, wire_index=1, chunk_index=1, delta_text=text, accumulated_len=len(text))


def records(path: Path) -> list[object]:
    problems: list[LogProblem] = []
    found = [record for _, record in read_log(path, problems.append)]
    assert problems == []
    return found


def test_records_come_back_in_order_between_an_opening_and_a_closing_one(tmp_path):
    log = writer(tmp_path / "logs")
    sent = [chunk(n, text) for n, text in enumerate(["é", "\u2028", "\x00", "😀", '"\\'], 1)]
    sent_step = Step(ts=2.0, step=0, rows=[Row(request=1, first_index=0, ids=[5])])
    assert all(log.put(record) for record in [*sent, sent_step])
    log.close()
    opening, *middle, closing = records(log.path)
    assert isinstance(opening, LogOpen)
    assert (opening.source, opening.pid) == ("proxy", os.getpid())
    assert middle == [*sent, sent_step]
    assert isinstance(closing, LogClose)
    assert (closing.records, closing.lost) == (7, 0)


def test_only_the_owner_can_read_folder_and_file(tmp_path):
    log = writer(tmp_path / "a" / "logs")
    log.close()
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700
    assert re.fullmatch(r"proxy-[\w.-]+-\d+-\d+\.00000\.jsonl", log.path.name)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SparseetyError, match=r"cannot write logs in .*file/logs"):
        writer(tmp_path / "file" / "logs")


def test_a_full_queue_drops_counts_and_says_which_requests_lost_records(tmp_path):
    log = writer(tmp_path, max_queue_bytes=3000, flush_seconds=3600)
    results = [log.put(chunk(n, "x" * 100)) for n in range(1, 21)]
    kept = sum(results)
    assert 0 < kept < 20
    log.flush()
    assert log.put(chunk(99))
    log.close()
    found = records(log.path)
    [gap] = [record for record in found if isinstance(record, Gap)]
    assert (gap.count, gap.reason) == (20 - kept, "queue full")
    assert gap.captures == list(range(kept + 1, 21))
    assert log.lost == 20 - kept == found[-1].lost  # type: ignore[attr-defined]


class FullDisk:
    """os.write of a disk with so many bytes left, then with room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.real = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: memoryview) -> int:
        if self.room is None:
            return self.real(fd, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.real(fd, data[: self.room])
        self.room -= count
        return count


def test_a_full_disk_tears_no_line_names_the_requests_and_recording_resumes(tmp_path, monkeypatch, caplog):
    disk = FullDisk(monkeypatch)
    log = writer(tmp_path, flush_seconds=3600)
    line = len(b'{"event":"chunk","ts":1.0,"capture":1,"wire_index":1,"chunk_index":1,"delta_text":"a"') + 20
    disk.room = 2 * line  # one line, and a part of the second
    for number in (1, 2, 3):
        log.put(chunk(number))
    log.flush()
    assert log.path.read_bytes().endswith(b"\n"), "the part of a line that the disk took was taken back"
    log.flush()  # still full: nothing to write but the gap, which is lost too and not counted twice
    disk.room = None
    log.put(chunk(4))
    log.close()
    found = records(log.path)
    [gap] = [record for record in found if isinstance(record, Gap)]
    written = [record.capture for record in found if isinstance(record, Chunk)]
    assert written[-1] == 4
    assert set(written) | set(gap.captures) == {1, 2, 3, 4}
    assert not set(written) & set(gap.captures)
    assert gap.count == len(gap.captures) == log.lost
    assert "No space left" in gap.reason
    assert "cannot write" in caplog.text


def test_many_threads_lose_and_mix_up_nothing(tmp_path):
    log = writer(tmp_path)

    def put(number: int) -> None:
        for index in range(500):
            log.put(RequestFinished(ts=float(index), request=number, total_ids=index))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = [record for record in records(log.path) if isinstance(record, RequestFinished)]
    for number in range(8):
        assert [record.total_ids for record in found if record.request == number] == list(range(500))


def test_a_closed_log_takes_nothing_more_and_does_not_raise(tmp_path):
    log = writer(tmp_path)
    log.close()
    log.close()
    assert not log.put(chunk(1))
