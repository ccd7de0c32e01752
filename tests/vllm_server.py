"""A real vLLM server for the tests marked `vllm`: started as a process group, waited for, and always reaped.

SPARSEETY_TEST_VLLM names the virtual environment that has vLLM and this checkout, SPARSEETY_TEST_MODEL the folder of a
chat model.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 300.0  # a server that compiles takes 110 s on two quiet cores
STOP_SECONDS = 60.0
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


def vllm_environment() -> Path:
    """The environment's folder; without it the test is skipped."""
    return _folder("SPARSEETY_TEST_VLLM")


def vllm_model() -> Path:
    return _folder("SPARSEETY_TEST_MODEL")


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    if not Path(value).is_dir():
        pytest.fail(f"{variable}={value} is no folder")
    return Path(value).absolute()  # the server runs in a folder of its own


@dataclass
class VllmServer:
    """A running `vllm serve`. Its model is called "m"."""

    port: int
    process: subprocess.Popen[bytes]
    output: Path  # what the server printed
    exit_code: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """End the server as an operator does, then whatever of its process group is still there. Safe to call twice."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(with_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
        self.exit_code = self.process.wait(10)  # reaped first: as a zombie, it would keep its group alive
        _kill_group(self.process.pid)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


def tiny_model(folder: Path, name: str) -> Path:
    """A tiny random model, made by the Python that has vLLM."""
    python = vllm_environment() / "bin" / "python"
    command = [str(python), str(Path(__file__).parent / "tiny_models.py"), str(folder), str(vllm_model()), name]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True)
    return folder / name


@contextlib.contextmanager
def serve(
    folder: Path,
    *,
    hook_dir: Path | None,
    arguments: tuple[str, ...] = (),
    model: Path | None = None,
    hook: dict[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Run `vllm serve` on a free port until the block ends. `hook_dir`: where the plugin logs; None: it is not loaded.

    model: another than SPARSEETY_TEST_MODEL; hook: more variables of the plugin. `folder` keeps what the server prints.
    A server that does not come up fails the test with the end of that.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "VLLM_PLUGINS" and not name.startswith("SPARSEETY_HOOK_")
    }
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if hook_dir is None:
        environment["VLLM_PLUGINS"] = "none"  # a list of the plugins to load; there is none of this name
    else:
        environment |= {"SPARSEETY_HOOK_DIR": str(hook_dir)} | (hook or {})
    port = _free_port()
    binaries = vllm_environment() / "bin"
    command = [str(binaries / "vllm"), "serve", str(model or vllm_model()), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "m", "--max-model-len", "2048", "--enforce-eager", *arguments]
    environment["PATH"] = f"{binaries}{os.pathsep}{environment.get('PATH', '')}"  # it compiles with tools from there
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "vllm-output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    server = VllmServer(port, process, output)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        server.stop()


def _wait_until_healthy(server: VllmServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(f"vllm serve ended with {server.process.returncode}:\n{server.tail()}")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{server.url}/health", timeout=5) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vllm serve was not healthy after {START_SECONDS:.0f} s:\n{server.tail()}")


def _kill_group(group: int) -> None:
    """Kill what is left of a process group and wait until it is gone: workers outlive an engine that was killed."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process group {group} could not be killed")


def _free_port() -> int:
    """Any, not the first: vLLM binds with SO_REUSEPORT, so two servers started together would share it unnoticed."""
    for port in random.sample(range(8100, 8200), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port from 8100 to 8199")
