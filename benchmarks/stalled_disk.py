"""A log disk that does not answer for half a minute, in the middle of 64 streams: what the clients notice.

python -m benchmarks.stalled_disk [SECONDS]

Two proxies, one after the other under the same load, with full capture: the disk of one takes everything; the writes of
the other's log thread hang from ten seconds after the streams' start, for so many seconds.
"""

import re
import sys
import threading
import time
import urllib.request
from pathlib import Path

from benchmarks import bench
from sparseety.logreader import find_logs, in_order, read_log
from sparseety.records import Chunk, Gap, StreamDone

STREAMS, RATE, BEFORE, AFTER = 64, 50, 10.0, 10.0  # RATE: events a second of each

_HANGING = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
real = os.write
def write(fd, data):
    while threading.current_thread().name.startswith("sparseety-log") and os.path.exists({hang!r}):
        time.sleep(0.01)
    return real(fd, data)
os.write = write
from proxy.cli import main
sys.exit(main())
"""


class Proxy(bench.Target):
    def command(self, upstream: int, folder: Path) -> tuple[list[str], dict[str, str]]:
        self.admin = bench.free_port()
        self.logs, self.hang = folder / "logs", folder / "hang"
        code = _HANGING.format(root=str(bench.HERE.parent), hang=str(self.hang))
        options = ["--listen", f"127.0.0.1:{self.port}", "--admin", f"127.0.0.1:{self.admin}"]
        options += ["--upstream", f"http://127.0.0.1:{upstream}", "--log-dir", str(self.logs)]
        return [sys.executable, "-c", code, *options], {}

    def lost(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=5) as reply:
            found = re.findall(
                r"^sparseety_capture_records_dropped_total\S* (\S+)", reply.read().decode(), re.MULTILINE
            )
        assert found
        return sum(map(float, found))


def stall(hang: Path, seconds: float) -> None:
    time.sleep(BEFORE)
    hang.touch()
    time.sleep(seconds)
    hang.unlink()


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with bench.running(["steady", "stalled"], 0, Proxy) as (runner, targets):
        load = ("stream", str(STREAMS), f"{RATE * (BEFORE + seconds + AFTER):.0f}", str(RATE))
        for target in targets:
            if target.name == "stalled":
                threading.Thread(target=stall, args=(target.hang, seconds), daemon=True).start()
            got = runner.load(target, load)
            lost, memory = target.lost(), target.memory()
            target.stop()
            print(
                f"{target.name}: {got['events']:.0f} events, {got['failed']:.0f} failed, {got['altered']:.0f} altered;"
                f" delay p50 {got['delay_p50']:.0f} µs, p99 {got['delay_p99']:.0f} µs; {memory:.0f} MB afterwards;"
                f" lost {lost:.0f} records; in its log {told(target.logs)}"
            )
    return 0


def told(logs: Path) -> str:
    problems: list[object] = []
    found = [record for path in in_order(find_logs([str(logs)])) for _, record in read_log(path, problems.append)]
    chunks, ends = (sum(isinstance(record, kind) for record in found) for kind in (Chunk, StreamDone))
    gaps = [record for record in found if isinstance(record, Gap)]
    missing = sum(gap.count for gap in gaps)
    return f"{chunks} chunks, {ends} stream ends, {len(gaps)} gaps for {missing} records, {len(problems)} bad lines"


if __name__ == "__main__":
    sys.exit(main())
