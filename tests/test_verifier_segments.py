"""Requests that span segments of their logs, and segments that are gone."""

from pathlib import Path

import msgspec
import pytest

from sparseety.records import AnyRecord, Chunk, EngineStart, Gap, LogClose, LogOpen, RequestAdded, RequestFinished, Step
from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, WORLD, Result, codes, line_at, verify

__all__ = ["verify"]  # a fixture

TEXT = ["hello", " world"]


def cut(records: list[AnyRecord], folder: Path, size: int, *, closed: bool = True) -> list[Path]:
    """Write a log in segments of so many records each, as the writer does."""
    opening = records[0]
    assert isinstance(opening, LogOpen)
    repeated = [record for record in records if isinstance(record, EngineStart)]
    rest = [record for record in records[1:] if record not in repeated]
    paths = []
    for number, begin in enumerate(range(0, max(1, len(rest)), size)):
        part = rest[begin : begin + size]
        last = begin + size >= len(rest)
        head = msgspec.structs.replace(opening, segment=number, ts=part[0].ts - 0.001 if number else opening.ts)
        lines = [head, *repeated, *part]
        if closed or not last:
            lines.append(LogClose(ts=part[-1].ts, records=len(lines), lost=0, continued=not last))
        path = folder / f"{opening.source}-h-1-1.{number:05d}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in lines))
        paths.append(path)
    return paths


def three_requests() -> Logbook:
    """Far apart in time, so that each lies in segments of its own where these are small."""
    book = Logbook()
    for number in range(1, 4):
        book.exchange([HELLO, WORLD, EOS], TEXT, name=f"chatcmpl-{number}", usage=3)
        book.now += 100
    return book


def verdicts(result: Result) -> dict[str, str]:
    return {request["request_id"]: request["verdict"] for request in result.json() if "request_id" in request}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_requests_join_across_segments_however_the_logs_are_cut(tmp_path, verify, size):
    book = three_requests()
    cut(book.proxy, tmp_path, size)
    cut(book.engine, tmp_path, size)
    result = verify(tmp_path)
    assert result.exit_code == 0
    assert result.out.startswith("3 requests: 3 pass, 0 fail, 0 incomplete; 9 of 9 tokens checked\n")


def test_names_that_sort_wrongly_do_not_matter(tmp_path, verify):
    book = three_requests()
    for records in (book.proxy, book.engine):
        for number, path in enumerate(cut(records, tmp_path, 2)):
            path.rename(path.with_name(f"{99 - number}-{path.name}"))
    assert verify(tmp_path).exit_code == 0


def test_two_writers_in_one_folder_with_equal_numbers_are_kept_apart(tmp_path, verify):
    first, second = three_requests(), Logbook()
    second.exchange([WORLD, HELLO, EOS], [" world", "hello"], name="chatcmpl-9")
    for records in (second.proxy, second.engine):
        records[0] = msgspec.structs.replace(records[0], pid=77)
    for folder, book in (("a", first), ("b", second)):
        (tmp_path / folder).mkdir()
        cut(book.proxy, tmp_path / folder, 3)
        cut(book.engine, tmp_path / folder, 3)
    result = verify(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert result.out.startswith("4 requests: 4 pass")


def test_a_fault_is_found_at_its_line_in_its_segment(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " wOrld"])
    cut(book.proxy, tmp_path, 1)
    cut(book.engine, tmp_path, 1)
    result = verify(tmp_path)
    assert result.exit_code == 1
    proxy, engine = result.out.splitlines()[1].split()
    assert b'" wOrld"' in line_at(proxy)
    assert b'"ids":[264]' in line_at(engine)


