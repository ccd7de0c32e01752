"""The demo: a model server, the proxy before it, clients; then the verdict. Once as it should be, once with a fault.

    python -m deploy.demo.run
    python -m deploy.demo.run --vllm .venv-vllm --model demo-model     a real vLLM instead of the replay; no fault

Exit code 0 when the verifier ended as it should: with 0 (all passed) after the clean run, 1 (a check failed) after the
other.
"""

import argparse
import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.demo.faults import parse_fault

ROOT = Path(__file__).parents[2]
TAIL_LINES = 25
MEANING = {0: "all passed", 1: "a check failed", 3: "nothing failed, but not all could be checked"}


class Failed(Exception):
    """The demo cannot go on. The message says which part and why."""


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """The children's: without settings of the caller that would turn the demo into something else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_")}
    return kept | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONUNBUFFERED": "1"}


@dataclass(slots=True)
class Part:
    """A program of the demo, in a process group of its own, so that its children go with it."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path

    def check(self) -> None:
        """Raises Failed when it has ended."""
        if (code := self.process.poll()) is not None:
            raise Failed(f"the {self.name} ended with exit code {code}; the end of {self.output}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def stop(self, patience: float) -> None:
        """Ask it to end, wait, then end its whole group."""
        self._signal(signal.SIGTERM, group=False)  # its children are its own to stop first
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            say(f"the {self.name} did not stop within {patience:.0f} s; it is killed")
        self._signal(signal.SIGKILL, group=True)
        self.process.wait()

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                self.process.send_signal(number)


@contextlib.contextmanager
def part(
    name: str, command: list[str], output: Path, extra: dict[str, str] | None = None, patience: float = 15
) -> Iterator[Part]:
    """Run a program while the block runs."""
    try:
        with output.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | (extra or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise Failed(f"cannot start the {name}: {command[0]}: {error.strerror}") from None
    running = Part(name, process, output)
    try:
        yield running
    finally:
        running.stop(patience)


def wait_for(running: Part, port: int, path: str, patience: float) -> None:
    """Until it answers with 200. Raises Failed when it ends before, or takes too long."""
    start = told = time.monotonic()
    while (now := time.monotonic()) - start < patience:
        running.check()
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
        if now - told >= 10:
            told = now
            say(f"waiting for the {running.name}, {now - start:.0f} s so far (output: {running.output})")
        time.sleep(0.1)
    raise Failed(f"the {running.name} was not ready within {patience:.0f} s; its last words:\n{running.tail()}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def program(name: str) -> str:
    """A console script of this environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise Failed(f"{path} is missing; `make install` puts it there")
    return str(path)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The model server to run."""

    name: str
    command: list[str]  # {port} and {folder} stand for what is known only when it starts
    environment: dict[str, str]
    start_patience: float
    stop_patience: float


def replaying(fault: str | None, fault_every: int) -> Upstream:
    command = [sys.executable, "-m", "deploy.demo.backend", "--port", "{port}", "--log-dir", "{folder}"]
    if fault:
        command += ["--fault", fault, "--fault-every", str(fault_every)]
    return Upstream("demo backend", command, {}, 30, 15)


def real_vllm(venv: Path, model: Path) -> Upstream:
    vllm = venv.absolute() / "bin" / "vllm"
    for path in (vllm, model):
        if not path.exists():
            raise Failed(f"{path} is missing; `make demo-vllm` installs it")
    command = [str(vllm), "serve", str(model.absolute()), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--served-model-name", "SmolLM2-135M-Instruct", "--max-model-len", "2048", "--enforce-eager"]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Upstream("vLLM", command, env | {"SPARSEETY_HOOK_DIR": "{folder}"}, 600, 60)


def capture(upstream: Upstream, folder: Path, *, broken_replies: bool) -> None:
    """Serve, drive, stop: afterwards `folder` holds both logs. Raises Failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    port, proxy_port, admin_port = free_ports(3)
    command = [word.format(port=port, folder=folder) for word in upstream.command]
    extra = {name: value.format(folder=folder) for name, value in upstream.environment.items()}
    url = f"http://127.0.0.1:{port}"
    listen, admin = f"127.0.0.1:{proxy_port}", f"127.0.0.1:{admin_port}"
    proxy_command = [program("sparseety-proxy"), "--listen", listen, "--admin", admin]
    proxy_command += ["--upstream", url, "--log-dir", str(folder)]
    with contextlib.ExitStack() as stack:
        output = folder / "upstream.log"
        serving = part(upstream.name, command, output, extra, upstream.stop_patience)
        wait_for(stack.enter_context(serving), port, "/health", upstream.start_patience)
        proxy = stack.enter_context(part("proxy", proxy_command, folder / "proxy.log"))
        wait_for(proxy, proxy_port, "/v1/models", 30)
        drive_command = [sys.executable, "-m", "deploy.demo.drive", f"http://127.0.0.1:{proxy_port}/v1"]
        code = run(drive_command, "clients", 600)
        proxy.check()
        if code > (1 if broken_replies else 0):
            raise Failed(f"the clients ended with exit code {code}")
        # Leaving the block stops the proxy first, then the server: nothing is cut off by it.


def run(command: list[str], name: str, patience: float) -> int:
    """Run a program to its end, with its output on ours. Raises Failed when it takes too long."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        raise Failed(f"the {name} took longer than {patience:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge(folder: Path, expected: int) -> bool:
    # Relative, so that the places it names are short.
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    code = run([program("verify-tokens"), "--show-text", str(shown)], "verifier", 300)
    if code != expected:
        say(f"NOT AS EXPECTED: verify-tokens ended with exit code {code}, not {expected}; logs: {folder}")
        return False
    say(f"as expected: exit code {code} ({MEANING[code]}); logs: {folder}")
    return True


def demo(options: argparse.Namespace) -> bool:
    logs: Path = options.logs.absolute()
    if options.vllm:
        say("a real vLLM samples, the proxy watches the wire, and the verifier compares")
        capture(real_vllm(options.vllm, options.model), logs / "vllm", broken_replies=False)
        return judge(logs / "vllm", 0)
    say("1 of 2: an untouched reply is proved to be the text of the sampled ids")
    capture(replaying(None, 1), logs / "clean", broken_replies=False)
    clean = judge(logs / "clean", 0)
    say(f"2 of 2: the same traffic, with the fault {options.fault} in one reply")
    capture(replaying(options.fault, options.fault_every), logs / "fault", broken_replies=True)
    expected = 3 if options.fault.startswith("die") else 1  # what died is nobody's lie: no failure, but incomplete
    return judge(logs / "fault", expected) and clean


def fault_name(text: str) -> str:
    try:
        parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--logs", type=Path, default=ROOT / "demo-logs", help="its sub-folders are made anew")
    parser.add_argument(
        "--fault", type=fault_name, default="alter", metavar="KIND[@N]", help="see backend.py (default: %(default)s)"
    )
    parser.add_argument("--fault-every", type=int, default=25, metavar="M", help="which request has it (%(default)s)")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="environment with a real vLLM and the plugin")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model it is to serve")
    options = parser.parse_args(arguments)
    if (options.vllm is None) != (options.model is None):
        parser.error("--vllm and --model go together")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every part is stopped on the way out
    try:
        return 0 if demo(options) else 1
    except Failed as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
