"""Verification: whether the clients got the text that was sampled."""

from deploy.grafana.asking import grown, per_second, quantiles, share
from deploy.grafana.overview import CAPTURE
from deploy.grafana.panels import Dashboard, Panel, Row

NOW = Row(
    "Now (verify-tokens --watch)",
    (
        Panel(
            "Verdicts/s",
            "stacked",
            "reqps",
            "verifier",
            "Requests judged. incomplete: not all of it could be checked; that is never a pass.",
            per_second("sparseety_verify_requests_total", "{M}", "verdict"),
            8,
        ),
        Panel(
            "Failed (24 h)",
            "stat",
            "short",
            "verifier",
            "Requests whose client got other text than was sampled, by model. verify-tokens explain shows one in full.",
            ((grown("sparseety_verify_requests_total", '{M, verdict="fail"}', "24h", "model_name"), "{{model_name}}"),),
            8,
            bad_above=1e-9,
        ),
        Panel(
            "Findings (24 h)",
            "bars",
            "short",
            "verifier",
            "Requests that have the finding. Each is explained in docs/verdicts.md.",
            (
                (
                    "sort_desc(" + grown("sparseety_verify_findings_total", "{M}", "24h", "code, severity") + " > 0)",
                    "{{code}} ({{severity}})",
                ),
            ),
            8,
        ),
        Panel(
            "Tokens by result",
            "shares",
            "short",
            "verifier",
            "Sampled ids of the requests judged, by what became of their text.",
            per_second("sparseety_verify_tokens_total", "{M}", "result"),
        ),
        Panel(
            "Drift",
            "lines",
            "percentunit",
            "verifier",
            "Share of the requests whose text tokenizes anew into other ids: no fault, and a change of it tells of a "
            "changed tokenizer or sampler. Only with --drift.",
            share(
                'sparseety_verify_findings_total{M, code="DRIFT"}', "sparseety_verify_requests_total{M}", legend="drift"
            ),
        ),
        Panel(
            "Backlog",
            "lines",
            "short",
            "verifier",
            "Requests that have ended and are not judged yet.",
            (("sum by (instance) (sparseety_verify_backlog_requests{S})", "{{instance}}"),),
        ),
        Panel(
            "Time to judge a request",
            "lines",
            "s",
            "verifier",
            "Its cost on the machine that verifies.",
            quantiles("sparseety_verify_duration_seconds", "{S}", 0.5, 0.99),
        ),
    ),
)

BATCH = Row(
    "Last run (verify-tokens --prom-textfile)",
    (
        Panel(
            "Verdicts",
            "table",
            "short",
            "batch",
            "Of the last run that was reported.",
            (("max by (model_name, verdict) (sparseety_verify_run_requests{N})", ""),),
        ),
        Panel(
            "Findings of the run",
            "table",
            "short",
            "batch",
            "Requests that have the finding.",
            (("max by (model_name, code, severity) (sparseety_verify_run_findings{N}) > 0", ""),),
        ),
        Panel(
            "Coverage",
            "stat",
            "percentunit",
            "batch",
            "Requests judged pass or fail, of those that ended and were in scope.",
            (("min by (model_name) (sparseety_verify_run_coverage_ratio{N})", "{{model_name}}"),),
            4,
            good_above=0.99,
        ),
        Panel(
            "Age",
            "stat",
            "s",
            "batch",
            "Since the last run ended, whatever its verdict.",
            (("time() - max(sparseety_verify_run_completion_timestamp_seconds)", ""),),
            4,
            bad_above=26 * 3600,
        ),
        Panel(
            "Exit code 0",
            "stat",
            "short",
            "batch",
            "Whether all passed, and enough of it could be checked.",
            (("min(sparseety_verify_run_success)", ""),),
            4,
            words=((0, "no"), (1, "yes")),
            good_above=1,
            link=CAPTURE,
        ),
    ),
)

VERIFICATION = Dashboard(
    "sparseety-verification",
    "Verification",
    "Whether the text that clients received is that of the tokens the engine sampled. Without a verifier nothing is "
    "known about it, and this page stays empty.",
    (NOW, BATCH),
    ("job", "instance", "model_name"),
)
