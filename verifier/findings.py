"""What a verdict consists of. Codes: docs/verdicts.md; spelled the same wherever they appear."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from sparseety.logreader import LogProblem

Axis = Literal["text", "ids", "protocol", "log"]


# The codes that can be faults; docs/verdicts.md has them in its first parts.
FAULTS = frozenset(
    {
        *("MISSING_TEXT", "EXTRA_TEXT", "DUPLICATED_TEXT", "REORDERED", "ALTERED_TEXT", "BROKEN_UTF8", "PROMPT_LEAK"),
        *("MISROUTED", "ID_MISMATCH", "ID_OUT_OF_VOCAB", "COUNT_MISMATCH", "UNFINISHED", "STOP_NOT_IN_IDS"),
        *("STOP_MISSED", "FINISH_MISMATCH", "ORPHAN_CAPTURE", "ORPHAN_BACKEND"),
    }
)


class Severity(Enum):
    FAULT = "fault"  # something is wrong
    WAIVED = "waived"  # something is wrong, and known to be
    UNKNOWN = "unknown"  # something could not be checked
    INFO = "info"  # something worth knowing about a right answer


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found out about a request. `due` and `came` are content: shown only where asked for."""

    code: str
    axis: Axis
    severity: Severity
    detail: str  # what is the matter, without content
    choice: int | None = None
    token_index: int | None = None  # 0-based, in the ids of the choice
    token_id: int | None = None
    chunk_index: int | None = None  # from 1, among the text-bearing chunks of the choice
    due: str | None = None  # what the ids say should have come
    came: str | None = None  # what the client got there
    places: tuple[str, ...] = ()  # file:line
    waived_by: str | None = None  # the reference of the waiver, where it is waived


class Verdict(Enum):
    PASS = "pass"
    FAIL = "fail"
    INCOMPLETE = "incomplete"
    OPEN = "open"  # has not ended in the log
    OUT_OF_SCOPE = "out_of_scope"  # nothing that could be judged was to be recorded


@dataclass(slots=True)
class RequestVerdict:
    """The verdict on one request, all its choices together."""

    request_id: str  # the id in the reply; where there is none, the proxy's UUID
    verdict: Verdict
    findings: list[Finding] = field(default_factory=list)
    choices: int = 0  # choices compared with their ids
    tokens: int = 0  # ids of these choices
    checked: int = 0  # of these, ids that were checked against the text
    endpoint: str | None = None
    model: str | None = None  # as a logged engine serves it; None: no engine whose log is here does
    uuid: str | None = None
    x_request_id: str | None = None  # the client's own name for it
    ts: float | None = None
    vllm: str | None = None  # version of the engine behind it
    parsers: tuple[str, ...] = ()  # reasoning and tool-call parsers that are known to be on
    rules: list[str] = field(default_factory=list)  # without an engine's log: which rules of the stream alone ran
    retokenized: int = 0  # ids compared with those of the text tokenized anew
    drifted: int = 0  # of these, ids that stand for another piece of the text

    def settle(self) -> "RequestVerdict":
        """Let the findings decide: a fault fails, else an unknown leaves it incomplete."""
        severities = {finding.severity for finding in self.findings}
        if Severity.FAULT in severities:
            self.verdict = Verdict.FAIL
        elif Severity.UNKNOWN in severities:
            self.verdict = Verdict.INCOMPLETE
        return self


def place(path: Path, line: int) -> str:
    """Where to look it up."""
    return f"{path}:{line}"


PASSED, FAILED, INCOMPLETE, DAMAGED = 0, 1, 3, 4


@dataclass(slots=True)
class Report:
    """Everything a run found out."""

    verdicts: list[RequestVerdict] = field(default_factory=list)
    problems: list[LogProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what explains the outcome as a whole
    files: int = 0
    usable_files: int = 0
    whole: bool = True  # False: lines are missing or unusable, and with them perhaps whole requests

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
        if self.problems and not self.usable_files:
            return DAMAGED
        coverage = self.coverage
        if coverage is None or coverage < min_coverage or not (self.whole or min_coverage < 1):
            return INCOMPLETE
        return PASSED
