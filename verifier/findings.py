"""What a verdict consists of. Codes: docs/verdicts.md; spelled the same wherever they appear."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

Axis = Literal["text", "ids", "protocol", "log"]


class Severity(Enum):
    FAULT = "fault"  # something is wrong
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
    uuid: str | None = None
    ts: float | None = None

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
