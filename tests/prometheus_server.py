"""A real Prometheus with the shipped configuration and rules: on the loopback interface, other targets in the place of
the shipped ones, and time running faster by dividing the durations in a copy of the rules."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.prometheus_binaries import binary

SHIPPED = Path(__file__).parent.parent / "deploy/prometheus"
DASHBOARDS = SHIPPED.parent / "grafana/dashboards"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass
class Prometheus:
    url: str

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series, now; those that are not a number left out."""
        found = self._get(f"/api/v1/query?query={urllib.parse.quote(query)}")["result"]
        pairs = [(each["metric"], float(each["value"][1])) for each in found]
        return [(labels, value) for labels, value in pairs if value == value]

    def number(self, query: str) -> float | None:
        """Of the one series that it has, or None."""
        found = self.ask(query)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {
            each["labels"]["alertname"] for each in self._get("/api/v1/alerts")["alerts"] if each["state"] == "firing"
        }

    def fired(self, seconds: int) -> set[str]:
        """Names of the alerts that have fired at some moment of so many seconds."""
        found = self.ask(f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds}s])')
        return {labels["alertname"] for labels, _ in found}

    def rules(self) -> list[dict[str, Any]]:
        """What it knows of each rule."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as reply:
            return json.load(reply)["data"]


def until(condition: Callable[[], Any], seconds: float, what: Callable[[], object] = lambda: "") -> Any:
    """What the condition gives, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {what()}"
        time.sleep(0.3)
    return found


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: dict[str, list[str]], faster: int = 1, interval: str = "1s"
) -> Iterator[Prometheus]:
    """targets: by job, in the place of the shipped ones. faster: what durations of the rules are divided by."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SHIPPED / "rules", folder / "rules")
    for path in (folder / "rules").iterdir():
        path.write_text(_quickened(path.read_text(), faster))
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job.pop("authorization", None)  # nothing asks for a token on the loopback interface
        job["static_configs"] = [{"targets": targets.pop(job["job_name"], [])}]
    assert not targets, f"no jobs of these names: {targets}"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [binary("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        until(lambda: _ready(server, process), 30, (folder / "output.txt").read_text)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def panel_queries(window: str) -> dict[str, list[str]]:
    """PromQL of each panel of each dashboard, all variables at All; window: instead of $__rate_interval."""
    found: dict[str, list[str]] = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$__rate_interval", window)
                found.setdefault(f"{path.stem}: {panel['title']}", []).append(re.sub(r'"\$\w+"', '".*"', query))
    return found


def _ready(server: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "prometheus ended"
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def _quickened(rules: str, faster: int) -> str:
    """`for`, intervals, offsets, windows, and the seconds that a time is compared with. Two scrapes need two seconds,
    and a rate's window four."""

    def shorter(least: int, found: re.Match[str]) -> str:
        seconds = int(found[2]) * _SECONDS[found[3] or "s"]
        return f"{found[1]}{max(least, seconds // faster)}{'s' if found[3] else ''}"

    rules = re.sub(r"((?:for|interval): |offset )(\d+)([smhd])", partial(shorter, 2), rules)
    rules = re.sub(r"(\[)(\d+)([smhd])(?=\])", partial(shorter, 4), rules)
    return re.sub(r"(time\(\)[^\n]*\n\s*> )(\d+)()", partial(shorter, 2), rules)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
