"""Follow logs that grow, and judge each request soon after it has ended."""

import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs
from sparseety.records import Endpoint
from sparseety.segments import locked, this_host
from verifier import exports
from verifier.executor import Executor
from verifier.findings import RequestVerdict, Totals, numbered
from verifier.gather import Logs
from verifier.known import Waivers
from verifier.logs import Writer
from verifier.marks import Mark
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.orphans import judge_orphans
from verifier.packed import Case
from verifier.pending import Pending
from verifier.reading import Reading
from verifier.run import Judge, missing_verdict, named_model
from verifier.tokenizer import TokenizerShelf
from verifier.witnesses import Witnesses

_LAG = 2.0  # seconds after which what a writer has recorded is in its file
_OTHER_HOSTS_SECONDS = 3600.0  # a lock may not reach from one machine to another
_NOTES_AT_ONCE = 100
_SAVE_SECONDS = 5.0


class Checkpoint(msgspec.Struct):
    """What a watch needs to go on after a restart."""

    format: int
    totals: Totals
    whole: bool
    unnamed: list[tuple[Endpoint, str | None, int]]
    logs: list[Mark]


_FORMAT = 1
_decode = msgspec.json.Decoder(Checkpoint).decode


class Watch:
    """Call `poll` again and again."""

    def __init__(
        self,
        arguments: list[str],
        shelf: TokenizerShelf,
        executor: Executor,
        checkpoint: Path,
        options: JudgeOptions = AS_A_RULE,
        known: Waivers | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Goes on where the checkpoint says. known: faults that are counted apart.

        Raises SparseetyError where the checkpoint is not readable.
        """
        self._arguments, self.path, self._now = arguments, checkpoint, now
        self._reading = Reading(executor, grows=True)
        witnesses = Witnesses(lambda: self.logs.engine_logs, self._reading.engine_to_come)
        self.logs = Logs(Pending(witnesses, live=True))
        self._judge = Judge(shelf, executor, options)
        self._waivers = known
        self.totals = Totals()
        self.whole = True
        self._saved = 0.0
        if (saved := _load(checkpoint)) is not None:
            self.totals, self.whole = saved.totals, saved.whole
            self.logs.pending.unnamed.restore(saved.unnamed)
            for mark in saved.logs:
                self.logs.restore(mark)
            self._reading.resume(saved.logs)

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[RequestVerdict]:
        """Read what is new, judge what is ready, and save now and then. Raises SparseetyError."""
        self._reading.add(find_logs(self._arguments, again=True))
        self._miss()
        pending = self.logs.pending
        for watermark in self._reading.into(self.logs):
            self._take(pending.ready(min(watermark, self._now() - _LAG)))
            if stopping():
                break
            if self._now() - self._saved > _SAVE_SECONDS:
                yield from self._judged()
                self.save()
        else:
            yield from self._of_ended_logs()
            self._take(pending.ready(math.inf if self._reading.all_ended else self._now() - _LAG))
        yield from self._judged()
        yield from self._told(judge_orphans(self.logs.files, pending.take_orphans(), pending.unnamed))
        if pending.take_contested():
            self.logs.notes.append("records came later than clocks allow; what they belong to was judged without them")
            self.whole = False
        if self._now() - self._saved > _SAVE_SECONDS:
            self.save()

    def _of_ended_logs(self) -> Iterator[RequestVerdict]:
        """What has not ended in them never will, and what they do not hold was taken out."""
        for writer in list(self._reading.ended(self._is_dead)):
            if (ledger := self.logs.known(writer)) is not None:
                self.logs.end_of(ledger.log)
                self._take(self.logs.pending.give_up(ledger.log))
                missing = self.logs.missing_of(ledger)
                yield from self._told([missing_verdict(ledger.log, number) for number in missing])
                for number in missing:
                    ledger.captures.add(number)

    def _judged(self) -> Iterator[RequestVerdict]:
        self._judge.flush(self.logs.engine_logs)
        yield from self._told(self._judge.drain())

    def _miss(self) -> None:
        """Files that were to be read on, and are gone."""
        gone, self._reading.gone[:] = self._reading.gone[:], []
        for mark in gone:
            if mark.waiting:
                self.logs.notes.append(f"{mark.path}: it is gone, with {numbered(mark.waiting, 'request')} not judged")
                self.whole = False

    def close(self) -> None:
        self._reading.close()

    def take_notes(self) -> list[str]:
        """What is to be said about the files, once."""
        notes, self.logs.notes[:] = self.logs.notes[:_NOTES_AT_ONCE], []
        problems, self.logs.problems.first[:] = self.logs.problems.first[:], []
        return [*map(str, problems), *notes]

    def last_notes(self) -> list[str]:
        """What is odd about the waivers, once all is seen."""
        return list(self._waivers.notes()) if self._waivers is not None else []

    def save(self) -> None:
        """Write the checkpoint, whole or not at all. Raises SparseetyError."""
        self._saved = self._now()
        whole = self.whole and self.logs.whole
        marks = list(self._reading.marks(self.logs))
        known = Checkpoint(_FORMAT, self.totals, whole, self.logs.pending.unnamed.state(), marks)
        exports.write(self.path, msgspec.json.encode(known))

    @property
    def open(self) -> int:
        """Requests that are read and not judged."""
        return len(self.logs.pending)

    def exit_code(self, min_coverage: float) -> int:
        usable = not self.logs.problems or bool(self.logs.files)
        return self.totals.exit_code(min_coverage, whole=self.whole and self.logs.whole_so_far, usable=usable)

    def _take(self, cases: Iterator[Case]) -> None:
        for case in cases:
            self._judge.take(case, self.logs.engine_logs)

    def _told(self, verdicts: list[RequestVerdict]) -> Iterator[RequestVerdict]:
        for verdict in verdicts:
            named_model(verdict, self.logs.engine_logs)
            if self._waivers is not None:
                self._waivers.today = datetime.fromtimestamp(self._now(), UTC).date()
                self._waivers.apply(verdict)
            self.totals.add(verdict)
            yield verdict

    def _is_dead(self, writer: Writer, path: Path) -> bool:
        """Nobody writes that file any more, however its writer ended. Where locks do not work, that is never known."""
        try:
            age = self._now() - path.stat().st_mtime
        except OSError:
            return False
        if age < _LAG:  # a writer that has just made it may not hold the lock yet
            return False
        _, host, *_ = writer
        with locked(path) as fd:
            return fd is not None and (host == this_host() or age > _OTHER_HOSTS_SECONDS)


def _load(path: Path) -> Checkpoint | None:
    try:
        known = _decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SparseetyError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SparseetyError(f"{path} is no checkpoint that this release reads ({error}); remove it") from None
    if known.format != _FORMAT:
        raise SparseetyError(f"{path} is a checkpoint of format {known.format}; remove it to begin anew")
    return known
