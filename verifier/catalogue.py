"""What the verifier publishes: of a watch on its own port, of a run in a text file. docs/metrics.md is made from it."""

from sparseety.metrics import BUILD_INFO, Label, Metric
from verifier.findings import ASIDE, CODES, JUDGED
from verifier.stability.catalogue import METRICS as STABILITY

MODELS = 32  # names told apart; those beyond are "other"
OTHER = "other"  # also of a model that no logged engine serves: clients choose those names

MODEL = Label("model_name", limit=MODELS + 1)
VERDICT = Label("verdict", tuple(verdict.value for verdict in JUDGED))
CODE = Label("code", tuple(sorted(CODES - ASIDE)))
SEVERITY = Label("severity", ("info", "waived", "warn", "error"))

REQUESTS = Metric(
    "sparseety_verify_requests", "counter", "Requests judged.", labels=(MODEL, VERDICT), layer="verification"
)
FINDINGS = Metric(
    "sparseety_verify_findings",
    "counter",
    "Of these, those that have the finding.",
    labels=(MODEL, CODE, SEVERITY),
    layer="verification",
    absent='`code="DRIFT"`: without `--drift`',
)
TOKENS = Metric(
    "sparseety_verify_tokens",
    "counter",
    "Sampled ids of requests judged, by what became of their text; extra: text that no id stands for, tokenized.",
    "tokens",
    (MODEL, Label("result", ("match", "drift", "mismatch", "missing", "extra", "unverifiable"))),
    layer="verification",
    absent='`result="drift"`: without `--drift`',
)
DURATION = Metric(
    "sparseety_verify_duration_seconds",
    "histogram",
    "Time to verify one request.",
    "seconds",
    bounds=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60),
    layer="verification",
)
BACKLOG = Metric(
    "sparseety_verify_backlog_requests",
    "gauge",
    "Captured, complete and not yet verified.",
    layer="verification",
)
JOINS = Metric(
    "sparseety_join_requests",
    "counter",
    "Requests that both logs should know, by who does.",
    labels=(Label("result", ("both", "proxy_only", "plugin_only")),),
    layer="capture",
)
SEQUENCE = Metric(
    "sparseety_capture_sequence_errors",
    "counter",
    "Requests whose chunks or records are not in order: lost ones, repeated ones, swapped ones, unusable lines, a "
    "clean end without the end of the reply. Unusable lines of files are counted one by one.",
    labels=(MODEL, Label("kind", ("gap", "duplicate", "reorder", "torn_line", "missing_end"))),
    layer="capture",
)

RUN_REQUESTS = Metric(
    "sparseety_verify_run_requests",
    "gauge",
    "Requests of the last run, by verdict.",
    labels=(MODEL, VERDICT),
    layer="verification",
)
RUN_FINDINGS = Metric(
    "sparseety_verify_run_findings",
    "gauge",
    "Requests of the last run with this finding.",
    labels=(MODEL, CODE, SEVERITY),
    layer="verification",
)
RUN_COVERAGE = Metric(
    "sparseety_verify_run_coverage_ratio",
    "gauge",
    "Requests judged pass or fail, of those that ended and were in scope.",
    "ratio",
    (MODEL,),
    layer="verification",
)
RUN_COMPLETION = Metric(
    "sparseety_verify_run_completion_timestamp_seconds",
    "gauge",
    "Unix time at which the last run ended, whatever its verdict.",
    "seconds",
    layer="verification",
)
RUN_SUCCESS = Metric(
    "sparseety_verify_run_success", "gauge", "1 if the last run ended with exit code 0.", layer="verification"
)

WATCH = (REQUESTS, FINDINGS, TOKENS, DURATION, BACKLOG, JOINS, SEQUENCE, BUILD_INFO)
"""verify-tokens --watch."""
RUN = (RUN_REQUESTS, RUN_FINDINGS, RUN_COVERAGE, RUN_COMPLETION, RUN_SUCCESS)
"""verify-tokens --prom-textfile."""
METRICS = (*WATCH, *RUN, *STABILITY)
