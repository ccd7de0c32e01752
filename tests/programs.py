"""Our programs as processes of their own, on ports that stay the same when they are started again."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "deploy/demo/tokenizer"


@dataclass
class Program:
    """Can be started, killed and started again."""

    command: list[str]
    output: Path
    port: int  # where it listens when it is ready
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                cwd=ROOT,
                env=dict(os.environ),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, self.output.read_text(errors="replace")
            time.sleep(0.1)
        raise AssertionError(f"{self.command[0]} did not come up:\n{self.output.read_text(errors='replace')}")

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """It and its children; with SIGKILL at once."""
        if self.process is None:
            return
        if with_signal is not signal.SIGKILL:
            self.process.send_signal(with_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.process = None


def backend(folder: Path, port: int) -> Program:
    command = ["deploy.demo.backend", "--port", str(port), "--log-dir", str(folder / "logs")]
    return Program(command, folder / "backend.txt", port)


def proxy(folder: Path, port: int, admin: int, upstream: int, *options: str) -> Program:
    command = ["proxy.cli", "--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    command += ["--upstream", f"http://127.0.0.1:{upstream}", "--log-dir", str(folder / "logs"), *options]
    return Program(command, folder / "proxy.txt", port)


def watch(folder: Path, metrics: int, *options: str) -> Program:
    command = ["verifier.cli", "--watch", str(folder / "logs"), "--metrics-port", str(metrics), *options]
    return Program(command, folder / "watch.txt", metrics)


@dataclass
class Traffic:
    """Short streams, one after the other, as long as it is told."""

    port: int
    model: str
    sent: int = 0
    broken: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def request(self) -> None:
        body = {"model": self.model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8}
        self.sent += 1
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            with contextlib.closing(connection):
                connection.request(
                    "POST",
                    "/v1/chat/completions",
                    json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}),
                    {"Content-Type": "application/json"},
                )
                whole = connection.getresponse().read()
            self.broken += b"[DONE]" not in whole
        except (OSError, http.client.HTTPException):
            self.broken += 1

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.request()

    @contextlib.contextmanager
    def running(self) -> Iterator["Traffic"]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
