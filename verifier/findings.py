"""What a verdict consists of. Codes: docs/verdicts.md; spelled the same wherever they appear."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

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

# Those that say that something could not be checked, and those worth knowing about a right answer.
DOUBTS = frozenset(
    {
        *("UNVERIFIABLE", "LOST_RECORDS", "TORN_RECORD", "UNPARSED_EVENT", "BACKEND_LOG_INVALID", "HOOK_SILENT"),
        *("JOIN_AMBIGUOUS", "NOT_SUPPORTED", "BROKEN_OFF", "SERVER_ERROR", "ID_OUT_OF_VOCAB"),
    }
)
NOTES = frozenset(
    {
        *("DRIFT", "NOT_COMPARABLE", "TRIMMED_STOP", "INCOMPLETE_UTF8_TAIL", "HELD_BACK", "SPECIAL_SKIPPED", "HIDDEN"),
        *("PARSED", "PARSED_SEMANTIC", "PARSER_DROPPED", "LEADING_SPACE", "REPLAY_ONLY", "BACKEND_OVERRUN"),
        *("ABORTED_PREFIX", "IDS_LEFT_OUT", "DOUBLE_BOS", "CLOCK_ANOMALY"),
    }
)
# Of requests that are not judged, and of lines that cannot be read.
ASIDE = frozenset({"ABORTED_BEFORE_ID", "NOT_AN_ENDPOINT", "REFUSED", "OPEN", "SCHEMA_UNKNOWN"})
CODES = FAULTS | DOUBTS | NOTES | ASIDE


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
    missing: int = 0  # of these, ids whose text did not come
    altered: int = 0  # of these, ids whose text came as another, or in another place
    extra: int = 0  # tokens of text that came and that no id stands for
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
    seconds: float = field(default=0.0, compare=False)  # that judging it took

    @property
    def notable(self) -> tuple[str, ...]:
        """What is worth knowing of it, although it is right."""
        return tuple(sorted({finding.code for finding in self.findings if finding.severity is Severity.INFO}))

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
JUDGED = (Verdict.PASS, Verdict.FAIL, Verdict.INCOMPLETE)


class Sums(NamedTuple):
    """What a pass adds to the totals: all that is kept of most of them."""

    tokens: int
    checked: int
    retokenized: int
    drifted: int
    codes: tuple[str, ...]


class Totals(msgspec.Struct):
    """Sums over verdicts, as they come."""

    verdicts: dict[str, int] = {}
    tokens: int = 0  # of what was judged
    checked: int = 0
    passes: dict[str, int] = {}  # passes by what is worth knowing of them
    aside: dict[str, int] = {}  # requests that were not judged, by why
    waived: dict[str, dict[str, int]] = {}  # waived findings by code and reference
    retokenized: int = 0  # ids compared with those of the text tokenized anew
    drifted: int = 0  # of these, ids that stand for another piece of the text

    def add(self, verdict: RequestVerdict) -> None:
        kind = verdict.verdict
        _count(self.verdicts, kind.value)
        codes = sorted({finding.code for finding in verdict.findings})
        self.retokenized += verdict.retokenized
        self.drifted += verdict.drifted
        for finding in verdict.findings:
            if finding.severity is Severity.WAIVED:
                _count(self.waived.setdefault(finding.code, {}), finding.waived_by or "")
        if kind in JUDGED:
            self.tokens += verdict.tokens
            self.checked += verdict.checked
        if kind is Verdict.PASS:
            for code in verdict.notable:
                _count(self.passes, code)
        elif kind not in JUDGED:
            for code in codes:
                _count(self.aside, code)

    def passed(self, sums: "Sums") -> None:
        """The same for a pass of which only this was kept."""
        _count(self.verdicts, Verdict.PASS.value)
        self.tokens += sums.tokens
        self.checked += sums.checked
        self.retokenized += sums.retokenized
        self.drifted += sums.drifted
        for code in sums.codes:
            _count(self.passes, code)

    def of(self, verdict: Verdict) -> int:
        return self.verdicts.get(verdict.value, 0)

    @property
    def judged(self) -> int:
        return sum(map(self.of, JUDGED))

    @property
    def coverage(self) -> float | None:
        """Share of ended, in-scope requests that were judged pass or fail; None where there are none."""
        total = self.judged
        return (total - self.of(Verdict.INCOMPLETE)) / total if total else None

    def exit_code(self, min_coverage: float, *, whole: bool, usable: bool) -> int:
        """whole: no line is missing or unusable. usable: nothing was there, or at least one file could be read."""
        if self.of(Verdict.FAIL):
            return FAILED
        if not usable:
            return DAMAGED
        coverage = self.coverage
        if coverage is None or coverage < min_coverage or not (whole or min_coverage < 1):
            return INCOMPLETE
        return PASSED

    def lines(self) -> list[str]:
        """For people: what a run or a watch sums up to."""
        passed, failed, incomplete = map(self.of, JUDGED)
        found = [
            f"{numbered(self.judged, 'request')}: {passed} pass, {failed} fail, {incomplete} incomplete; "
            f"{self.checked} of {numbered(self.tokens, 'token')} checked"
        ]
        waived = {f"{code} ({name})": n for code, names in self.waived.items() for name, n in names.items()}
        for title, counts in (("of the passes", self.passes), ("waived faults", waived), ("not judged", self.aside)):
            if counts:
                found.append(f"{title}: " + ", ".join(f"{n} {what}" for what, n in Counter(counts).most_common()))
        if self.retokenized:
            rate = 1000 * self.drifted / self.retokenized
            of = f"{self.drifted} of {numbered(self.retokenized, 'token')}"
            found.append(f"tokenized anew: {rate:.1f} of 1,000 tokens drifted ({of})")
        return found


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def numbered(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


PROBLEMS_KEPT = 5  # of each file


@dataclass(slots=True)
class Problems:
    """Unusable lines: how many in each file, and the first few of them. All lines of a large file may be so."""

    first: list[LogProblem] = field(default_factory=list)
    counts: Counter[Path] = field(default_factory=Counter)
    torn: int = 0  # lines, of all files

    def add(self, problem: LogProblem) -> None:
        self.torn += problem.code == "TORN_RECORD"
        self.counts[problem.path] += 1
        if self.counts[problem.path] <= PROBLEMS_KEPT:
            self.first.append(problem)

    def __len__(self) -> int:
        return self.counts.total()


@dataclass(slots=True)
class Report:
    """Everything a run found out."""

    verdicts: list[RequestVerdict] = field(default_factory=list)
    passes: list[Sums] = field(default_factory=list)  # of requests that are not in `verdicts`
    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list)  # what explains the outcome as a whole
    files: int = 0
    usable_files: int = 0
    whole: bool = True  # False: lines are missing or unusable, and with them perhaps whole requests

    def counts(self) -> Counter[Verdict]:
        return Counter(verdict.verdict for verdict in self.verdicts)

    @property
    def totals(self) -> Totals:
        totals = Totals()
        for verdict in self.verdicts:
            totals.add(verdict)
        for sums in self.passes:
            totals.passed(sums)
        return totals

    def exit_code(self, min_coverage: float) -> int:
        usable = not self.problems or bool(self.usable_files)
        return self.totals.exit_code(min_coverage, whole=self.whole, usable=usable)
