"""Read logs, join them, judge each request. The thin shell around the pure parts: it only reads files."""

from collections.abc import Callable, Iterable
from pathlib import Path

from sparseety.errors import SparseetyError
from sparseety.logreader import in_order, read_log
from verifier.findings import Finding, Report, RequestVerdict, Severity, Verdict
from verifier.gather import Logs
from verifier.join import EngineIndex
from verifier.judge import judge
from verifier.logs import Log
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.orphans import judge_orphans
from verifier.requests import Capture
from verifier.tokenizer import NoTokenizer, Tokenizer, TokenizerShelf


def verify(
    paths: Iterable[Path],
    shelf: TokenizerShelf,
    options: JudgeOptions = AS_A_RULE,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Report:
    """Judge every request in these logs. Raises SparseetyError where no tokenizer is there or a file is unreadable."""
    report = Report()
    case = Case(paths, shelf, report, options, progress)
    captures = case.captures()
    for done, capture in enumerate(captures, 1):
        report.verdicts.append(case.judge(capture))
        progress("checking requests", done, len(captures))
    report.verdicts += judge_orphans(case.logs, case.index.untaken())
    report.verdicts += _missing(case.logs)
    report.notes += [*case.logs.notes, *_notes(case.logs, report)]
    return report


class Case:
    """Logs that were read and joined, ready to judge."""

    def __init__(
        self,
        paths: Iterable[Path],
        shelf: TokenizerShelf,
        report: Report,
        options: JudgeOptions = AS_A_RULE,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        """What is wrong with the files goes into `report`. Raises SparseetyError."""
        self._shelf, self._options = shelf, options
        self.logs = _read(paths, report, progress)
        self._tokenizers = _find_tokenizers(self.logs, shelf)
        self._engine_logs = [log for log in self.logs.files if log.opening and log.opening.source == "engine"]
        self.index = EngineIndex(self.logs.engine.values(), self.logs.captures.values())

    def captures(self) -> list[Capture]:
        """In the order in which they began."""
        return sorted(self.logs.captures.values(), key=lambda capture: capture.start.ts if capture.start else 0.0)

    def judge(self, capture: Capture) -> RequestVerdict:
        return judge(
            capture,
            self.index.join(capture),
            self._engine_logs,
            self.tokenizer_of,
            options=self._options,
            tokenizer_for=self._shelf.of_model,
        )

    def tokenizer_of(self, log: Log) -> Tokenizer:
        """Raises NoTokenizer."""
        found = self._tokenizers.get(id(log))
        if isinstance(found, Tokenizer):
            return found
        raise found or NoTokenizer("its engine_start record is lost, and with it which tokenizer was served")


def _read(paths: Iterable[Path], report: Report, progress: Callable[[str, int, int], None]) -> Logs:
    logs = Logs()
    files = in_order(paths)
    for path in files:
        progress("reading files", report.files, len(files))
        report.files += 1
        before = len(report.problems)
        try:
            touched = logs.add_file(path, read_log(path, report.problems.append))
        except OSError as error:
            raise SparseetyError(f"{path}: {error.strerror}") from None
        problems = report.problems[before:]
        report.usable_files += bool(touched)
        if not touched and not problems:
            report.notes.append(f"{path}: it is empty")
        if any(log.opening is None for log in touched):
            report.notes.append(f"{path}: its first line (log_open) is lost; it is read as the present format")
        for log in touched:
            log.damaged = log.damaged or bool(problems)
        # A closed log counts its records: where none is missing, the unusable lines were never part of it.
        counted = bool(touched) and all(log.closed for log in touched)
        if any(not problem.tail for problem in problems) and not counted:
            report.whole = False
    for request in logs.engine.values():
        if request.added is None:  # whose steps these are stood in a line that is not here
            request.log.damaged = True
    report.whole = report.whole and not any(log.closed and log.miscounted for log in logs.files)
    return logs


def _find_tokenizers(logs: Logs, shelf: TokenizerShelf) -> dict[int, Tokenizer | NoTokenizer]:
    """By id(log): the tokenizer of each engine, or why there is none. Raises NoTokenizer where no engine has one."""
    in_use = {id(request.log): request.log for request in logs.engine.values()}
    found: dict[int, Tokenizer | NoTokenizer] = {}
    for key, log in in_use.items():
        identity = log.engine.tokenizer if log.engine else None
        if identity is None and not shelf.given:
            continue
        try:
            files = identity.files if identity else {}
            found[key] = shelf.find(
                identity.name if identity else "",
                files.get("tokenizer.json"),
                (*log.engine.served_names, log.engine.model) if log.engine else (),
            )
        except NoTokenizer as error:
            found[key] = error
    missing = [error for error in found.values() if isinstance(error, NoTokenizer)]
    if logs.captures and missing and len(missing) == len(found):
        raise missing[0]
    return found


def _missing(logs: Logs) -> list[RequestVerdict]:
    """Requests of which a log that is closed has the number and nothing else."""
    verdicts = []
    for log, numbers in logs.missing_captures():
        for number in numbers[:1000]:
            detail = "the log counts it and does not hold it: its lines were taken out"
            place = log.place(1)
            finding = Finding("TORN_RECORD", "log", Severity.UNKNOWN, detail, places=(place,))
            verdicts.append(RequestVerdict(f"capture {number}", Verdict.INCOMPLETE, [finding]))
    return verdicts


def _notes(logs: Logs, report: Report) -> list[str]:
    """Why there was nothing to judge, in words that say what to do."""
    if not report.files:
        return ["no log files (*.jsonl) here; nothing to check"]
    if logs.captures and not logs.engine:
        return ["there is no engine log with requests; was vLLM started with SPARSEETY_HOOK_DIR set?"]
    if logs.engine and not logs.captures:
        return ["there is no proxy log with requests; did clients talk to the proxy (port 9000)?"]
    if logs.files and not logs.captures:
        return ["no request was recorded; did clients talk to the proxy (port 9000)?"]
    return []