@pytest.mark.parametrize("side", ["proxy", "engine"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_whatever_segments_are_missing_nothing_fails_and_whole_requests_still_pass(tmp_path, verify, side, size):
    book = three_requests()
    if side == "proxy":  # then nothing may pass the proxy, and a missing request would be a fault
        opening = book.proxy[0]
        assert isinstance(opening, LogOpen)
        book.proxy[0] = msgspec.structs.replace(opening, scope=msgspec.structs.replace(opening.scope, exclusive=True))
    cut_up, whole = (book.proxy, book.engine) if side == "proxy" else (book.engine, book.proxy)
    paths = cut(cut_up, tmp_path, size)
    cut(whole, tmp_path, 100)
    contents = {path: path.read_bytes() for path in paths}
    for first in range(len(paths)):
        for last in range(first, len(paths)):
            missing = paths[first : last + 1]
            for path in missing:
                path.unlink()
            result = verify(tmp_path, "--json")
            found = verdicts(result)
            assert "fail" not in found.values(), (first, last, result.out)
            touched = {name for path in missing for name in names_in(contents[path], book)}
            assert {name for name, verdict in found.items() if verdict == "pass"} >= {
                f"chatcmpl-{number}" for number in range(1, 4)
            } - touched - neighbours(touched)
            for path in missing:
                path.write_bytes(contents[path])
    assert verify(tmp_path).exit_code == 0


def names_in(content: bytes, book: Logbook) -> set[str]:
    """The requests that a segment's lines are about."""
    found = set()
    for line in content.splitlines():
        record = msgspec.json.decode(line)
        numbers = [record.get("capture") or record.get("request"), *(row["request"] for row in record.get("rows", []))]
        found |= {f"chatcmpl-{number}" for number in numbers if number}
    return found


def neighbours(names: set[str]) -> set[str]:
    """A hole reaches from the record before it to the one after it, which may be another request's."""
    numbers = {int(name.rpartition("-")[2]) for name in names}
    return {f"chatcmpl-{number + step}" for number in numbers for step in (-1, 1)}


def test_the_newest_segment_missing_leaves_later_requests_unjudged_not_orphans(tmp_path, verify):
    book = three_requests()
    *_, last = cut(book.engine, tmp_path, 5)
    cut(book.proxy, tmp_path, 100)
    last.unlink()
    found = verdicts(verify(tmp_path, "--json"))
    assert found["chatcmpl-1"] == "pass"
    assert found["chatcmpl-3"] == "incomplete"


def test_a_gap_that_swallowed_the_engines_request_added_makes_no_orphan(tmp_path, verify):
    book = three_requests()
    lost = [record for record in book.engine if of_request(record, 2)]
    begin = book.engine.index(lost[0])
    gap = Gap(ts=lost[-1].ts, reason="queue full", count=len(lost), requests=[2])
    book.engine[begin : begin + len(lost)] = [gap]
    found = verdicts(verify(book.write(tmp_path), "--json"))
    assert found == {"chatcmpl-1": "pass", "chatcmpl-2": "incomplete", "chatcmpl-3": "pass"}


def of_request(record: AnyRecord, number: int) -> bool:
    if isinstance(record, Step):
        return any(row.request == number for row in record.rows)
    return isinstance(record, RequestAdded | RequestFinished) and record.request == number


def test_a_gap_without_names_concerns_those_open_at_its_time_only(tmp_path, verify):
    book = three_requests()
    second = [record for record in book.proxy if isinstance(record, Chunk) and record.capture == 2]
    begin = book.proxy.index(second[1])
    book.proxy[begin] = Gap(ts=second[1].ts, reason="not written: No space left on device", count=1)
    result = verify(book.write(tmp_path), "--json")
    assert codes(result, "chatcmpl-2") == ("incomplete", {"LOST_RECORDS", "UNVERIFIABLE"})
    assert verdicts(result) == {"chatcmpl-1": "pass", "chatcmpl-2": "incomplete", "chatcmpl-3": "pass"}


def test_a_request_that_a_gap_swallowed_whole_is_incomplete_and_counted(tmp_path, verify):
    book = three_requests()
    book.proxy[1:] = [
        *[record for record in book.proxy[1:] if getattr(record, "capture", 0) != 2],
        Gap(ts=book.now, reason="not written: No space left on device", count=5, captures=[2]),
    ]
    result = verify(book.write(tmp_path))
    assert result.exit_code == 3
    assert "3 requests: 2 pass, 0 fail, 1 incomplete" in result.out


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("closed", [True, False])
def test_where_the_last_segment_says_that_another_follows_and_none_does_not_all_is_checked(
    tmp_path, verify, missing, closed
):
    book = three_requests()
    paths = cut(book.proxy, tmp_path, 6, closed=closed)  # one request each
    cut(book.engine, tmp_path, 100)
    for path in paths[-missing:]:
        path.unlink()
    result = verify(tmp_path)
    assert result.exit_code == 3
    assert f"{3 - missing} pass, 0 fail" in result.out
    assert f"its log goes on in segment {3 - missing}, which is not here" in result.err


def test_requests_lost_whole_in_a_log_that_is_not_closed_rule_out_exit_code_0(tmp_path, verify):
    book = three_requests()
    now = book.proxy[-1].ts
    before = Gap(ts=now - 95, reason="paused", count=0, no_request=True)  # else it might be of the first one
    gap = Gap(ts=now - 90, reason="queue full", count=6)
    book.proxy = [record for record in book.proxy if getattr(record, "capture", 0) != 2]
    at = next(n for n, record in enumerate(book.proxy) if getattr(record, "capture", 0) == 3)
    book.proxy[at:at] = [before, gap]
    result = verify(book.write(tmp_path, close=False))
    assert "2 pass, 0 fail" in result.out
    assert result.exit_code == 3


def test_a_copy_that_holds_more_than_the_one_that_was_read_is_not_passed_over_in_silence(tmp_path, verify):
    folder = three_requests().write(tmp_path)
    whole = folder / "proxy-h-1-1.jsonl"
    early = folder / "a-copy-of-proxy.jsonl"
    early.write_bytes(whole.read_bytes())
    assert verify(folder).exit_code == 0
    early.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:7]))
    result = verify(folder)
    assert result.exit_code == 3
    assert "it holds more than the copy that was read" in result.err
    assert "it is empty" not in result.err


