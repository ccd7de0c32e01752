"""What a watch shows to Prometheus. Definitions: catalogue.py."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server

import sparseety
from sparseety.errors import SparseetyError
from sparseety.metrics import BUILD_INFO
from sparseety.records import FORMAT_VERSION
from verifier.catalogue import (
    BACKLOG,
    DURATION,
    FINDINGS,
    JOINS,
    MODELS,
    OTHER,
    REQUESTS,
    SEQUENCE,
    TOKENS,
    WATCH,
)
from verifier.exports import LEVELS
from verifier.findings import DOUBTS, FAULTS, JUDGED, NOTES, RequestVerdict, Severity
from verifier.series import Series

SEQUENCE_KINDS = {
    "LOST_RECORDS": "gap",
    "DUPLICATED_TEXT": "duplicate",
    "REORDERED": "reorder",
    "TORN_RECORD": "torn_line",
    "UNFINISHED": "missing_end",
}
# What a finding can be, where a request is judged. All begin at 0, else increase() would miss the first of its kind.
_LEVELS = {Severity.FAULT: FAULTS, Severity.WAIVED: FAULTS, Severity.UNKNOWN: DOUBTS, Severity.INFO: NOTES}


class Metrics:
    def __init__(self, *, drift: bool = False) -> None:
        """drift: it is looked for. Where it is not, a 0 would say that there is none."""
        self._drift = drift
        self.series = Series(WATCH)
        self._models: set[str] = set()
        self._unusable = 0
        self.series.set(BUILD_INFO, sparseety.__version__, str(FORMAT_VERSION), to=1)
        self.series.set(BACKLOG, to=0)
        for result in ("both", "proxy_only", "plugin_only"):
            self.series.add(JOINS, result, by=0)
        self._begin(OTHER)

    def served(self, names: Iterable[str]) -> None:
        """Engines whose logs are read serve models of these names."""
        for name in names:
            self._model(name)

    def _model(self, name: str | None) -> str:
        """Its label. Only names that engines serve come here, yet of those, too, there may be many: LoRA adapters."""
        if name is None or name in self._models:
            return name or OTHER
        if len(self._models) >= MODELS:
            return OTHER
        self._models.add(name)
        self._begin(name)
        return name

    def _begin(self, model: str) -> None:
        for verdict in JUDGED:
            self.series.add(REQUESTS, model, verdict.value, by=0)
        for severity, codes in _LEVELS.items():
            for code in codes - ({"DRIFT"} if not self._drift else set()):
                self.series.add(FINDINGS, model, code, LEVELS[severity], by=0)
        for label, metric in ((TOKENS.labels[1], TOKENS), (SEQUENCE.labels[1], SEQUENCE)):
            for value in label.values:
                if self._drift or value != "drift":
                    self.series.add(metric, model, value, by=0)

    def judged(self, verdict: RequestVerdict, *, engines: bool) -> None:
        """One more. engines: there are logs of engines; without, nothing could be joined."""
        codes = {finding.code for finding in verdict.findings}
        if engines and (result := _joined(verdict, codes)):
            self.series.add(JOINS, result)
        if verdict.verdict not in JUDGED:
            return
        model = self._model(verdict.model)
        self.series.add(REQUESTS, model, verdict.verdict.value)
        for code, severity in {(finding.code, finding.severity) for finding in verdict.findings}:
            self.series.add(FINDINGS, model, code, LEVELS[severity])
        for kind in {SEQUENCE_KINDS[code] for code in codes & SEQUENCE_KINDS.keys()}:
            self.series.add(SEQUENCE, model, kind)
        for result, count in _tokens(verdict).items():
            if result == "drift" and not self._drift:
                continue
            self.series.add(TOKENS, model, result, by=count)
        self.series.observe(DURATION, verdict.seconds)

    def unusable(self, lines: int) -> None:
        """So many torn lines were met so far: whose they were is not known."""
        self.series.add(SEQUENCE, OTHER, "torn_line", by=lines - self._unusable)
        self._unusable = lines

    def waiting(self, requests: int) -> None:
        """So many have ended and are not judged."""
        self.series.set(BACKLOG, to=requests)

    def serve(self, host: str, port: int) -> int:
        """Answer at /metrics, in threads of its own. Returns the port. Raises SparseetyError."""
        registry = CollectorRegistry()
        registry.register(self.series)
        try:
            server, _ = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:  # the latter: no port has that number
            reason = getattr(error, "strerror", None) or error
            raise SparseetyError(f"cannot serve metrics on {host}:{port}: {reason}") from None
        return int(server.server_port)


def _joined(verdict: RequestVerdict, codes: set[str]) -> str | None:
    """Who knows of a request that both logs should know; None: it never was one, or that cannot be told."""
    if "ORPHAN_BACKEND" in codes:
        return "plugin_only"
    if verdict.verdict not in JUDGED:
        return None
    if verdict.choices or "JOIN_AMBIGUOUS" in codes:
        return "both"
    return None if codes & {"LOST_RECORDS", "TORN_RECORD"} else "proxy_only"


def _tokens(verdict: RequestVerdict) -> dict[str, int]:
    """Sampled ids by what became of them; and besides, what came that was not sampled."""
    found = {
        "drift": verdict.drifted,
        "mismatch": verdict.altered,
        "missing": verdict.missing,
        "unverifiable": max(0, verdict.tokens - verdict.checked),
    }
    return found | {"match": max(0, verdict.tokens - sum(found.values())), "extra": verdict.extra}
