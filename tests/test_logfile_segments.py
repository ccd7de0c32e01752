"""Rotation, packing and the cap on disk space, and other programs that rename, cut or delete segments."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from sparseety.clock import monotonic_clock
from sparseety.logreader import find_logs, in_order, read_log
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Chunk, EngineStart, Gap, LogClose, LogOpen, Scope, TokenizerIdentity
from sparseety.segments import Rotation, locked, segment_name
from sparseety.tidy import tidy
from tests.logbook import WAIT, captures, until

PLAIN = {"min_free_bytes": 0, "compress": False}


def writer(folder: Path, *, clock: Callable[[], float] | None = None, **rotation: object) -> LogWriter:
    options = Rotation(**(PLAIN | rotation))  # type: ignore[arg-type]
    return LogWriter(folder, "proxy", Scope(), clock=clock or monotonic_clock(), rotation=options, flush_seconds=3600)


def chunk(number: int, text: str = "a") -> Chunk:
    return Chunk(ts=1.0, capture=number, wire_index=1, chunk_index=1, delta_text=text, accumulated_len=len(text))


def put(log: LogWriter, *numbers: int) -> None:
    for number in numbers:
        assert log.put(chunk(number))
    log.flush()


def records(path: Path) -> list[AnyRecord]:
    return [record for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]


def segments(folder: Path) -> list[list[AnyRecord]]:
    return [records(path) for path in in_order(find_logs([str(folder)]))]


def total_size(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is being tidied
            size += path.stat().st_size
    return size


class Hours:
    """A clock that a test turns on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -------------------------------------------------------------------------------------------------------- rotation


def test_a_log_is_cut_into_whole_files_of_bounded_size_that_together_hold_everything(tmp_path):
    log = writer(tmp_path, segment_bytes=2000)
    put(log, *range(1, 101))  # one flush fills many segments
    log.close()
    found = segments(tmp_path)
    assert len(found) > 5
    assert [number for segment in found for number in captures(segment)] == list(range(1, 101))
    openings = [segment[0] for segment in found]
    assert all(isinstance(opening, LogOpen) for opening in openings)
    assert [opening.segment for opening in openings] == list(range(len(found)))
    assert len({(opening.source, opening.host, opening.pid, opening.start) for opening in openings}) == 1
    closings = [segment[-1] for segment in found]
    assert all(isinstance(closing, LogClose) for closing in closings)
    assert [closing.continued for closing in closings] == [True] * (len(found) - 1) + [False]
    assert [closing.records for closing in closings] == [len(segment) - 1 for segment in found]
    assert sum(map(len, found)) == log.written
    assert all(path.stat().st_size < 2000 + 200 for path in tmp_path.iterdir())


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path):
    log = writer(tmp_path, segment_bytes=1000)
    log.put(chunk(1))
    log.put(chunk(2, "x" * 5000))
    put(log, 3)
    log.close()
    assert [number for segment in segments(tmp_path) for number in captures(segment)] == [1, 2, 3]


def test_a_segment_of_age_ends_though_nothing_more_comes_and_an_idle_log_makes_no_more(tmp_path):
    clock = Hours()
    log = writer(tmp_path, clock=clock, segment_seconds=900)
    put(log, 1)
    for _ in range(5):
        clock.now += 1000
        log.flush()
    assert len(list(tmp_path.iterdir())) == 2
    put(log, 2)
    clock.now += 1000
    put(log, 3)
    log.close()
    assert [captures(segment) for segment in segments(tmp_path)] == [[1], [2], [3]]


def test_each_segment_says_which_engine_it_is_about_for_the_first_may_be_deleted(tmp_path):
    options = Rotation(segment_bytes=1000, min_free_bytes=0, compress=False)
    log = LogWriter(tmp_path, "engine", Scope(), clock=monotonic_clock(), rotation=options)
    log.put(EngineStart(ts=1.0, vllm="0.32.0", model="toy", tokenizer=TokenizerIdentity(name="toy")))
    for number in range(50):
        log.put(chunk(number))
    log.close()
    found = segments(tmp_path)
    assert len(found) > 3
    for segment in found:
        [start] = [record for record in segment if isinstance(record, EngineStart)]
        assert (start.model, start.tokenizer.name) == ("toy", "toy")


