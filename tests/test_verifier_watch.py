"""`verify-tokens --watch`: logs that grow, rotate, are packed and deleted; restarts; metrics; the end by a signal."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs
from sparseety.logwriter import LogWriter
from sparseety.records import Gap, RequestFinished, Scope
from sparseety.segments import Rotation
from tests.logbook import EOS, WAIT, Logbook, until
from tests.test_verifier_run import HELLO, WORLD
from tests.test_verifier_segments import cut
from verifier.executor import Inline
from verifier.findings import RequestVerdict, Verdict
from verifier.known import load_known
from verifier.run import verify
from verifier.tokenizer import TokenizerShelf
from verifier.watch import Watch

SHELF = TokenizerShelf([])


NOW = 1044.2  # a bit after the last record of `traffic`


def watching(folder: Path, now: Callable[[], float] = lambda: NOW) -> "contextlib.closing[Watch]":
    return contextlib.closing(Watch([str(folder)], SHELF, Inline(), folder / "verify-tokens.checkpoint", now=now))


def polled(watch: Watch, times: int = 3) -> list[RequestVerdict]:
    return [verdict for _ in range(times) for verdict in watch.poll()]


def brief(verdicts: list[RequestVerdict]) -> list[tuple[str | None, str, str, list[str]]]:
    return sorted(
        (one.uuid or one.request_id, one.request_id, one.verdict.value, [f.code for f in one.findings])
        for one in verdicts
    )


def traffic() -> Logbook:
    """Eight requests, one of them wrong, some with ids that come twice; and a client that left early."""
    book = Logbook()
    for number in range(8):
        text = " wOrld" if number == 3 else " world"
        book.exchange([HELLO, WORLD, EOS], ["hello", text], name=f"chatcmpl-{number % 6}", usage=3)
        book.now += 5
    book.stream(None, [], finish=None, outcome="client_gone", end_marker=False)
    book.engine_request("chatcmpl-left", [HELLO], finish="abort")
    assert NOW - 3.5 < book.now < NOW - 3
    return book


class Grown:
    """A folder into which finished files grow byte by byte, those of one writer one after the other."""

    def __init__(self, folder: Path, whole: Path) -> None:
        self.folder = folder
        self._files = {
            source: [(path.name, path.read_bytes()) for path in sorted(whole.glob(f"{source}-*"))]
            for source in ("proxy", "engine")
        }
        self._at = dict.fromkeys(self._files, 0)

    def grow(self, source: str, size: int) -> None:
        begin, end = self._at[source], self._at[source] + size
        self._at[source], offset = end, 0
        for name, data in self._files[source]:
            part = data[max(0, begin - offset) : max(0, end - offset)]
            if part:
                with (self.folder / name).open("ab") as file:
                    file.write(part)
            offset += len(data)

    def finish(self) -> None:
        for source in self._files:
            self.grow(source, 1 << 20)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.sampled_from(["proxy", "engine"]), st.integers(1, 3000), st.booleans()), max_size=12),
    segment=st.integers(3, 40),
)
def test_however_logs_grow_and_a_watch_is_restarted_each_request_is_judged_once_and_as_in_one_run(
    tmp_path_factory, sizes, segment
):
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("logs")
    book = traffic()
    cut(book.proxy, whole, segment)
    cut(book.engine, whole, segment)
    expected = verify(sorted(whole.iterdir()), SHELF)
    grown, found = Grown(folder, whole), []
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(watching(folder))
        for source, size, restart in sizes:
            grown.grow(source, size)
            found += polled(watch, 1)
            if restart:
                watch.save()
                watch = stack.enter_context(watching(folder))
        grown.finish()
        found += polled(watch, 4)
        assert brief(found) == brief(expected.verdicts)
        assert watch.totals == expected.totals
        assert watch.open == 0
        watch.save()
        stack.enter_context(watching(folder)).save()  # and killed before it has read anything
        assert polled(stack.enter_context(watching(folder))) == []  # nothing twice


def test_what_was_judged_and_not_saved_is_judged_again_and_counted_once(tmp_path):
    with watching(traffic().write(tmp_path)) as watch:
        watch.save()
        first = polled(watch)  # and then it is killed
    (tmp_path / "verify-tokens.checkpoint").unlink()
    with watching(tmp_path) as again:
        assert brief(polled(again)) == brief(first)
        assert again.totals == watch.totals


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[tuple[Path, LogWriter, LogWriter]]:
    folder = tmp_path / "logs"
    rotation = Rotation(segment_bytes=2000, min_free_bytes=0)
    clock = monotonic_clock()
    writers = [
        LogWriter(folder, source, Scope(), clock=clock, rotation=rotation, flush_seconds=0.01)
        for source in ("proxy", "engine")
    ]
    yield (folder, *writers)
    for writer in writers:
        writer.close()


def serve(book: Logbook, proxy: LogWriter, engine: LogWriter) -> None:
    """Write what a book holds, as of now."""
    now = time.time()
    for records, writer in ((book.proxy, proxy), (book.engine, engine)):
        for record in records[1:]:
            writer.put(msgspec.structs.replace(record, ts=now + (record.ts - 1000) / 1000))


def test_segments_that_are_packed_while_they_are_read_cost_nothing(logs):
    folder, proxy, engine = logs
    book = Logbook()
    for number in range(60):
        book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name=f"chatcmpl-{number}", usage=3)
    serve(book, proxy, engine)
    found: list[RequestVerdict] = []
    with watching(folder, now=lambda: time.time() + 10) as watch:

        def judged() -> bool:
            found.extend(watch.poll())
            return len(found) >= 60

        until(judged)
        until(lambda: len(list(folder.glob("*.zst"))) > 3)
        assert {one.verdict.value for one in found} == {"pass"}
        assert watch.open == 0
        watch.save()
    with watching(folder) as watch:
        assert polled(watch) == []


def test_a_watch_goes_on_in_a_segment_that_was_packed_in_the_meantime(tmp_path):
    book = traffic()
    folder = book.write(tmp_path)
    proxy = folder / "proxy-h-1-1.jsonl"
    data = proxy.read_bytes()
    proxy.write_bytes(data[: len(data) // 2])
    with watching(folder) as watch:
        first = polled(watch)
        watch.save()
    proxy.with_name(proxy.name + ".zst").write_bytes(zstandard.compress(data))
    proxy.unlink()
    with watching(folder) as watch:
        second = polled(watch)
        totals = watch.totals
    assert first
    assert {one.uuid for one in first}.isdisjoint(one.uuid for one in second)
    assert totals == verify([path for path in folder.iterdir() if "jsonl" in path.name], SHELF).totals


def test_segments_that_the_cap_deletes_unread_leave_their_requests_incomplete_not_failed(tmp_path):
    book = traffic()
    paths = cut(book.proxy, tmp_path, 8)
    cut(book.engine, tmp_path, 100)
    for path in paths[1:3]:
        path.unlink()
    with watching(tmp_path) as watch:
        found = {one.verdict.value for one in polled(watch) if one.request_id != "chatcmpl-3"}
    assert "fail" not in found
    assert "incomplete" in found


def test_requests_of_a_writer_that_was_killed_do_not_stay_in_memory(tmp_path):
    book = traffic()
    book.proxy = book.proxy[:-3]  # the last one has not ended
    book.engine = [record for record in book.engine if not isinstance(record, RequestFinished)]
    with watching(book.write(tmp_path, close=False), now=lambda: time.time() + 7200) as watch:
        found = polled(watch)
        assert watch.open == 0
    assert len(found) >= 8
    assert "fail" not in {one.verdict.value for one in found if one.request_id != "chatcmpl-3"}


def test_what_an_engine_lost_is_known_after_a_restart(tmp_path):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"])
    book.now += 10
    at = len(book.engine)
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name="chatcmpl-2")
    lost, book.engine[at:] = book.engine[at:], []
    book.engine.append(Gap(ts=book.now, reason="queue full", count=len(lost)))
    book.now += 10
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name="chatcmpl-3")
    book.write(tmp_path, close=False)
    with watching(tmp_path, now=lambda: book.now + 5) as watch:
        assert "chatcmpl-2" not in {one.request_id for one in polled(watch)}, "it waits for a minute"
        watch.save()
    with watching(tmp_path, now=lambda: book.now + 100) as watch:
        [one] = polled(watch)
    assert (one.request_id, one.verdict.value) == ("chatcmpl-2", "incomplete")


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("damage", ["taken out", "unusable"])
def test_lines_that_are_missing_rule_out_exit_code_0(tmp_path, damage, restart):
    book = traffic()
    folder = book.write(tmp_path, close=damage == "taken out")
    proxy = folder / "proxy-h-1-1.jsonl"
    lines = proxy.read_bytes().splitlines(keepends=True)
    last = [number for number, line in enumerate(lines) if b'"capture":9' in line]
    lines[last[0] : last[-1] + 1] = [] if damage == "taken out" else [b'{"event":\n']
    proxy.write_bytes(b"".join(lines))
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(watching(folder))
        polled(watch)
        if restart:
            watch.save()
            watch = stack.enter_context(watching(folder, now=lambda: NOW + 5000))
        polled(watch)
        watch.totals.verdicts.pop("fail")  # the one that is wrong
        assert watch.exit_code(1.0) == 3


def test_logs_that_are_gone_with_requests_in_them_rule_out_exit_code_0(tmp_path):
    book = traffic()
    book.proxy = [record for record in book.proxy if getattr(record, "capture", 0) != 4]
    book.proxy.pop()  # the end of the last one
    folder = book.write(tmp_path, close=False)
    with watching(folder) as watch:
        polled(watch)
        assert watch.open == 1
        watch.save()
    (folder / "proxy-h-1-1.jsonl").unlink()
    with watching(folder, now=lambda: NOW + 5000) as watch:
        polled(watch)
        assert any("it is gone, with 1 request" in note for note in watch.take_notes())
        assert not watch.whole


def test_a_copy_beside_a_log_that_grows_does_not_end_it(tmp_path):
    book = traffic()
    folder = book.write(tmp_path)
    proxy = folder / "proxy-h-1-1.jsonl"
    data = proxy.read_bytes()
    proxy.write_bytes(data[: len(data) // 2])
    with watching(folder) as watch:
        polled(watch)
        (folder / "proxy-copy.jsonl").write_bytes(data[: len(data) // 3])
        polled(watch)
        proxy.write_bytes(data)
        polled(watch)
        assert any("a copy of what is read already" in note for note in watch.take_notes())
        assert watch.totals == verify([proxy, folder / "engine-h-2-1.jsonl"], SHELF).totals


def test_a_waiver_expires_while_a_watch_runs(tmp_path):
    book = traffic()
    folder = book.write(tmp_path / "logs")
    known = tmp_path / "known.toml"
    known.write_text('[[known]]\nclass = "ALTERED_TEXT"\nreference = "ticket 7"\nexpires = 1969-12-31\n')
    waivers = load_known(known, date(1969, 12, 31))  # that day the watch began
    checkpoint = tmp_path / "checkpoint"
    with contextlib.closing(Watch([str(folder)], SHELF, Inline(), checkpoint, known=waivers, now=lambda: NOW)) as watch:
        polled(watch)
        assert watch.exit_code(1.0) == 1


def test_a_segment_that_is_begun_while_the_one_before_is_read_is_waited_for(tmp_path):
    book = traffic()
    paths = cut(book.proxy, tmp_path, 20)
    cut(book.engine, tmp_path, 100)
    later = {path: path.read_bytes() for path in paths[1:]}
    for path in later:
        path.unlink()
    with watching(tmp_path, now=lambda: time.time() + 7200) as watch:
        found = polled(watch, 1)  # that which comes next was not there when this began
        for path, data in later.items():
            path.write_bytes(data)
        found += polled(watch)
        assert watch.exit_code(1.0) == 1, "one is wrong"
        assert watch.whole
        assert watch.logs.whole_so_far
    assert "open" not in {one.verdict.value for one in found}


def test_a_segment_that_should_follow_and_never_comes_rules_out_exit_code_0(tmp_path):
    book = traffic()
    book.proxy = [record for record in book.proxy if getattr(record, "capture", 0) != 4]
    for path in cut(book.proxy, tmp_path, 40)[1:]:
        path.unlink()
    cut(book.engine, tmp_path, 100)
    with watching(tmp_path, now=lambda: time.time() + 7200) as watch:
        polled(watch)
        assert watch.exit_code(1.0) == 3
        assert any("goes on in segment 1, which is not here" in note for note in watch.take_notes())


@pytest.mark.parametrize("named", ["files", "glob", "folder"])
def test_what_a_watch_was_told_to_follow_may_go_away(tmp_path, named):
    folder = traffic().write(tmp_path / "logs")
    files = sorted(folder.iterdir())
    arguments = {"files": [str(file) for file in files], "glob": [f"{folder}/*.jsonl"], "folder": [str(folder)]}[named]
    checkpoint = tmp_path / "checkpoint"
    with contextlib.closing(Watch(arguments, SHELF, Inline(), checkpoint, now=lambda: NOW)) as watch:
        found = polled(watch, 1)
        for file in files:
            file.unlink()
        if named == "folder":
            folder.rmdir()
        found += polled(watch)
        assert len(found) == 10


def test_a_checkpoint_that_is_damaged_is_named_and_nothing_is_counted(tmp_path):
    (tmp_path / "verify-tokens.checkpoint").write_bytes(b'{"format":')
    with pytest.raises(SparseetyError, match="no checkpoint"):
        watching(tmp_path)


def samples_at(url: str) -> dict[str, str]:
    page = urllib.request.urlopen(url, timeout=WAIT).read().decode()
    return dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))


def test_the_command_follows_prints_serves_metrics_and_ends_on_sigterm_with_what_was_found(logs):
    folder, proxy, engine = logs
    command = [sys.executable, "-m", "verifier.cli", "--watch", str(folder), "--metrics-port", "0", "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split()[-1]
        book = Logbook()
        book.exchange([HELLO, WORLD, EOS], ["hello", " world"], usage=3)
        book.exchange([HELLO, WORLD, EOS], ["hello", " wOrld"], name="chatcmpl-2")
        serve(book, proxy, engine)
        assert "chatcmpl-2  FAIL        ALTERED_TEXT at token 1, chunk 2" in process.stdout.readline()
        until(lambda: samples_at(url)["sparseety_verify_backlog_requests"] == "0.0")  # it is said once a look is over
        samples = samples_at(url)
        assert samples['sparseety_verify_requests_total{model_name="toy",verdict="fail"}'] == "1.0"
        assert samples['sparseety_verify_requests_total{model_name="toy",verdict="pass"}'] == "1.0"
        failed = 'sparseety_verify_findings_total{code="ALTERED_TEXT",model_name="toy",severity="error"}'
        assert samples[failed] == "1.0"
        assert samples['sparseety_verify_tokens_total{model_name="toy",result="match"}'] == "5.0"
        assert samples['sparseety_verify_tokens_total{model_name="toy",result="mismatch"}'] == "1.0"
        assert samples['sparseety_join_requests_total{result="both"}'] == "2.0"
        assert samples["sparseety_verify_duration_seconds_count"] == "2.0"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 1
    assert out.splitlines()[-1] == "2 requests: 1 pass, 1 fail, 0 incomplete; 6 of 6 tokens checked"
    assert "Traceback" not in err
    assert json.loads((folder / "verify-tokens.checkpoint").read_bytes())["totals"]["verdicts"] == {
        "pass": 1,
        "fail": 1,
    }


def test_a_run_that_keeps_no_verdicts_on_passes_has_the_same_sums(tmp_path):
    traffic().write(tmp_path)
    files = find_logs([str(tmp_path)])
    kept, summed = verify(files, SHELF), verify(files, SHELF, passes=False)
    assert len(summed.passes) == 7
    assert summed.totals == kept.totals
    assert summed.verdicts == [verdict for verdict in kept.verdicts if verdict.verdict is not Verdict.PASS]
