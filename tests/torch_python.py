"""Run code by the Python that has torch and transformers: vLLM's. Without it the test is skipped."""

import atexit
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tests.vllm_server import vllm_environment, vllm_model

ROOT = Path(__file__).parent.parent
TINY = Path(os.environ.get("SPARSEETY_TEST_TINY", ROOT / ".tiny-models"))


def run(*arguments: str, cwd: Path | None = None, **variables: str) -> str:
    """Run `python ARGUMENTS` there; returns what it printed to stdout."""
    binaries = vllm_environment() / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_HOOK_")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": f"{binaries}{os.pathsep}{environment.get('PATH', '')}"}
    done = subprocess.run(
        [str(binaries / "python"), *arguments],
        env=environment | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def answer(*arguments: str, cwd: Path | None = None, **variables: str) -> Any:
    """The same; returns the JSON in the last line that is one."""
    return last_json(run(*arguments, cwd=cwd, **variables))


def last_json(printed: str) -> Any:
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith(("{", "["))))


_SERVE = """
import json, os, sys, traceback, warnings
warnings.simplefilter("ignore")
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a program prints is no reply
import torch, transformers
for line in sys.stdin:
    space = {"json": json, "torch": torch}
    try:
        exec(json.loads(line), space)
        reply = {"found": space["found"]}
    except Exception:
        reply = {"error": traceback.format_exc()}
    print(json.dumps(reply), file=replies, flush=True)
"""


@cache
def _interpreter() -> subprocess.Popen[str]:
    """One for all programs: importing transformers takes seconds."""
    process = subprocess.Popen(
        [str(vllm_environment() / "bin/python"), "-c", _SERVE],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    return process


def evaluate(code: str) -> Any:
    """Run a program that puts what it found into `found`. Others run before it there, so it leaves things as it found
    them."""
    process = _interpreter()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(code) + "\n")
    process.stdin.flush()
    reply = json.loads(process.stdout.readline())
    assert "error" not in reply, reply["error"]
    return reply["found"]


@cache
def tiny(name: str) -> Path:
    """The folder of a tiny model of tests/tiny_models.py, made when it is first asked for."""
    run(str(ROOT / "tests/tiny_models.py"), str(TINY), str(vllm_model()), name)
    return TINY / name
