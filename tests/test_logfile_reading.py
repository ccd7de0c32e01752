"""Reading logs that crashes, full disks and other programs have been at."""

import gzip
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard

from sparseety import logreader
from sparseety.errors import SparseetyError
from sparseety.logreader import LogProblem, find_logs, in_order, read_log
from sparseety.records import FORMAT_VERSION, Chunk, LogOpen, Scope


def line(number: int, text: str = "a") -> bytes:
    chunk = Chunk(ts=1.0, capture=number, wire_index=1, chunk_index=1, delta_text=text, accumulated_len=len(text))
    return msgspec.json.encode(chunk) + b"\n"


def opening(segment: int, start: float = 5.0) -> bytes:
    record = LogOpen(
        ts=start,
        format=FORMAT_VERSION,
        source="proxy",
        host="h",
        pid=1,
        start=start,
        segment=segment,
        program="test",
        scope=Scope(),
    )
    return msgspec.json.encode(record) + b"\n"


def read(path: Path) -> tuple[list[int], list[LogProblem]]:
    """Captures of the chunks that were read, and what was reported."""
    problems: list[LogProblem] = []
    return [record.capture for _, record in read_log(path, problems.append)], problems


def written(folder: Path, content: bytes, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


TORN = line(7)[:30]


@pytest.mark.parametrize(
    ("content", "captures", "places"),
    [
        (line(1) + line(2) + TORN, [1, 2], ["3: the last line is torn"]),
        (line(1) + b"not json\n\n[1,2]\n" + line(2), [1, 2], ["2: not a JSON object", "4: not a JSON object"]),
        (b"\0" * 64 + line(1), [1], ["1: NUL bytes"]),
        (b"\0" * 64, [], ["1: the last line is torn"]),
        (line(1) + b"\0" * 5000 + b"\n" + line(2), [1, 2], ["2: not a JSON object"]),
        (line(1) + TORN + b"\0" * 5000 + line(2) + line(3), [1, 2, 3], ["2: NUL bytes"]),
        (line(1) + TORN + line(2) + line(3), [1, 2, 3], ["2: a torn record, or two on one line"]),
        (line(1).rstrip() + line(2), [1, 2], ["1: a torn record, or two on one line"]),
        (TORN + b"\n" + line(1, 'says {"event":"chunk"} here'), [1], ["1: not a JSON object"]),
    ],
)
def test_damage_is_reported_once_where_it_is_and_takes_nothing_else_along(tmp_path, content, captures, places):
    path = written(tmp_path, content)
    found, problems = read(path)
    assert found == captures
    assert [
        str(problem).removeprefix(f"{path}:")[: len(place)] for problem, place in zip(problems, places, strict=True)
    ] == places


@pytest.mark.parametrize("cut", range(0, len(line(1) * 2) + 1, 7))
def test_however_a_file_is_cut_whole_lines_are_read_and_at_most_one_is_reported(tmp_path, cut):
    found, problems = read(written(tmp_path, (line(1) * 2)[:cut]))
    assert len(found) == cut // len(line(1))
    assert len(problems) == bool(cut % len(line(1)))


def test_a_line_beyond_all_measure_is_skipped_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(logreader, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.write(line(1))
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + line(2))
        file.truncate(file.tell() + (40 << 20))  # a hole of NULs, as copytruncate leaves it under a careless writer
        file.seek(0, os.SEEK_END)
        file.write(line(3))
    tracemalloc.start()
    try:
        found, problems = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [1, 2, 3]
    assert [problem.line for problem in problems] == [2, 4]
    assert "more than 1 MiB" in problems[0].message
    assert peak < 10 << 20


def test_packed_segments_read_like_plain_ones(tmp_path):
    content = opening(0) + b"".join(line(n) for n in range(1, 500))
    plain = written(tmp_path, content)
    for name, packed in (
        ("z.jsonl.zst", zstandard.compress(content)),
        ("two-frames.jsonl.zst", zstandard.compress(content[:99]) + zstandard.compress(content[99:])),
        ("g.jsonl.1.gz", gzip.compress(content)),
    ):
        path = written(tmp_path, packed, name)
        problems: list[LogProblem] = []
        assert list(read_log(path, problems.append)) == list(read_log(plain, pytest.fail))
        assert problems == []


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_packed_segment_that_is_cut_off_yields_what_is_there_and_says_so(tmp_path, pack, share):
    content = b"".join(line(n, os.urandom(60).hex()) for n in range(1, 5000))
    packed = pack(content)
    suffix = ".zst" if pack is zstandard.compress else ".gz"
    found, problems = read(written(tmp_path, packed[: int(len(packed) * share)], "log.jsonl" + suffix))
    assert found == list(range(1, len(found) + 1))
    assert len(found) < 4999
    if share:
        assert problems
    if share > 0.1:
        assert found


def test_a_packed_segment_that_is_damaged_inside_is_reported(tmp_path):
    packed = bytearray(zstandard.compress(b"".join(line(n) for n in range(5000)), 3))
    packed[len(packed) // 2] ^= 0xFF
    _, problems = read(written(tmp_path, bytes(packed), "log.jsonl.zst"))
    assert any(problem.code == "TORN_RECORD" for problem in problems)


def test_without_the_package_a_packed_segment_says_what_to_install(tmp_path):
    written(tmp_path, zstandard.compress(line(1)), "log.jsonl.zst")
    code = (
        "import sys; sys.modules['zstandard'] = None\n"
        "from pathlib import Path; from sparseety.logreader import read_log\n"
        "list(read_log(Path(sys.argv[1]), print))"
    )
    path = str(tmp_path / "log.jsonl.zst")
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=30)
    assert "SparseetyError" in result.stderr
    assert "pip install 'sparseety[verifier]'" in result.stderr


def test_logs_are_found_in_folders_files_and_globs_each_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "b.jsonl.zst.tmp"):
        (tmp_path / name).write_text("")
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert find_logs([str(tmp_path), str(tmp_path / "*.jsonl"), str(both[0])]) == both
    with pytest.raises(SparseetyError, match="no such file or folder"):
        find_logs([str(tmp_path / "nowhere")])


def test_rotated_and_packed_files_of_a_folder_are_found_a_segment_being_packed_once(tmp_path):
    names = ["a.00000.jsonl", "a.00001.jsonl.zst", "b.jsonl.1", "b.jsonl-20261129.gz", "b.jsonl.2.gz"]
    for name in [*names, "a.00000.jsonl.zst", "a.00002.jsonl.zst.tmp", "c.json"]:
        (tmp_path / name).write_text("")
    assert [path.name for path in find_logs([str(tmp_path)])] == sorted(names)


def test_a_segment_that_is_packed_between_finding_and_reading_is_read_all_the_same(tmp_path):
    path = written(tmp_path, line(1))
    [found] = find_logs([str(tmp_path)])
    written(tmp_path, zstandard.compress(path.read_bytes()), "log.jsonl.zst")
    path.unlink()
    assert read(found) == ([1], [])


def test_segments_come_in_the_order_of_their_writing_whatever_their_names_say(tmp_path):
    names = {"z.jsonl": opening(0), "a.jsonl": opening(9), "k.jsonl.1": opening(10), "b.jsonl": opening(0, start=4.0)}
    for name, content in names.items():
        written(tmp_path, content + line(1), name)
    assert [path.name for path in in_order(find_logs([str(tmp_path)]))] == [
        "b.jsonl",
        "z.jsonl",
        "a.jsonl",
        "k.jsonl.1",
    ]
