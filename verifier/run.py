"""Read logs, join them, judge each request soon after it is read. The thin shell around the pure parts."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from verifier.executor import Executor, Inline, LocalPool, Task, WorkerDied
from verifier.findings import Finding, Report, RequestVerdict, Severity, Sums, Verdict
from verifier.gather import Logs
from verifier.judge import serves
from verifier.judging import judge_cases, not_judged, tokenizers
from verifier.logs import Log
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.orphans import judge_orphans
from verifier.packed import Case
from verifier.pending import Contested, Key, Pending
from verifier.reading import Reading
from verifier.tokenizer import NoTokenizer, TokenizerShelf
from verifier.witnesses import Witnesses

_POOL_FROM = 16 << 20  # bytes of logs: less is read before a pool has started
_BATCH_CASES = 256
_BATCH_BYTES = 512 << 10


Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and of how much."""


def verify(
    paths: list[Path],
    shelf: TokenizerShelf,
    jobs: int | None = None,
    options: JudgeOptions = AS_A_RULE,
    progress: Progress = lambda what, done, total: None,
    *,
    passes: bool = True,
) -> Report:
    """Judge every request in these logs. Raises SparseetyError where no tokenizer is there or a file is unreadable.

    passes: keep the verdicts on requests that pass; else only their sums.

    jobs: processes; 1: this one alone; None: one for each CPU, if there is much to read.
    """
    executor = executor_for(paths, jobs)
    try:
        return Run(paths, shelf, executor, progress).report(options, passes=passes)
    finally:
        executor.close()


def executor_for(paths: list[Path], jobs: int | None) -> Executor:
    if jobs is None:
        jobs = cpus() if sum(_size(path) for path in paths) >= _POOL_FROM else 1
    return LocalPool(jobs) if jobs > 1 else Inline()


