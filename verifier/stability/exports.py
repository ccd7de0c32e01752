"""A stability run's result for other programs: JSON, JUnit, a text file for Prometheus' node exporter. Pure, no content
but token ids in the JSON."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from xml.etree import ElementTree

import msgspec

from sparseety.metrics import Metric
from verifier.output import printable
from verifier.stability import catalogue
from verifier.stability.result import Analysis, Comparison, Decision

_GATE_VALUES: dict[Decision, int] = {"accept": 1, "reject": 0, "inconclusive": -1}
Sample = tuple[str, dict[str, str], float]  # suffix of the name, labels, value


def json(analysis: Analysis) -> bytes:
    """The whole result as one object on one line."""
    return msgspec.json.encode(analysis) + b"\n"


def junit(analysis: Analysis) -> bytes:
    """A test case for each condition, each bound and the gate. What was not met is an error, what could not be told is
    skipped, a reject is a failure."""
    suite = ElementTree.Element("testsuite", name="sparseety stability")
    counts = {"failure": 0, "error": 0, "skipped": 0}

    def case(kind: str, name: str, outcome: str | None, message: str) -> None:
        element = ElementTree.SubElement(suite, "testcase", classname=kind, name=printable(name))
        if outcome:
            counts[outcome] += 1
            ElementTree.SubElement(element, outcome, message=printable(message))
        else:
            ElementTree.SubElement(element, "system-out").text = printable(message)

    for check in analysis.checks:
        case("validity", check.name, {True: None, False: "error", None: "skipped"}[check.ok], check.detail)
    outcomes = {"accept": None, "reject": "failure", "inconclusive": "skipped"}
    for bound in analysis.verdict.bounds:
        case("bound", bound.name, outcomes[bound.decision], bound.detail)
    verdict = analysis.verdict
    case("gate", verdict.contract, outcomes[verdict.decision], "; ".join(verdict.reasons))
    suite.set("tests", str(len(suite)))
    for attribute, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(counts[kind]))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    data: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def prometheus(analysis: Analysis, now: float) -> bytes:
    """now: Unix seconds at which the run was judged."""
    known = [arm.model for arm in analysis.facts.arms.values() if arm.model]
    model = {"model_name": known[0] if known else ""}
    lines = []
    for metric, samples in _samples(analysis, now):
        found = list(samples)
        if not found:
            continue
        lines += [f"# HELP {metric.wire_name} {metric.text}", f"# TYPE {metric.wire_name} {metric.kind}"]
        for suffix, labels, value in found:
            every = (model if any(label.name == "model_name" for label in metric.labels) else {}) | labels
            inner = ",".join(f'{name}="{_escape(text)}"' for name, text in every.items())
            lines.append(
                f"{metric.wire_name}{suffix}{{{inner}}} {value!r}" if inner else f"{metric.wire_name} {value!r}"
            )
    return "".join(line + "\n" for line in lines).encode()


def _samples(analysis: Analysis, now: float) -> Iterator[tuple[Metric, Iterator[Sample]]]:
    yield catalogue.REQUESTS, _requests(analysis)
    yield catalogue.EXACT_MATCH, _exact(analysis)
    yield (
        catalogue.HARD,
        (("", _named(each), each.hard.share) for each in analysis.comparisons if each.hard.share is not None),
    )
    distinct = ((one.arm, one.distinct_mean) for one in analysis.repeats)
    yield catalogue.DISTINCT, (("", {"arm": arm}, mean) for arm, mean in distinct if mean is not None)
    yield catalogue.FIRST_DIVERGENCE, (sample for each in analysis.comparisons for sample in _histogram(each))
    yield catalogue.GATES, _gates(analysis)
    yield catalogue.COMPLETION, iter([("", {}, now)])


def _requests(analysis: Analysis) -> Iterator[Sample]:
    for arm in analysis.arms:
        yield "", {"arm": arm.arm, "outcome": "ok"}, arm.requests - arm.failed
        yield "", {"arm": arm.arm, "outcome": "error"}, arm.failed


def _named(comparison: Comparison) -> dict[str, str]:
    names = {"noise": "repeat_baseline", "candidate": "baseline_vs_candidate"}
    return {"comparison": names.get(comparison.name, f"baseline_vs_{comparison.name}")}


def _exact(analysis: Analysis) -> Iterator[Sample]:
    for each in analysis.comparisons:
        if each.identical.share is not None:
            yield "", _named(each), each.identical.share
    for one in analysis.repeats:
        if one.arm == "b" and one.stable.share is not None:
            yield "", {"comparison": "repeat_candidate"}, one.stable.share


def _histogram(comparison: Comparison) -> Iterator[Sample]:
    bounds = catalogue.FIRST_DIVERGENCE.bounds
    counts = [0] * (len(bounds) + 1)
    for found in comparison.differences:
        counts[bisect_left(bounds, found.index)] += 1
    for bound, total in zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True):
        yield "_bucket", _named(comparison) | {"le": bound}, total
    yield "_sum", _named(comparison), sum(found.index for found in comparison.differences)
    yield "_count", _named(comparison), len(comparison.differences)


def _gates(analysis: Analysis) -> Iterator[Sample]:
    verdict = analysis.verdict
    yield "", {"gate": verdict.contract}, _GATE_VALUES[verdict.decision]
    yield "", {"gate": "valid"}, int(analysis.valid)
    for bound in verdict.bounds:
        yield "", {"gate": bound.name}, _GATE_VALUES[bound.decision]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
