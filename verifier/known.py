"""Faults that are known, and why they may be: a file of waivers. What is waived is counted apart and does not fail."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from sparseety.errors import SparseetyError
from verifier.findings import FAULTS, Finding, RequestVerdict, Severity, Verdict

_UNCHECKED = frozenset({"ORPHAN_CAPTURE", "ID_OUT_OF_VOCAB"})  # faults that leave the text unchecked
_KEYS = frozenset({"class", "reference", "model", "parser", "vllm", "expires"})
EXAMPLE = """\
[[known]]
class = "MISROUTED"
reference = "https://github.com/vllm-project/vllm/issues/51641"
parser = "qwen3"
vllm = ">=0.30,<0.33"
expires = 2027-03-31"""


@dataclass(slots=True)
class Waiver:
    """One known fault. What is None holds for any."""

    code: str
    reference: str  # where it is known: an issue, a ticket
    model: str | None = None  # as the engine serves it
    parser: str | None = None  # a reasoning or tool-call parser that is on
    vllm: SpecifierSet | None = None  # versions of the engine
    expires: date | None = None  # the last day on which it waives
    matched: int = 0  # findings so far

    def covers(self, verdict: RequestVerdict, finding: Finding) -> bool:
        """What is not known of a request is not covered."""
        if finding.severity is not Severity.FAULT or finding.code != self.code:
            return False
        if self.model is not None and self.model != verdict.model:
            return False
        if self.parser is not None and self.parser not in verdict.parsers:
            return False
        return self.vllm is None or _within(verdict.vllm, self.vllm)


@dataclass(slots=True)
class Waivers:
    path: Path
    waivers: list[Waiver]
    today: date
    expired: set[int] = field(default_factory=set)  # indexes of those that would have waived something

    def apply(self, verdict: RequestVerdict) -> None:
        """Waive what is known of this request, and let the rest of its findings decide."""
        changed = False
        for number, finding in enumerate(verdict.findings):
            waiver = self._waiver(verdict, finding)
            if waiver is not None:
                waiver.matched += 1
                verdict.findings[number] = replace(finding, severity=Severity.WAIVED, waived_by=waiver.reference)
                changed = True
        if changed:
            codes = {finding.code for finding in verdict.findings}
            verdict.verdict = Verdict.OUT_OF_SCOPE if "ORPHAN_BACKEND" in codes else Verdict.PASS
            if codes & _UNCHECKED:
                verdict.verdict = Verdict.INCOMPLETE
            verdict.settle()

    def _waiver(self, verdict: RequestVerdict, finding: Finding) -> Waiver | None:
        for index, waiver in enumerate(self.waivers):
            if waiver.covers(verdict, finding):
                if waiver.expires is None or self.today <= waiver.expires:
                    return waiver
                self.expired.add(index)
        return None

    def notes(self) -> Iterator[str]:
        """What is odd about them, once all requests have been seen."""
        for index, waiver in enumerate(self.waivers):
            name = f"{self.path}: waiver {index + 1} ({waiver.code}, {waiver.reference})"
            if index in self.expired:
                yield f"{name} expired on {waiver.expires}: what it covered is a fault again"
            elif waiver.expires is not None and self.today > waiver.expires:
                yield f"{name} expired on {waiver.expires}, and nothing here needs it: it can go"
            elif not waiver.matched:
                yield f"{name} matched nothing"


def _within(version: str | None, versions: SpecifierSet) -> bool:
    try:
        return version is not None and versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def load_known(path: Path, today: date) -> Waivers:
    """Read a file of waivers. Raises SparseetyError."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise SparseetyError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SparseetyError(f"{path} is no TOML: {error}") from None
    _refuse_unknown(path, data, ["known"])
    entries = data.get("known", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SparseetyError(f"{path}: waivers are tables of this kind:\n{EXAMPLE}")
    return Waivers(path, [_waiver(f"{path}: waiver {number}", entry) for number, entry in enumerate(entries, 1)], today)


def _refuse_unknown(where: object, data: dict[str, Any], known: Iterable[str]) -> None:
    if unknown := sorted(set(data) - set(known)):
        raise SparseetyError(f'{where}: unknown key "{unknown[0]}"; known are {", ".join(sorted(known))}')


def _waiver(where: str, entry: dict[str, Any]) -> Waiver:
    _refuse_unknown(where, entry, _KEYS)
    texts = {key: _text(where, entry, key) for key in ("class", "reference", "model", "parser", "vllm")}
    code, reference, versions = texts["class"], texts["reference"], texts["vllm"]
    if not code or not reference:
        raise SparseetyError(f"{where}: it needs a class and a reference, as in\n{EXAMPLE}")
    if code not in FAULTS:
        raise SparseetyError(f'{where}: "{code}" is no fault of docs/verdicts.md; only faults can be waived')
    expires = entry.get("expires")
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise SparseetyError(f"{where}: expires is a date without quotes, such as 2027-03-31")
    try:
        vllm = None if versions is None else SpecifierSet(versions)
    except InvalidSpecifier:
        raise SparseetyError(f'{where}: vllm = "{versions}" is no range of versions, such as ">=0.30,<0.33"') from None
    return Waiver(code, reference, texts["model"], texts["parser"], vllm, expires)


def _text(where: str, entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise SparseetyError(f"{where}: {key} is to be a text in quotes")
    return value
