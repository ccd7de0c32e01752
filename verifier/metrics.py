"""What a watch shows to Prometheus. Names and labels: docs/watching.md."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from sparseety.errors import SparseetyError
from verifier.exports import LEVELS
from verifier.findings import JUDGED, RequestVerdict, Verdict

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "sparseety_verify_requests", "Requests judged.", ["model_name", "verdict"], registry=registry
        )
        self._findings = Counter(
            "sparseety_verify_findings",
            "Requests judged that have this finding.",
            ["model_name", "code", "severity"],
            registry=registry,
        )
        self._tokens = Counter(
            "sparseety_verify_tokens",
            "Sampled ids of requests judged: match, of passes; mismatch, of failures; unverifiable, not checked.",
            ["model_name", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "sparseety_verify_duration_seconds", "Time to verify one request.", buckets=_SECONDS, registry=registry
        )
        self._joins = Counter(
            "sparseety_join_requests",
            "Requests by who knows of them: both, proxy_only, plugin_only.",
            ["result"],
            registry=registry,
        )
        self._backlog = Gauge(
            "sparseety_verify_backlog_requests", "Captured, complete and not yet verified.", registry=registry
        )

    def judged(self, verdict: RequestVerdict) -> None:
        """One more."""
        orphan = any(finding.code == "ORPHAN_BACKEND" for finding in verdict.findings)
        self._joins.labels("plugin_only" if orphan else "both" if verdict.choices else "proxy_only").inc()
        if verdict.verdict not in JUDGED:
            return
        model = verdict.model or ""
        self._requests.labels(model, verdict.verdict.value).inc()
        for code, severity in {(finding.code, finding.severity) for finding in verdict.findings}:
            self._findings.labels(model, code, LEVELS[severity]).inc()
        result = "mismatch" if verdict.verdict is Verdict.FAIL else "match"
        for label, count in ((result, verdict.checked), ("unverifiable", verdict.tokens - verdict.checked)):
            if count > 0:
                self._tokens.labels(model, label).inc(count)
        self._seconds.observe(verdict.seconds)

    def waiting(self, requests: int) -> None:
        """So many have ended and are not judged."""
        self._backlog.set(requests)

    def serve(self, host: str, port: int) -> int:
        """Answer at /metrics, in threads of its own. Returns the port. Raises SparseetyError."""
        try:
            server, _ = start_http_server(port, host, self._registry)
        except (OSError, OverflowError) as error:  # the latter: no port has that number
            reason = getattr(error, "strerror", None) or error
            raise SparseetyError(f"cannot serve metrics on {host}:{port}: {reason}") from None
        return int(server.server_port)
