"""The entry point that vLLM calls, each time in a process of its own, with the stand-in of tests/fake_vllm as vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparseety.records import AnyRecord, LogClose, LogOpen, Step
from tests.hook_fakes import FAKE_VLLM, records

ROOT = Path(__file__).parent.parent

SERVE = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
from sampler_hook import register
register()
register()
from tests.hook_fakes import config
from vllm.v1.core.sched.scheduler import ModelRunnerOutput, Scheduler
from vllm.v1.request import EngineCoreRequest, Request

def serve(end=True):
    scheduler = Scheduler(config())
    request = Request.from_engine_core_request(EngineCoreRequest("chatcmpl-a-0a1b2c3d", "chatcmpl-a", [1]), None)
    scheduler.add_request(request)
    scheduled = scheduler.schedule()
    scheduler.update_from_output(scheduled, ModelRunnerOutput([[20]], {request.request_id: 0}))
    print("served", request.output_token_ids)
    if end:
        scheduler.shutdown()
    return scheduler
"""


def run(code: str, folder: Path | None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_HOOK_")}
    environment |= {"PYTHONPATH": f"{FAKE_VLLM}{os.pathsep}{ROOT}"} | variables
    if folder:
        environment["SPARSEETY_HOOK_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def tokens(found: list[AnyRecord]) -> list[list[int]]:
    return [row.ids for record in found if isinstance(record, Step) for row in record.rows]


def test_importing_the_plugin_loads_the_standard_library_msgspec_and_sparseety_only() -> None:
    code = """
import sys
before = set(sys.modules)
import sampler_hook
import sampler_hook.recorder
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(*loaded)
"""
    loaded = run(code, None).stdout.split()
    # msgspec takes typing_extensions where there is one; __mp_main__ is multiprocessing's name for the program itself.
    assert set(loaded) - {"typing_extensions", "__mp_main__"} == {"msgspec", "sampler_hook", "sparseety"}


def test_registered_twice_it_records_once(tmp_path: Path) -> None:
    done = run(SERVE + "serve()", tmp_path)
    assert done.stdout == "served [20]\n"
    assert tokens(records(tmp_path)) == [[20]]


def test_two_copies_of_the_plugin_in_one_process_record_once(tmp_path: Path) -> None:
    again = """
import sys
for name in [name for name in sys.modules if name.startswith("sampler_hook")]:
    del sys.modules[name]
import sampler_hook
sampler_hook.register()
serve()
"""
    run(SERVE + again, tmp_path)
    assert tokens(records(tmp_path)) == [[20]]


def test_without_a_folder_vllm_is_not_touched() -> None:
    done = run(SERVE + "serve()\nprint(hasattr(Scheduler.add_request, '__wrapped__'))", None)
    assert done.stdout == "served [20]\nFalse\n"
    assert done.stderr == ""


def test_a_process_without_a_scheduler_opens_no_log(tmp_path: Path) -> None:
    run(SERVE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_vllm_is_left_alone_and_the_one_line_says_what_to_do(tmp_path: Path) -> None:
    done = run(SERVE + "serve()", tmp_path, FAKE_VLLM_VERSION="0.99.1")
    assert done.stdout == "served [20]\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR sparseety: vLLM 0.99.1 is not one that this plugin was tested with (")
    assert line.endswith(
        "; SPARSEETY_HOOK_UNTESTED=1 makes it work with it all the same; vLLM serves, nothing is captured"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.32.1rc1", "0.32.0+cpu", "0.32"])
def test_any_build_of_a_tested_release_will_do(tmp_path: Path, version: str) -> None:
    assert run(SERVE + "serve()", tmp_path, FAKE_VLLM_VERSION=version).stderr == ""
    assert tokens(records(tmp_path)) == [[20]]


@pytest.mark.parametrize("version", ["0.3.2", "0.320.0", "1.0.32", "dev", ""])
def test_a_version_that_only_resembles_a_tested_one_will_not_do(tmp_path: Path, version: str) -> None:
    assert "is not one that this plugin was tested with" in run(SERVE, tmp_path, FAKE_VLLM_VERSION=version).stderr


def test_an_unknown_vllm_is_captured_when_that_was_asked_for(tmp_path: Path) -> None:
    done = run(SERVE + "serve()", tmp_path, FAKE_VLLM_VERSION="0.99.1", SPARSEETY_HOOK_UNTESTED="1")
    assert done.stderr == ""
    assert tokens(records(tmp_path)) == [[20]]


def test_a_vllm_that_lacks_a_method_is_left_alone(tmp_path: Path) -> None:
    without = "from vllm.v1.core.sched.scheduler import Scheduler\ndel Scheduler.finish_requests\n"
    done = run(without + SERVE, tmp_path)
    assert done.stderr == (
        "ERROR sparseety: vLLM 0.32.0 lacks Scheduler.finish_requests, which capture stands on; "
        "vLLM serves, nothing is captured\n"
    )


def test_a_setting_that_cannot_be_read_is_said_and_vllm_serves(tmp_path: Path) -> None:
    done = run(SERVE + "serve()", tmp_path, SPARSEETY_HOOK_UNTESTED="perhaps")
    assert done.stdout == "served [20]\n"
    assert "SPARSEETY_HOOK_UNTESTED='perhaps' is neither yes nor no" in done.stderr


def test_the_children_of_a_server_do_not_repeat_why_nothing_is_captured(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"def work():\n    exec({SERVE + 'serve()'!r}, globals())\n")
    code = f"""
import multiprocessing, sys
sys.path.insert(0, {str(tmp_path)!r})
import worker
child = multiprocessing.get_context("spawn").Process(target=worker.work)
child.start()
child.join()
assert child.exitcode == 0
"""
    done = run(SERVE + code, tmp_path / "logs", FAKE_VLLM_VERSION="0.99.1")
    assert done.stdout == "served [20]\n"
    assert len(done.stderr.splitlines()) == 1


def test_a_program_that_just_ends_closes_its_log(tmp_path: Path) -> None:
    run(SERVE + "scheduler = serve(end=False)", tmp_path)
    assert isinstance(records(tmp_path)[-1], LogClose)


def test_a_forked_engine_has_a_log_of_its_own_and_closes_it(tmp_path: Path) -> None:
    code = """
import multiprocessing, os
child = multiprocessing.get_context("fork").Process(target=serve, args=(False,))
child.start()
child.join()
print(child.pid)
"""
    done = run(SERVE + code, tmp_path)
    found = records(tmp_path)
    assert isinstance(found[0], LogOpen)
    assert found[0].pid == int(done.stdout.splitlines()[-1])
    assert isinstance(found[-1], LogClose)
    assert tokens(found) == [[20]]


def test_a_worker_forked_from_an_engine_does_not_end_the_engines_log(tmp_path: Path) -> None:
    code = """
import os, sys
scheduler = serve(end=False)
if os.fork() == 0:
    sys.exit()  # with atexit, as a worker may
os.wait()
scheduler.shutdown()
"""
    run(SERVE + code, tmp_path)
    assert [type(record) for record in records(tmp_path)].count(LogClose) == 1
