"""Proxies side by side in front of a mock upstream: CPU, delay, memory, and whether every byte came through.

python -m benchmarks.bench [--scenarios B,C] [--rounds 3] [--only naive,ours]
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Scenario:
    load: tuple[str, ...]  # what the load generator is told
    unit: str = "events"  # what CPU is divided by

    def scaled(self, time_scale: float) -> tuple[str, ...]:
        mode, connections, length, *rest = self.load
        return mode, connections, f"{max(float(length) * time_scale, 1):.0f}", *rest


SCENARIOS = {
    "B": Scenario(("stream", "64", "500", "50")),
    "C": Scenario(("stream", "256", "240", "30")),
    "H": Scenario(("stream", "32", "2000", "500")),
    "D": Scenario(("stream", "1000", "24", "2")),
    "E": Scenario(("short", "32", "4"), "ok"),
}

# The highest rate that one core carries: 32 streams, and at least so much of it arrives, with this p99.
STEPS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 48000, 64000)
ENOUGH, LATEST_US = 0.93, 50_000


def commands(name: str, port: int, upstream: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """How a target is started: (command, environment)."""
    url = f"http://127.0.0.1:{upstream}"
    if name == "naive":
        server = ["uvicorn", "benchmarks.peers.naive:app", "--port", str(port), "--log-level", "warning"]
        server += ["--no-access-log", "--backlog", "4096", "--app-dir", str(HERE.parent)]
        return [sys.executable, "-m", *server], {"UPSTREAM": url, "LOG": str(folder / "log.jsonl")}
    if name == "nginx":
        text = (HERE / "peers" / "nginx.conf").read_text().replace("UPSTREAM", str(upstream)).replace("PORT", str(port))
        (folder / "nginx.conf").write_text(text)
        return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"], {}
    if name in ("ours", "off"):
        ours = ["--listen", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0", "--upstream", url]
        ours += ["--log-dir", str(folder)] if name == "ours" else ["--no-capture"]
        code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); from proxy.cli import main; sys.exit(main())"
        return [sys.executable, "-c", code, *ours], {}
    raise SystemExit(f"error: no target {name}; there are direct, naive, nginx, ours and off (ours without capture)")


class Target:
    def __init__(self, name: str, upstream: int, folder: Path, prefix: list[str]) -> None:
        self.name, self.process = name, None
        if name == "direct":
            self.port = upstream
            return
        self.port = free_port()
        folder.mkdir()
        command, environment = self.command(upstream, folder)
        self.output = (folder / "output").open("w")
        self.process = subprocess.Popen(
            [*prefix, *command], env=os.environ | environment, stdout=self.output, stderr=subprocess.STDOUT
        )

    def command(self, upstream: int, folder: Path) -> tuple[list[str], dict[str, str]]:
        return commands(self.name, self.port, upstream, folder)

    def cpu(self) -> float:
        """Seconds that the target's processes have used."""
        fields = [stat(pid) for pid in tree(self.process.pid)] if self.process else []
        return sum(int(value) for field in fields for value in field[11:15]) / TICK

    def memory(self) -> float:
        """Proportional set size, MB."""
        kilobytes = 0
        for pid in tree(self.process.pid) if self.process else []:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    kilobytes += int(line.split()[1]) if line.startswith("Pss:") else 0
        return kilobytes / 1024

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.output.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; none where the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def tree(pid: int) -> list[int]:
    found = [pid]
    parents = {int(path.name): stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    for known in found:
        found += [child for child, fields in parents.items() if fields and int(fields[1]) == known]
    return found


def ask(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
        answer: dict[str, int] = json.load(reply)
        return answer


def wait_ready(target: Target) -> bool:
    for _ in range(150):
        if target.process and target.process.poll() is not None:
            return False
        with contextlib.suppress(OSError, urllib.error.URLError):
            ask(target.port)
            return True
        time.sleep(0.2)
    return False


T = TypeVar("T", bound=Target)


class Bench:
    def __init__(self, folder: Path, upstream: int, nice: int) -> None:
        self.folder, self.upstream = folder, upstream
        cores = sorted(os.sched_getaffinity(0))
        niced = ["nice", "-n", str(nice)] if nice else []
        # One core for the proxy alone; the mock and the load share another.
        self.on_proxy_core = [*niced, *(["taskset", "-c", str(cores[0])] if len(cores) > 1 else [])]
        self.on_load_core = [*niced, *(["taskset", "-c", str(cores[1])] if len(cores) > 1 else [])]

    def load(self, target: Target, arguments: tuple[str, ...], unit: str = "events") -> dict[str, float]:
        before = target.cpu()
        command = [*self.on_load_core, str(self.folder / "load"), str(target.port), *arguments]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(2)  # memory is looked at while the streams are open
        memory = target.memory()
        result: dict[str, float] = json.loads(running.communicate()[0])
        result["memory"] = memory
        result["cpu"] = (target.cpu() - before) / max(result[unit], 1) * 1e6
        return result

    def top_rate(self, target: Target, streams: int = 32) -> int:
        best = 0
        for rate in STEPS:
            got = self.load(target, ("stream", str(streams), str(rate // streams * 4), str(rate / streams)))
            if got["failed"] or got["per_s"] < ENOUGH * rate or got["delay_p99"] > LATEST_US:
                break
            best = rate
        return best

    def leaked(self, target: Target) -> int:
        """Upstream streams that go on two seconds after their client has hung up."""
        before = ask(self.upstream)
        self.load(target, ("stream", "50", "10000", "10", "500"))
        time.sleep(2)
        after = ask(self.upstream)
        return (after["streams"] - before["streams"]) - (after["aborted"] - before["aborted"])


def build(folder: Path) -> None:
    for name in ("mock", "load"):
        subprocess.run(["cc", "-O2", "-o", folder / name, HERE / f"{name}.c"], check=True)


@contextlib.contextmanager
def running(names: list[str], nice: int, kind: type[T]) -> Iterator[tuple[Bench, list[T]]]:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    build(folder)
    bench = Bench(folder, free_port(), nice)
    mock = subprocess.Popen([*bench.on_load_core, folder / "mock", str(bench.upstream)])
    targets: list[T] = []
    try:
        for name in names:
            target = kind(name, bench.upstream, folder / name, bench.on_proxy_core)
            targets.append(target)
            if not wait_ready(target):
                print(f"{name} does not start:\n{(folder / name / 'output').read_text()}", file=sys.stderr)
                targets.remove(target)
        for target in targets:  # imports, caches, first connections
            bench.load(target, ("short", "4", "0.5"))
        yield bench, targets
    finally:
        for target in targets:
            target.stop()
        mock.kill()
        mock.wait()
        shutil.rmtree(folder)


def table(results: dict[str, list[dict[str, float]]], unit: str) -> list[str]:
    """Medians over the rounds, and the ratios of CPU between targets."""
    middle = {
        name: {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }
    peers = [name for name in ("naive", "nginx", "off") if name in middle]
    direct = middle.get("direct", {"delay_p50": 0, "delay_p99": 0})
    lines = [
        f"| target | CPU µs/{'request' if unit == 'ok' else 'event'} |"
        + "".join(f" vs {peer} |" for peer in peers)
        + " per s | added p50 µs | added p99 µs | first p50 µs | PSS MB | failed | altered |"
    ]
    lines.append("|---|" + "---:|" * (lines[0].count("|") - 2))
    for name, row in middle.items():
        ratios = "".join(f" {row['cpu'] / middle[peer]['cpu']:.2f} |" for peer in peers)
        failed, altered = (sum(int(round_[key]) for round_ in results[name]) for key in ("failed", "altered"))
        lines.append(
            f"| {name} | {row['cpu']:.1f} |{ratios} {row['per_s']:.0f} | {row['delay_p50'] - direct['delay_p50']:.0f} |"
            f" {row['delay_p99'] - direct['delay_p99']:.0f} | {row['first_p50']:.0f} | {row['memory']:.0f} | {failed} |"
            f" {altered} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="B,C,E", help=f"of {','.join(SCENARIOS)}, S (top rate), X (hang-ups)")
    parser.add_argument("--only", default="direct,naive,nginx,ours,off", help="targets, in this order")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time", type=float, default=1.0, help="scales the length of the runs")
    parser.add_argument("--nice", type=int, default=0, help="negative on a shared machine")
    options = parser.parse_args()
    with running(options.only.split(","), options.nice, Target) as (bench, targets):
        for name in options.scenarios.split(","):
            print(f"\n### {name}: {' '.join(SCENARIOS[name].load) if name in SCENARIOS else ''}\n", flush=True)
            if name in ("S", "X"):
                for target in targets:
                    what = f"{bench.top_rate(target)} events/s" if name == "S" else f"{bench.leaked(target)} leaked"
                    print(f"- {target.name}: {what}", flush=True)
                continue
            scenario = SCENARIOS[name]
            results: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
            for turn in range(options.rounds):
                for target in targets if turn % 2 == 0 else targets[::-1]:
                    got = bench.load(target, scenario.scaled(options.time), scenario.unit)
                    results[target.name].append(got)
            print("\n".join(table(results, scenario.unit)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
