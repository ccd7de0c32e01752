"""The proxy as a command, in a process of its own, for the tests with a real vLLM."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass
class RunningProxy:
    url: str
    admin: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


def start_proxy(folder: Path, upstream: str, logs: Path) -> RunningProxy:
    output = folder / "proxy-output.txt"
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", upstream, "--log-dir", str(logs)]
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=file, stderr=subprocess.STDOUT)
    for _ in range(300):
        text = output.read_text()
        if "Ready" in text:
            listen, admin = (re.search(rf"{name}\s+(http://\S+)", text) for name in ("listen", "admin"))
            assert listen, text
            assert admin, text
            return RunningProxy(listen[1], admin[1], process)
        assert process.poll() is None, text
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the proxy did not come up:\n{output.read_text()}")
