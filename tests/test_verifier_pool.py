"""The process pool: what dies in it, and what goes wrong in it, costs one request its verdict and no more."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from sparseety.records import EngineStart
from tests.logbook import BYTE_LEVEL, EOS, WAIT, Logbook
from tests.test_verifier_run import HELLO, WORLD, verify
from verifier.executor import LocalPool, WorkerDied
from verifier.findings import Verdict
from verifier.judging import judge_cases
from verifier.logs import Log
from verifier.packed import Case, OpenCapture
from verifier.run import verify as verify_paths
from verifier.tokenizer import Tokenizer, TokenizerShelf

__all__ = ["verify"]  # a fixture


def square(number: int) -> int:
    return number * number


def die() -> None:
    os._exit(9)


def test_tasks_beside_one_that_kills_its_process_come_back_and_the_killer_is_named():
    pool = LocalPool(2)
    try:
        before = [pool.submit(square, number) for number in range(5)]
        killer = pool.submit(die)
        after = [pool.submit(square, number) for number in range(5)]
        assert [task.result() for task in before] == [0, 1, 4, 9, 16]
        with pytest.raises(WorkerDied):
            killer.result()
        assert [task.result() for task in after] == [0, 1, 4, 9, 16]
        assert pool.submit(square, 7).result() == 49
    finally:
        pool.close()


def much() -> bytes:
    return bytes(8 << 20)


def pid(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def refuse() -> None:
    raise ValueError("as it should")


def test_what_a_task_raises_is_raised_by_who_asks_for_it():
    with contextlib.closing(LocalPool(1)) as pool, pytest.raises(ValueError, match="as it should"):
        pool.submit(refuse).result()


def test_where_no_process_can_be_started_nobody_waits_for_one(tmp_path):
    script = tmp_path / "script.py"  # without the guard that multiprocessing asks for
    script.write_text("from verifier.executor import LocalPool\nprint(LocalPool(1).submit(max, 1, 2).result())\n")
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=WAIT, env={"PYTHONPATH": "."}
    )
    assert ran.returncode != 0
    assert "bootstrapping phase" in ran.stderr or "WorkerDied" in ran.stderr


def test_a_process_that_is_killed_while_it_works_or_answers_costs_no_task_and_no_wait():
    with contextlib.closing(LocalPool(2)) as pool:
        workers = {task.result() for task in [pool.submit(pid, 0.5), pool.submit(pid, 0.5)]}
        assert len(workers) == 2
        tasks = [pool.submit(much) for _ in range(12)]
        os.kill(workers.pop(), signal.SIGKILL)
        assert {len(task.result()) for task in tasks} == {8 << 20}


@dataclass(slots=True)
class DeadlyShelf(TokenizerShelf):
    """Kills the process that asks for one tokenizer, unless it is the parent."""

    def __reduce__(self) -> tuple[type, tuple[list[Path]]]:
        return DeadlyShelf, (self.given,)

    def find(self, name: str, sha256: str | None, models: Iterable[str] = ()) -> Tokenizer:
        if name == "deadly" and multiprocessing.parent_process() is not None:
            os._exit(9)
        return TokenizerShelf.find(self, str(BYTE_LEVEL), sha256)


def test_a_request_that_kills_its_judge_is_incomplete_and_the_others_are_judged(tmp_path):
    good, bad = Logbook(), Logbook(now=2000.0)
    for book, folder in ((good, "good"), (bad, "bad")):
        for number in range(3):
            book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name=f"chatcmpl-{folder}-{number}")
    start = bad.engine[1]
    assert isinstance(start, EngineStart)
    bad.engine[1] = msgspec.structs.replace(start, tokenizer=msgspec.structs.replace(start.tokenizer, name="deadly"))
    paths = [*good.write(tmp_path / "good").iterdir(), *bad.write(tmp_path / "bad").iterdir()]
    report = verify_paths(paths, DeadlyShelf([]), jobs=2)
    assert [verdict.verdict.value for verdict in report.verdicts] == ["pass"] * 3 + ["incomplete"] * 3
    assert "was killed" in report.verdicts[-1].findings[0].detail


def test_a_bug_while_judging_one_request_leaves_it_incomplete_and_says_so(tmp_path):
    log = Log(tmp_path / "proxy.jsonl", ("proxy", "h", 1, 1.0))
    log.begin_file(log.path, 0, 0)
    broken = Case(OpenCapture(log, 1, 1, parts=[(0, b"no pickle")]))
    [verdict] = judge_cases([broken], [], TokenizerShelf([]))
    assert verdict.verdict is Verdict.INCOMPLETE
    assert "a bug in this program" in verdict.findings[0].detail


def test_jobs_are_a_number_of_processes(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"])
    folder = book.write(tmp_path)
    assert verify(folder, "--jobs", "2").exit_code == 0
    with pytest.raises(SystemExit):
        verify(folder, "--jobs", "0")