# --------------------------------------------------------------------------------------------- packing and the cap


def test_closed_segments_are_packed_in_the_background_and_the_open_one_is_not(tmp_path):
    log = writer(tmp_path, segment_bytes=4000, compress=True)
    put(log, *range(1, 101))
    open_segment = log.path
    until(lambda: [path for path in tmp_path.iterdir() if path.suffix != ".zst"] == [open_segment])
    log.close()
    assert open_segment.exists(), "the last segment is left to the next writer: stopping must not take long"
    assert [number for segment in segments(tmp_path) for number in captures(segment)] == list(range(1, 101))
    packed = [path for path in tmp_path.iterdir() if path.suffix == ".zst"]
    assert {path.stat().st_mode & 0o777 for path in packed} == {0o600}
    assert zstandard.decompress(packed[0].read_bytes()).startswith(b'{"event":"log_open"'), "any zstd tool reads it"


def test_the_next_writer_packs_what_a_killed_one_left_half_done(tmp_path):
    log = writer(tmp_path)
    put(log, 1)
    log.close()
    left = log.path
    left.with_name(left.name + ".zst.tmp").write_bytes(b"half of it")
    following = writer(tmp_path, compress=True)
    until(lambda: not left.exists())
    following.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left.name + ".zst", following.path.name])
    assert captures(records(left)) == [1], "found under its old name too"


def test_the_oldest_closed_segments_go_first_over_restarts_and_an_open_one_never(tmp_path):
    living = writer(tmp_path)
    put(living, *range(1000, 1100))  # the oldest of all, and open
    for restart in range(3):
        log = writer(tmp_path, segment_bytes=2000)
        put(log, *range(restart * 100, restart * 100 + 100))
        log.close()
        time.sleep(0.01)
    others = tmp_path / "engine-h-1-1.00000.jsonl"
    others.write_bytes(b"x" * 100_000)
    cap = 30_000
    tidy(tmp_path, "proxy", os.uname().nodename, Rotation(total_bytes=cap, compress=False))
    kept = [path for path in tmp_path.iterdir() if path != others]
    assert cap - 2500 < sum(path.stat().st_size for path in kept) <= cap
    assert living.path in kept
    assert others.exists(), "the engine's log has a cap of its own"
    found = [number for path in in_order(kept) for number in captures(records(path)) if number < 1000]
    assert found == list(range(found[0], 300)), "what is left are the latest ones, without a hole"
    put(living, 1100)
    living.close()
    assert captures(records(living.path))[-1] == 1100


def test_a_log_keeps_under_its_cap_while_it_is_written(tmp_path):
    log = writer(tmp_path, segment_bytes=10_000, total_bytes=50_000)
    for number in range(100):
        put(log, *range(number * 100, number * 100 + 100))
    until(lambda: total_size(tmp_path) <= 50_000 + 10_000)  # and the open one
    log.close()
    assert captures(segments(tmp_path)[-1])[-1] == 9999


