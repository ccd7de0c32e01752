"""Read logs, join them, judge each request. The thin shell around the pure parts: it only reads files."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.errors import SparseetyError
from sparseety.logreader import LogProblem, in_order, read_log
from verifier.findings import RequestVerdict, Verdict
from verifier.join import EngineIndex, Log, Logs
from verifier.judge import judge
from verifier.orphans import judge_orphans
from verifier.tokenizer import NoTokenizer, Tokenizer, TokenizerShelf

PASSED, FAILED, INCOMPLETE, DAMAGED = 0, 1, 3, 4


@dataclass(slots=True)
class Report:
    """Everything a run found out."""

    verdicts: list[RequestVerdict] = field(default_factory=list)
    problems: list[LogProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what explains the outcome as a whole
    files: int = 0
    usable_files: int = 0

    def counts(self) -> Counter[Verdict]:
        return Counter(verdict.verdict for verdict in self.verdicts)

    @property
    def coverage(self) -> float | None:
        """Share of ended, in-scope requests that were judged pass or fail; None where there are none."""
        counts = self.counts()
        judged = counts[Verdict.PASS] + counts[Verdict.FAIL]
        total = judged + counts[Verdict.INCOMPLETE]
        return judged / total if total else None

    def exit_code(self, min_coverage: float) -> int:
        if self.counts()[Verdict.FAIL]:
            return FAILED
        if self.files and not self.usable_files:
            return DAMAGED
        coverage = self.coverage
        return PASSED if coverage is not None and coverage >= min_coverage else INCOMPLETE


def verify(paths: Iterable[Path], shelf: TokenizerShelf) -> Report:
    """Judge every request in these logs. Raises SparseetyError where the tokenizer is missing or a file unreadable."""
    report = Report()
    logs = _read(paths, report)
    tokenizers = _find_tokenizers(logs, shelf)

    def tokenizer_of(log: Log) -> Tokenizer:
        tokenizer = tokenizers.get(log.path)
        if tokenizer is None:
            raise NoTokenizer("its engine_start record is lost, and with it which tokenizer was served")
        return tokenizer

    engine_logs = [log for log in logs.files if log.opening is not None and log.opening.source == "engine"]
    index = EngineIndex(logs.engine.values())
    for capture in sorted(logs.captures.values(), key=lambda capture: capture.start.ts if capture.start else 0.0):
        report.verdicts.append(judge(capture, index.choices(capture), engine_logs, tokenizer_of))
    report.verdicts += judge_orphans(logs, list(index.untaken()))
    report.notes += _notes(logs, report)
    return report


def _read(paths: Iterable[Path], report: Report) -> Logs:
    logs = Logs()
    for path in in_order(paths):
        report.files += 1
        before = len(report.problems)
        try:
            log = logs.add_file(path, read_log(path, report.problems.append))
        except OSError as error:
            raise SparseetyError(f"{path}: {error.strerror}") from None
        if log is None:
            continue
        report.usable_files += 1
        log.damaged = log.damaged or len(report.problems) > before
        if log.opening is None:
            report.notes.append(f"{path}: its first line (log_open) is lost; it is read as the present format")
    return logs


def _find_tokenizers(logs: Logs, shelf: TokenizerShelf) -> dict[Path, Tokenizer]:
    """The tokenizer of each engine log that has requests. Raises NoTokenizer."""
    in_use = {request.log.path: request.log for request in logs.engine.values()}
    found = {}
    for path, log in in_use.items():
        if log.engine is not None:
            identity = log.engine.tokenizer
            found[path] = shelf.find(identity.name, identity.files.get("tokenizer.json"))
        elif shelf.given:
            found[path] = shelf.find("", None)
    return found


def _notes(logs: Logs, report: Report) -> list[str]:
    """Why there was nothing to judge, in words that say what to do."""
    sources = {log.opening.source for log in logs.files if log.opening is not None}
    if not report.files:
        return ["no log files (*.jsonl) here; nothing to check"]
    if sources == {"proxy"}:
        return ["these are proxy logs without engine logs; was vLLM started with SPARSEETY_HOOK_DIR set?"]
    if sources == {"engine"}:
        return ["these are engine logs without proxy logs; did clients talk to the proxy (port 9000)?"]
    if sources and not logs.captures:
        return ["no request was recorded; did clients talk to the proxy (port 9000)?"]
    return []