class Run:
    """One reading of logs, seldom more: see verifier/pending.py."""

    def __init__(
        self,
        paths: list[Path],
        shelf: TokenizerShelf,
        executor: Executor,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        self._paths, self._shelf, self._executor, self._progress = paths, shelf, executor, progress
        self.logs = self._begin(None)

    def report(self, options: JudgeOptions = AS_A_RULE, *, passes: bool = True) -> Report:
        judge = Judge(self._shelf, self._executor, options, passes=passes)
        for case in self.cases():
            judge.take(case, self.logs.engine_logs)
        judge.flush(self.logs.engine_logs)
        logs = self.logs
        self.check_tokenizers()
        report = Report(problems=logs.problems, files=logs.files_read, usable_files=logs.usable_files, whole=logs.whole)
        report.verdicts += judge.verdicts()
        report.passes += judge.passes()
        for verdict in report.verdicts:
            named_model(verdict, logs.engine_logs)
        report.verdicts += judge_orphans(logs.files, logs.pending.orphans(), logs.pending.unnamed)
        report.verdicts += [missing_verdict(log, n) for log, numbers in logs.missing_captures() for n in numbers]
        report.notes += [*logs.notes, *_notes(logs, report)]
        return report

    def cases(self) -> Iterator[Case]:
        """Each request as soon as it can be judged. What comes again replaces what came first."""
        yield from self._read()
        contested = Contested()
        while (more := contested | self.logs.pending.contested) != contested:
            contested = more
            self.logs = self._begin(contested)
            yield from self._read()

    def check_tokenizers(self) -> None:
        """Raises NoTokenizer where no engine has one: then there is nothing to say."""
        found: list[NoTokenizer | None] = []
        for log in self.logs.engines_in_use():
            if log.engine is None and not self._shelf.given:
                continue
            try:
                tokenizers(self._shelf).of(log)
                found.append(None)
            except NoTokenizer as error:
                found.append(error)
        missing = [error for error in found if error is not None]
        if self.logs.any_captures and missing and len(missing) == len(found):
            raise missing[0]

    def _begin(self, contested: Contested | None) -> Logs:
        self._reading = Reading(self._executor)
        self._reading.add(self._paths)
        witnesses = Witnesses(lambda: self.logs.engine_logs, self._reading.engine_to_come)
        return Logs(Pending(witnesses, contested))

    def _read(self) -> Iterator[Case]:
        pending = self.logs.pending
        with closing(self._reading):
            for watermark in self._reading.into(self.logs):
                self._progress("reading files", self.logs.files_read, len(self._paths))
                yield from pending.ready(watermark)
        self.logs.end()
        yield from pending.rest()


class Judge:
    """Has requests judged in batches, and keeps their verdicts."""

    def __init__(
        self, shelf: TokenizerShelf, executor: Executor, options: JudgeOptions, *, passes: bool = True
    ) -> None:
        """passes: keep the verdicts on requests that pass; else only their sums, in a fifth of the memory."""
        self._shelf, self._executor, self._options, self._keep_passes = shelf, executor, options, passes
        self._cases: list[Case] = []
        self._bytes = 0
        self._tasks: deque[tuple[list[Case], list[Log], Task[list[RequestVerdict]]]] = deque()
        self._verdicts: dict[Key, RequestVerdict] = {}
        self._passes: dict[Key, Sums] = {}
        self._codes: dict[tuple[str, ...], tuple[str, ...]] = {}  # one copy of each

    def take(self, case: Case, engine_logs: list[Log]) -> None:
        self._cases.append(case)
        self._bytes += case.size
        if len(self._cases) >= _BATCH_CASES or self._bytes >= _BATCH_BYTES:
            self._submit(engine_logs)

    def flush(self, engine_logs: list[Log]) -> None:
        """Wait for everything."""
        self._submit(engine_logs)
        while self._tasks:
            self._collect()

    def drain(self) -> list[RequestVerdict]:
        """The verdicts that have come since."""
        verdicts, self._verdicts = self.verdicts(), {}
        return verdicts

    def passes(self) -> list[Sums]:
        """Of those that are not among the verdicts."""
        return list(self._passes.values())

    def verdicts(self) -> list[RequestVerdict]:
        """In the order in which the requests began."""
        return [verdict for _, verdict in sorted(self._verdicts.items(), key=_order)]

    def _submit(self, engine_logs: list[Log]) -> None:
        cases, self._cases, self._bytes = self._cases, [], 0
        if cases:
            task = self._executor.submit(judge_cases, cases, engine_logs, self._shelf, self._options)
            self._tasks.append((cases, engine_logs, task))
        while len(self._tasks) > 2 * self._executor.slots:
            self._collect()

    def _collect(self) -> None:
        cases, engine_logs, task = self._tasks.popleft()
        try:
            verdicts = task.result()
        except WorkerDied:
            verdicts = [self._alone(case, engine_logs) for case in cases]
        for case, verdict in zip(cases, verdicts, strict=True):
            self._keep((case.capture.log.writer, case.capture.number), verdict)

    def _keep(self, key: Key, verdict: RequestVerdict) -> None:
        """In the place of what was kept of that request before, where it is judged again."""
        self._verdicts.pop(key, None)
        self._passes.pop(key, None)
        if self._keep_passes or verdict.verdict is not Verdict.PASS:
            share(verdict)
            self._verdicts[key] = verdict
        else:
            codes = self._codes.setdefault(verdict.notable, verdict.notable)
            self._passes[key] = Sums(verdict.tokens, verdict.checked, verdict.retokenized, verdict.drifted, codes)

    def _alone(self, case: Case, engine_logs: list[Log]) -> RequestVerdict:
        """One of a batch that a process did not survive."""
        try:
            task = self._executor.submit(judge_cases, [case], engine_logs, self._shelf, self._options)
            [verdict] = task.result()
        except WorkerDied:
            return not_judged(case, "the process that judged it was killed (out of memory?)")
        return verdict


def _order(item: tuple[Key, RequestVerdict]) -> tuple[float, float, int]:
    """The same however the logs were read."""
    ((*_, start), number), verdict = item
    return verdict.ts or 0.0, start, number


def share(verdict: RequestVerdict) -> None:
    """Keep one copy of what many verdicts say: those of a large log are many."""
    verdict.endpoint, verdict.model = _one(verdict.endpoint), _one(verdict.model)
    if not verdict.findings:
        verdict.findings = []  # the smallest that there is


def _one(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def named_model(verdict: RequestVerdict, engine_logs: list[Log]) -> None:
    """Keep the name of the model only where an engine serves it: clients choose those names."""
    if not any(serves(log, verdict.model) for log in engine_logs):
        verdict.model = None


def missing_verdict(log: Log, number: int) -> RequestVerdict:
    """On a request of which a log that is closed has the number and nothing else."""
    detail = "the log counts it and does not hold it: its lines were taken out"
    finding = Finding("TORN_RECORD", "log", Severity.UNKNOWN, detail, places=(log.place(1),))
    return RequestVerdict(f"capture {number}", Verdict.INCOMPLETE, [finding])


def _notes(logs: Logs, report: Report) -> list[str]:
    """Why there was nothing to judge, in words that say what to do."""
    if not report.files:
        return ["no log files (*.jsonl) here; nothing to check"]
    captures, engines = logs.any_captures, bool(logs.engines_in_use())
    if captures and not engines:
        return ["there is no engine log with requests; was vLLM started with SPARSEETY_HOOK_DIR set?"]
    if engines and not captures:
        return ["there is no proxy log with requests; did clients talk to the proxy (port 9000)?"]
    if logs.files and not captures:
        return ["no request was recorded; did clients talk to the proxy (port 9000)?"]
    return []


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