def test_another_process_keeps_the_segment_it_writes(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from sparseety.logwriter import LogWriter; from sparseety.segments import Rotation\n"
        "from sparseety.records import Scope; from sparseety.clock import monotonic_clock\n"
        "any_disk = Rotation(min_free_bytes=0)\n"
        "log = LogWriter(Path(sys.argv[1]), 'proxy', Scope(), clock=monotonic_clock(), rotation=any_disk)\n"
        "print(log.path, flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        everything = Rotation(total_bytes=0)
        tidy(tmp_path, "proxy", os.uname().nodename, everything)
        assert theirs.exists()
        other.kill()
        other.wait(WAIT)
    tidy(tmp_path, "proxy", os.uname().nodename, everything)
    assert list(tmp_path.iterdir()) == [], "the lock went with the process"


def test_a_plain_segment_of_another_host_is_left_alone_until_it_lies_still(tmp_path):
    theirs = tmp_path / "proxy-another-1-1.00000.jsonl"
    theirs.write_bytes(b"{}\n")
    everything = Rotation(total_bytes=0)
    tidy(tmp_path, "proxy", "here", everything)
    assert theirs.exists()
    os.utime(theirs, (time.time() - 7200,) * 2)
    tidy(tmp_path, "proxy", "here", everything)
    assert not theirs.exists()


def test_a_segment_that_cannot_be_packed_stays_as_it_is(tmp_path, caplog):
    log = writer(tmp_path)
    put(log, 1)
    log.close()
    log.path.with_name(log.path.name + ".zst.tmp").mkdir()  # in the way
    tidy(tmp_path, "proxy", os.uname().nodename, Rotation())
    assert captures(records(log.path)) == [1]
    assert "cannot pack" in caplog.text


def test_nobody_packs_a_segment_that_somebody_else_is_packing(tmp_path):
    log = writer(tmp_path)
    put(log, 1)
    log.close()
    with locked(log.path) as fd:
        assert fd is not None
        tidy(tmp_path, "proxy", os.uname().nodename, Rotation())
        assert list(tmp_path.iterdir()) == [log.path]


# --------------------------------------------------------------------------------------------- other programs' hands


def test_a_renamed_segment_is_closed_where_it_is_and_nothing_is_lost(tmp_path, caplog):
    log = writer(tmp_path)
    put(log, 1)
    moved = log.path.rename(tmp_path / (log.path.name + ".1"))  # as logrotate does
    put(log, 2)
    put(log, 3)
    log.close()
    assert captures(records(moved)) == [1]
    assert captures(records(log.path)) == [2, 3]
    assert not any(isinstance(record, Gap) for segment in segments(tmp_path) for record in segment)
    assert len(caplog.records) == 1
    assert "was moved away; recording goes on in a new segment" in caplog.text


def test_copytruncate_is_noticed_said_in_a_gap_and_leaves_no_nuls(tmp_path, caplog):
    log = writer(tmp_path)
    put(log, 1, 2)
    cut = log.path
    copy = tmp_path / (cut.name + ".1")
    copy.write_bytes(cut.read_bytes())
    os.truncate(cut, 0)
    put(log, 3)
    log.close()
    assert cut.read_bytes() == b""
    assert captures(records(copy)) == [1, 2]
    opening, gap, *rest = records(log.path)
    assert isinstance(opening, LogOpen)
    assert opening.segment == 1
    assert isinstance(gap, Gap)
    assert (gap.captures, gap.count) == ([], 3)
    assert f"{cut.name} was cut short" in gap.reason
    assert captures(rest) == [3]
    assert log.lost == 0, "the writer lost nothing; what the other program kept is its own affair"


@pytest.mark.parametrize("what", ["segment", "folder"])
def test_a_deleted_segment_or_folder_is_made_anew_and_a_gap_says_so(tmp_path, what, caplog):
    folder = tmp_path / "logs"
    log = writer(folder)
    put(log, 1)
    log.path.unlink()
    if what == "folder":
        folder.rmdir()
    put(log, 2)
    log.close()
    [[_, gap, *rest]] = segments(folder)
    assert isinstance(gap, Gap)
    assert "was deleted" in gap.reason
    assert captures(rest) == [2]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1


def test_what_another_program_appended_is_not_continued(tmp_path):
    log = writer(tmp_path)
    put(log, 1)
    with log.path.open("ab") as file:
        file.write(b"half a li")
    put(log, 2)
    log.close()
    assert captures(records(log.path)) == [2]


def test_a_file_that_is_in_the_way_of_the_next_segment_is_passed_by(tmp_path):
    log = writer(tmp_path, segment_bytes=400)
    in_the_way = log.path.with_name(log.path.name.replace(".00000.", ".00001."))
    in_the_way.write_bytes(b"")
    for number in range(1, 6):
        put(log, number)
    log.close()
    assert in_the_way.read_bytes() == b""
    with contextlib.suppress(FileNotFoundError):
        in_the_way.unlink()
    assert [number for segment in segments(tmp_path) for number in captures(segment)] == [1, 2, 3, 4, 5]


def test_a_packing_that_is_given_up_half_way_leaves_the_plain_file_and_no_word(tmp_path, caplog):
    plain = tmp_path / segment_name("proxy", os.uname().nodename, 1, 1.0, 0)
    plain.write_bytes(bytes(3 << 20))
    asked = iter([False, False, True, True])
    tidy(tmp_path, "proxy", os.uname().nodename, Rotation(), stopping=lambda: next(asked))
    assert next(asked)  # it stopped within the file
    assert [path.name for path in tmp_path.iterdir()] == [plain.name]
    assert caplog.records == []
