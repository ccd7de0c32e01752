"""Read logs, join them, judge each request. The thin shell around the pure parts: it only reads files."""

from collections.abc import Iterable
from pathlib import Path

from sparseety.errors import SparseetyError
from sparseety.logreader import in_order, read_log
from verifier.findings import Finding, Report, RequestVerdict, Severity, Verdict
from verifier.join import EngineIndex
from verifier.judge import judge
from verifier.logs import Log, Logs
from verifier.orphans import judge_orphans
from verifier.tokenizer import NoTokenizer, Tokenizer, TokenizerShelf


def verify(paths: Iterable[Path], shelf: TokenizerShelf) -> Report:
    """Judge every request in these logs. Raises SparseetyError where no tokenizer is there or a file is unreadable."""
    report = Report()
    logs = _read(paths, report)
    tokenizers = _find_tokenizers(logs, shelf)

    def tokenizer_of(log: Log) -> Tokenizer:
        found = tokenizers.get(id(log))
        if isinstance(found, Tokenizer):
            return found
        raise found or NoTokenizer("its engine_start record is lost, and with it which tokenizer was served")

    engine_logs = [log for log in logs.files if log.opening is not None and log.opening.source == "engine"]
    index = EngineIndex(logs.engine.values(), logs.captures.values())
    for capture in sorted(logs.captures.values(), key=lambda capture: capture.start.ts if capture.start else 0.0):
        report.verdicts.append(judge(capture, index.join(capture), engine_logs, tokenizer_of))
    report.verdicts += judge_orphans(logs, index.untaken())
    report.verdicts += _missing(logs)
    report.notes += [*logs.notes, *_notes(logs, report)]
    return report


def _read(paths: Iterable[Path], report: Report) -> Logs:
    logs = Logs()
    for path in in_order(paths):
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
            found[key] = shelf.find(identity.name if identity else "", files.get("tokenizer.json"))
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
