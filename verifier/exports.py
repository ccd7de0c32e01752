"""A run's result for other programs: JUnit for CI, a text file for Prometheus' node exporter. Pure, but for `write`."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from sparseety.errors import SparseetyError
from verifier.findings import JUDGED, PASSED, Finding, Report, RequestVerdict, Severity, Verdict
from verifier.output import describe, printable

LEVELS = {Severity.WAIVED: "waived", Severity.INFO: "info", Severity.UNKNOWN: "warn", Severity.FAULT: "error"}


def junit(report: Report) -> bytes:
    """A test case for each judged request: a fault is a failure, what could not be checked is skipped. No content."""
    judged = [verdict for verdict in report.verdicts if verdict.verdict in JUDGED]
    counts = report.counts()
    suite = ElementTree.Element(
        "testsuite",
        name="verify-tokens",
        tests=str(len(judged)),
        failures=str(counts[Verdict.FAIL]),
        skipped=str(counts[Verdict.INCOMPLETE]),
        errors="0",
    )
    for verdict in judged:
        case = ElementTree.SubElement(
            suite, "testcase", classname=verdict.endpoint or "request", name=printable(verdict.request_id)
        )
        if verdict.verdict is not Verdict.PASS:
            kind = "failure" if verdict.verdict is Verdict.FAIL else "skipped"
            said = [f for f in verdict.findings if f.severity in (Severity.FAULT, Severity.UNKNOWN)]
            element = ElementTree.SubElement(case, kind, message=", ".join(sorted({f.code for f in said})))
            element.text = _said(said)
        if waived := [f for f in verdict.findings if f.severity is Severity.WAIVED]:
            ElementTree.SubElement(case, "system-out").text = _said(waived)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    data: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _said(findings: Iterable[Finding]) -> str:
    lines = (f"{describe(finding, show_text=False)}\n{'   '.join(finding.places)}" for finding in findings)
    return printable("\n".join(lines).replace("\n", "\0")).replace("\\u0000", "\n")


def prometheus(report: Report, exit_code: int, now: float) -> bytes:
    """Gauges of this run."""
    from verifier import catalogue as names
    from verifier.series import Series  # prometheus_client takes its time to load

    by_model: dict[str, list[RequestVerdict]] = {}
    for verdict in report.verdicts:
        if verdict.verdict in JUDGED:
            by_model.setdefault(verdict.model or names.OTHER, []).append(verdict)
    for model in sorted(by_model)[names.MODELS :]:
        by_model.setdefault(names.OTHER, []).extend(by_model.pop(model) if model != names.OTHER else [])
    series = Series(names.RUN)
    for model, verdicts in by_model.items():
        for kind in JUDGED:
            series.set(names.RUN_REQUESTS, model, kind.value, to=sum(each.verdict is kind for each in verdicts))
        for verdict in verdicts:
            for code, severity in {(finding.code, finding.severity) for finding in verdict.findings}:
                series.add(names.RUN_FINDINGS, model, code, LEVELS[severity])
        series.set(names.RUN_COVERAGE, model, to=Report(verdicts).totals.coverage or 0)
    series.set(names.RUN_COMPLETION, to=now)
    series.set(names.RUN_SUCCESS, to=int(exit_code == PASSED))
    return series.text()


def write(path: Path, data: bytes) -> None:
    """Whole or not at all: readers may look at any time. Raises SparseetyError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise SparseetyError(f"cannot write {path}: {error.strerror}") from None
