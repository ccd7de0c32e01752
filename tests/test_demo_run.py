"""The demo's clients, the handling of its programs, and the demo itself."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.demo import drive
from deploy.demo.backend import Settings, serving
from deploy.demo.faults import Fault
from deploy.demo.replay import load_streams
from deploy.demo.run import ROOT, Failed, free_ports, part, wait_for
from sparseety.logreader import find_logs, read_log
from sparseety.records import RequestAdded, RequestFinished

PARENT = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"


def test_the_clients_ask_for_all_that_the_demo_is_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Settings(log_dir=tmp_path)) as url:
        assert drive.main([f"{url}/v1"]) == 0
    assert "all ended as they should" in capsys.readouterr().err
    [path] = find_logs([str(tmp_path)])
    records = [record for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]
    added = [record for record in records if isinstance(record, RequestAdded)]
    finished = [record for record in records if isinstance(record, RequestFinished)]
    assert len(added) == len(finished) >= 40
    assert {record.external_id.startswith("cmpl-") for record in added} == {True, False}
    assert {record.child for record in added} == {0, 1}
    assert any(record.stop for record in added)
    assert {record.finish_reason for record in finished} == {"stop", "length", "abort"}
    left = next(record for record in added if "abort" in record.external_id)
    assert next(r for r in finished if r.request == left.request).finish_reason == "abort"


def test_the_clients_say_which_requests_did_not_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Settings(fault=Fault("cut"), fault_every=20)) as url:
        assert drive.main([f"{url}/v1"]) == 1
    assert capsys.readouterr().err.count("ended without a finish reason") == 2


def test_no_server_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    assert drive.main([f"http://127.0.0.1:{port}/v1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_case_has_a_name_of_its_own() -> None:
    cases = drive.make_cases(load_streams(drive.HERE / "streams.jsonl"))
    assert len({case.name for case in cases}) == len(cases) >= 36


def living_in(group: int) -> int:
    """Processes of a group, zombies aside: those are for init to collect."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, their_group, *_ = stat.read_text().rpartition(")")[2].split()
            count += state != "Z" and int(their_group) == group
    return count


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_part_is_stopped_with_all_its_children(stubborn: bool, tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    with part("server", [sys.executable, "-c", ignore + PARENT], tmp_path / "log", patience=0.5) as running:
        deadline = time.monotonic() + 10
        while "up" not in running.output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert living_in(running.process.pid) == 2
    deadline = time.monotonic() + 5
    while living_in(running.process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_part_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('I am out of memory'); raise SystemExit(7)"]
    with part("server", command, tmp_path / "log") as running:
        running.process.wait(10)
        with pytest.raises(Failed, match=r"(?s)the server ended with exit code 7.*I am out of memory"):
            wait_for(running, 1, "/", 5)


def test_a_part_that_never_answers_is_given_up(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with (
        part("server", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log") as running,
        pytest.raises(Failed, match="not ready within 0 s"),
    ):
        wait_for(running, port, "/", 0.3)


def test_a_program_that_is_not_there_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="No such file"), part("server", [str(tmp_path / "none")], tmp_path / "log"):
        pass


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.demo.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("fault", ["alter", "die"])
def test_the_demo_ends_as_it_says(fault: str, tmp_path: Path) -> None:
    result = run_demo("--logs", str(tmp_path), "--fault", fault)
    assert result.returncode == 0, result.stderr
    assert "as expected: exit code 0 (all passed)" in result.stderr
    assert f"the fault {fault} in one reply" in result.stderr
    assert result.stdout.count("FAIL") == (fault == "alter")


def test_a_fault_that_does_not_exist_is_refused_with_the_reason(tmp_path: Path) -> None:
    result = run_demo("--logs", str(tmp_path), "--fault", "typo")
    assert result.returncode == 2
    assert '"typo" is no fault' in result.stderr
    assert "1 of 2" not in result.stderr, "it says so before anything is run"


def test_a_demo_that_is_told_to_stop_takes_its_programs_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.demo.run", "--logs", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "clean").glob("engine-*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    server = int(next((tmp_path / "clean").glob("engine-*.jsonl")).name.split("-")[-2])
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, 0)
        pytest.fail("the backend is still there")
