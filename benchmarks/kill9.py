"""Kill a process that writes a log under load, again and again, and read what it left.

    python -m benchmarks.kill9 [ROUNDS]

Each round: every record that the writer had flushed before the kill reads back, in order, and no file has more than
one damaged line. Exit code 1 where that does not hold.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sparseety.clock import monotonic_clock
from sparseety.logreader import LogProblem, find_logs, in_order, read_log
from sparseety.logwriter import LogWriter
from sparseety.records import Chunk, Scope
from sparseety.segments import Rotation

_ROTATION = Rotation(segment_bytes=1 << 20, min_free_bytes=0)
_BURST = 200  # records between two flushes


@dataclass(frozen=True, slots=True)
class Round:
    """What one killed writer left."""

    flushed: int  # records that it had flushed, numbered from 1
    read: int  # of those, in order, that read back
    files: int
    torn: int  # damaged lines
    torn_in_one_file: int  # at most

    @property
    def good(self) -> bool:
        return self.read >= self.flushed and self.torn_in_one_file <= 1


def write_until_killed(folder: Path) -> None:
    """Write records as fast as it goes, and say on stdout how many are flushed."""
    log = LogWriter(folder, "proxy", Scope(), clock=monotonic_clock(), rotation=_ROTATION, flush_seconds=0.01)
    number = 0
    while True:
        for _ in range(_BURST):
            number += 1
            text = "word " * random.randrange(1, 50)
            log.put(Chunk(ts=1.0, capture=number, wire_index=1, chunk_index=1, delta_text=text, accumulated_len=9))
        log.flush()
        print(number, flush=True)


def kill_one(folder: Path, bursts: int) -> Round:
    """Let a writer run for so many bursts, kill it in the middle of the next one, read its log."""
    command = [sys.executable, "-m", "benchmarks.kill9", "--write", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as child:
        assert child.stdout is not None
        for _ in range(bursts):
            assert child.stdout.readline(), "the writer ended by itself"
        time.sleep(random.uniform(0, 0.01))
        child.kill()
        said = child.stdout.read().split()
        flushed = int(said[-1]) if said else bursts * _BURST
    problems: list[LogProblem] = []
    files = find_logs([str(folder)])
    records = (record for path in in_order(files) for _, record in read_log(path, problems.append))
    numbers = [record.capture for record in records if isinstance(record, Chunk)]
    in_place = sum(number == index for index, number in enumerate(numbers, 1))
    torn = Counter(problem.path for problem in problems)
    return Round(flushed, in_place, len(files), torn.total(), max(torn.values(), default=0))


def main(rounds: int) -> int:
    bad = 0
    print("round   flushed      read   files   torn lines")
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            found = kill_one(Path(folder) / "logs", random.randrange(1, 150))
        bad += not found.good
        print(
            f"{number:5} {found.flushed:9} {found.read:9} {found.files:7} {found.torn:12}"
            f"{'' if found.good else '   BAD'}"
        )
    print(f"{rounds} rounds, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write_until_killed(Path(sys.argv[2]))
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 20))
