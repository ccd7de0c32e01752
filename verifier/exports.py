"""A run's result for other programs: JUnit for CI, a text file for Prometheus' node exporter. Pure, but for `write`."""

import os
import tempfile
from collections import Counter
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
    """Gauges of this run. Models that no logged engine serves have the label "": clients choose those names."""
    requests: Counter[tuple[str, str]] = Counter()
    findings: Counter[tuple[str, str, str]] = Counter()
    by_model: dict[str, list[RequestVerdict]] = {}
    for verdict in report.verdicts:
        if verdict.verdict not in JUDGED:
            continue
        model = verdict.model or ""
        by_model.setdefault(model, []).append(verdict)
        requests[model, verdict.verdict.value] += 1
        for code, severity in {(finding.code, finding.severity) for finding in verdict.findings}:
            findings[model, code, LEVELS[severity]] += 1
    lines = _gauge("requests", "Requests of the last run, by verdict.")
    for model, value in sorted(requests):
        lines.append(_sample("requests", requests[model, value], model_name=model, verdict=value))
    lines += _gauge("findings", "Requests of the last run with this finding.")
    for model, code, level in sorted(findings):
        count = findings[model, code, level]
        lines.append(_sample("findings", count, model_name=model, code=code, severity=level))
    lines += _gauge("coverage_ratio", "Judged requests of those that ended and were in scope.")
    for model, verdicts in sorted(by_model.items()):
        coverage = Report(verdicts).totals.coverage
        lines.append(_sample("coverage_ratio", coverage or 0, model_name=model))
    lines += _gauge("completion_timestamp_seconds", "When the last run ended.")
    lines.append(_sample("completion_timestamp_seconds", now))
    lines += _gauge("success", "1 if the last run ended with exit code 0.")
    lines.append(_sample("success", int(exit_code == PASSED)))
    return "".join(line + "\n" for line in lines).encode()


def _gauge(name: str, text: str) -> list[str]:
    full = f"sparseety_verify_run_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} gauge"]


def _sample(name: str, value: float, **labels: str) -> str:
    inner = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"sparseety_verify_run_{name}{{{inner}}} {value!r}" if inner else f"sparseety_verify_run_{name} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write(path: Path, data: bytes) -> None:
    """Whole or not at all: readers may look at any time. Raises SparseetyError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise SparseetyError(f"cannot write {path}: {error.strerror}") from None
