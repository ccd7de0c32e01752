"""How fast does `verify-tokens` judge, and in how much memory? Beside it, re-encoding with transformers.

    python -m benchmarks.verify_speed FOLDER            # logs to measure on; see benchmarks.make_logs
    python -m benchmarks.verify_speed FOLDER --naive python    # the baseline too, by a Python that has transformers

Each figure is of a process of its own, with the processes it starts: wall time, CPU time, and the largest resident size
of all of them together. On a machine that others use, CPU time says more than wall time.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SAMPLE_SECONDS = 0.2
_NAIVE = """
import json, sys, time
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1])
streams = [json.loads(line)["ids"] for line in open(sys.argv[2])]
texts = [(tokenizer.decode(ids), ids) for ids in streams]
begin, tokens = time.process_time(), 0
while time.process_time() - begin < 10:
    for text, ids in texts:
        tokenizer.encode(text, add_special_tokens=False) == ids
        tokens += len(ids)
print(tokens / (time.process_time() - begin) * 60 / 1e6)
"""


@dataclass(frozen=True, slots=True)
class Run:
    wall: float  # seconds
    cpu: float  # seconds, of all processes
    resident: float  # MB, of all processes together, at most
    steady: float  # MB at a third of the time: what does not grow stays near it
    tokens: int

    def __str__(self) -> str:
        rate = self.tokens * 60 / 1e6
        return (
            f"{self.wall:7.1f} s  {rate / self.wall:6.1f} M tokens/min   CPU {self.cpu:7.1f} s, "
            f"{rate / self.cpu:5.1f} M tokens/min a core   {self.resident:5.0f} MB, {self.steady:5.0f} MB at a third"
        )


def measure(folder: Path, jobs: int) -> Run:
    """Run the command over these logs."""
    command = [sys.executable, "-m", "verifier.cli", str(folder), "--quiet", "--jobs", str(jobs)]
    begin, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    sizes = []
    while process.poll() is None:
        sizes.append(_resident(process.pid))
        time.sleep(_SAMPLE_SECONDS)
    assert process.stdout is not None
    said = process.stdout.read()
    wall, after = time.monotonic() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    tokens = int(said.split(" of ")[1].split()[0])
    return Run(wall, cpu, max(sizes), sizes[len(sizes) // 3], tokens)


def _resident(pid: int) -> float:
    """MB of a process and those it started."""
    total = 0.0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return total
    return total + sum(_resident(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--naive", metavar="PYTHON", help="measure re-encoding too, by a Python that has transformers")
    options = parser.parse_args()
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(f"{size / 1e9:.2f} GB of logs")
    for jobs in options.jobs:
        print(f"{jobs} processes: {measure(options.folder, jobs)}")
    if options.naive:
        streams = ROOT / "deploy/demo/streams.jsonl"
        command = [options.naive, "-c", _NAIVE, str(ROOT / "deploy/demo/tokenizer/tokenizer.json"), str(streams)]
        rate = float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        print(f"transformers, re-encoding only, one core: {rate:.1f} M tokens/min")


if __name__ == "__main__":
    main()
