"""Verdicts as text for a terminal and as JSON. Pure."""

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from verifier.findings import PROBLEMS_KEPT, Finding, Report, RequestVerdict, Severity, Totals, Verdict, numbered

_SHOWN = 40  # code points of content shown of each side


def printable(text: str) -> str:
    """Text that cannot move the cursor or turn the writing direction."""
    # Cc, Cf, Cs, Co, Cn: control, format (bidi), surrogates, private use; Zl, Zp: line and paragraph separators.
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text)


def quote(text: str) -> str:
    """Content for a terminal: quoted, cut, printable."""
    return printable(json.dumps(text[:_SHOWN], ensure_ascii=False)) + ("…" if len(text) > _SHOWN else "")


def _content(text: str | None, show_text: bool) -> str:
    if not text:
        return "nothing"
    if show_text:
        return quote(text)
    return f"‹{numbered(len(text), 'character')}›"


def describe(finding: Finding, show_text: bool) -> str:
    """One line: what, where, both sides."""
    where = [f"choice {finding.choice}"] if finding.choice else []
    if finding.token_index is not None:
        where += [f"token {finding.token_index}", f"chunk {finding.chunk_index}"]
    at = f" at {', '.join(where)}" if where else ""
    if finding.waived_by is not None:
        at += f" (waived: {printable(finding.waived_by)})"
    if finding.due is None or finding.came is None:
        return f"{finding.code}{at}: {finding.detail}"
    due, came = _content(finding.due, show_text), _content(finding.came, show_text)
    chose = f"sampler chose {due}" if finding.due else "sampler chose no text there"
    if finding.due and show_text and finding.token_id is not None:
        chose += f" ({finding.token_id})"
    return f"{finding.code}{at}: client got {came}, {chose}"


def request_lines(verdict: RequestVerdict, show_text: bool, verbose: bool) -> Iterator[str]:
    """The lines of one request; none for a pass, unless asked for."""
    reasons = [Severity.FAULT, Severity.UNKNOWN]
    if verdict.verdict is Verdict.INCOMPLETE:
        reasons.append(Severity.WAIVED)  # some leave the text unchecked
    shown = [f for f in verdict.findings if verbose or f.severity in reasons]
    if not verbose and verdict.verdict not in (Verdict.FAIL, Verdict.INCOMPLETE):
        return
    name = printable(verdict.request_id)
    label = verdict.verdict.value.replace("_", " ").upper()
    prefix = f"{name}  {label:<11} "
    if verdict.verdict is Verdict.INCOMPLETE and verdict.tokens:
        prefix += f"{verdict.checked} of {numbered(verdict.tokens, 'token')} checked; "
    if not shown:
        text = f"{numbered(verdict.checked, 'token')} checked" if verdict.verdict is Verdict.PASS else ""
        yield (prefix + text).rstrip()
    indent = " " * (len(name) + 14)
    for number, finding in enumerate(shown):
        yield (indent if number else prefix) + describe(finding, show_text)
        if finding.severity is not Severity.INFO:
            yield indent + "   ".join(finding.places)


def problem_lines(report: Report) -> Iterator[str]:
    """Damaged lines, the first few of each file."""
    yield from map(str, report.problems.first)
    for path, count in report.problems.counts.items():
        if count > PROBLEMS_KEPT:
            yield f"{path}: {count - PROBLEMS_KEPT} more lines were not usable"


def request_json(verdict: RequestVerdict, show_text: bool) -> dict[str, Any]:
    """One request as plain data; content only where asked for."""
    return {
        "type": "request",
        "request_id": verdict.request_id,
        "uuid": verdict.uuid,
        "endpoint": verdict.endpoint,
        "ts": verdict.ts,
        "verdict": verdict.verdict.value,
        "choices": verdict.choices,
        "tokens": verdict.tokens,
        "checked": verdict.checked,
        "rules": verdict.rules,
        "findings": [_finding_json(finding, show_text) for finding in verdict.findings],
    }


def _finding_json(finding: Finding, show_text: bool) -> dict[str, Any]:
    data = {
        "code": finding.code,
        "axis": finding.axis,
        "severity": finding.severity.value,
        "detail": finding.detail,
        "choice": finding.choice,
        "token_index": finding.token_index,
        "chunk_index": finding.chunk_index,
        "places": finding.places,
        "waived_by": finding.waived_by,
    }
    if show_text:
        data |= {"token_id": finding.token_id, "due": finding.due, "came": finding.came}
    return data


def finding_lines_json(verdict: RequestVerdict, show_text: bool) -> Iterator[dict[str, Any]]:
    """Each finding of one request as plain data that stands for itself."""
    for finding in verdict.findings:
        known = {"type": "finding", "request_id": verdict.request_id, "verdict": verdict.verdict.value}
        yield known | _finding_json(finding, show_text)


def totals_json(totals: Totals, exit_code: int) -> dict[str, Any]:
    """What a run or a watch sums up to."""
    return {
        "type": "summary",
        "requests": {verdict.value: totals.of(verdict) for verdict in Verdict},
        "tokens": totals.tokens,
        "checked": totals.checked,
        "waived": {code: sum(names.values()) for code, names in sorted(totals.waived.items())},
        "retokenized": totals.retokenized,
        "drifted": totals.drifted,
        "coverage": totals.coverage,
        "exit_code": exit_code,
    }


def summary_json(report: Report, exit_code: int) -> dict[str, Any]:
    """The same with what only a run that has an end knows."""
    of_files = {"files": report.files, "damaged_lines": len(report.problems), "notes": report.notes}
    return totals_json(report.totals, exit_code) | of_files