def test_wherever_the_engines_log_is_cut_nothing_fails(tmp_path, verify):
    book = Logbook()
    for number in range(1, 4):
        book.exchange([HELLO, WORLD, EOS], TEXT, name=f"chatcmpl-{number}", usage=3)
    folder = book.write(tmp_path)
    engine = folder / "engine-h-2-1.jsonl"
    lines = engine.read_bytes().splitlines(keepends=True)
    for count in range(len(lines) - 1):
        engine.write_bytes(b"".join(lines[:count]))
        assert verify(folder).exit_code == 3, count


def test_wherever_the_log_of_a_proxy_that_all_requests_pass_is_cut_nothing_fails(tmp_path, verify):
    book = Logbook()
    opening = book.proxy[0]
    assert isinstance(opening, LogOpen)
    book.proxy[0] = msgspec.structs.replace(opening, scope=msgspec.structs.replace(opening.scope, exclusive=True))
    for number in range(1, 4):
        book.exchange([HELLO, WORLD, EOS], TEXT, name=f"chatcmpl-{number}", usage=3)
    folder = book.write(tmp_path)
    proxy = folder / "proxy-h-1-1.jsonl"
    lines = proxy.read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        proxy.write_bytes(b"".join(lines[:count]))
        assert verify(folder).exit_code in (0, 3), count


def two_engines() -> tuple[Logbook, Logbook]:
    """That serve one model; the proxy of the second saw its requests while the first engine's log went on."""
    first, second = Logbook(), Logbook()
    for number in range(1, 4):
        second.exchange([HELLO, WORLD, EOS], TEXT, name=f"chatcmpl-{number}", usage=3)
    second.engine[0] = msgspec.structs.replace(second.engine[0], pid=77)
    first.now += 100
    first.exchange([HELLO, WORLD, EOS], TEXT, name="chatcmpl-9", usage=3)
    first.proxy[1:], second.proxy[1:] = [*second.proxy[1:], *renumbered(first.proxy[1:])], []
    return first, second


def renumbered(records: list[AnyRecord]) -> list[AnyRecord]:
    return [msgspec.structs.replace(record, capture=9) for record in records if hasattr(record, "capture")]


@pytest.mark.parametrize("loss", ["gap", "segment", "line", "end", "sampled"])
def test_what_one_of_several_engines_lost_is_no_fault_because_another_lost_nothing(tmp_path, verify, loss):
    first, second = two_engines()
    lost = [record for record in second.engine if of_request(record, 2)]
    at = second.engine.index(lost[0])
    if loss == "gap":
        second.engine[at : at + len(lost)] = [Gap(ts=lost[-1].ts, reason="queue full", count=len(lost))]
    elif loss == "end":
        second.engine[at:] = []
    elif loss == "sampled":
        opening = second.engine[0]
        assert isinstance(opening, LogOpen)
        second.engine[0] = msgspec.structs.replace(opening, scope=msgspec.structs.replace(opening.scope, sample=0.5))
        second.engine[at : at + len(lost)] = []
    paths = cut(second.engine, tmp_path, len(lost), closed=loss != "end")
    for path in paths:
        path.rename(path.with_name("second-" + path.name))
    if loss == "segment":
        (tmp_path / f"second-{paths[1].name}").unlink()
    elif loss == "line":
        path = tmp_path / f"second-{paths[1].name}"
        path.write_bytes(b"".join(x for x in path.read_bytes().splitlines(keepends=True) if b"request_added" not in x))
    cut(first.proxy, tmp_path, 100)
    cut(first.engine, tmp_path, 100)
    found = verdicts(verify(tmp_path, "--json"))
    assert found["chatcmpl-9"] == "pass"
    assert found["chatcmpl-2"] == "incomplete"
    assert "fail" not in found.values()


def test_a_reply_that_no_engine_knows_is_a_fault_where_the_logs_of_all_are_whole(tmp_path, verify):
    first, second = two_engines()
    second.engine = [record for record in second.engine if not of_request(record, 2)]
    for path in cut(second.engine, tmp_path, 100):
        path.rename(path.with_name("second-" + path.name))
    cut(first.proxy, tmp_path, 100)
    cut(first.engine, tmp_path, 100)
    assert codes(verify(tmp_path, "--json"), "chatcmpl-2") == ("fail", {"ORPHAN_CAPTURE"})


@pytest.mark.parametrize("side", ["proxy", "engine"])
def test_a_segment_whose_end_was_cut_off_lost_what_it_may_have_held(tmp_path, verify, side):
    book = three_requests()
    opening = book.proxy[0]
    assert isinstance(opening, LogOpen)
    book.proxy[0] = msgspec.structs.replace(opening, scope=msgspec.structs.replace(opening.scope, exclusive=True))
    cut_up, whole = (book.proxy, book.engine) if side == "proxy" else (book.engine, book.proxy)
    paths = cut(cut_up, tmp_path, 6, closed=False)
    cut(whole, tmp_path, 100)
    lines = paths[1].read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines) - 1):
        paths[1].write_bytes(b"".join(lines[:count]))
        result = verify(tmp_path, "--json")
        assert result.exit_code == 3, count
        assert "fail" not in verdicts(result).values(), count
