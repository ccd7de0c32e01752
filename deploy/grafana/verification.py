"""Verification: whether the clients got the text that was sampled."""

from deploy.grafana.asking import grown, per_second, quantiles, share
from deploy.grafana.overview import CAPTURE
from deploy.grafana.panels import Dashboard, Panel, Row

_FOUND = grown("sparseety_verify_findings_total", "{M}", "24h", "code, severity")
# In a word of its own: an empty panel would say that nobody verifies.
_NOTHING_FOUND = (
    "label_replace(" + grown("sparseety_verify_findings_total", "{M}", "24h") + ' == 0, "code", "none", "", "")'
)

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
            ((f"sort_desc({_FOUND} > 0) or {_NOTHING_FOUND}", "{{code}} {{severity}}"),),
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
            "drift",
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

STABILITY = Row(
    "Before going live (sparseety stability)",
    (
        Panel(
            "Gates of the last run",
            "stat",
            "short",
            "stability",
            "Whether the changed server may go live, by the contract that was chosen.",
            (("min by (model_name, gate) (sparseety_stability_run_gate{N})", "{{model_name}} {{gate}}"),),
            words=((-1, "inconclusive"), (0, "reject"), (1, "accept")),
            good_above=1,
        ),
        Panel(
            "Differences that no tie explains",
            "bars",
            "percentunit",
            "stability",
            "Share of the prompts, by comparison; of the baseline with itself it is the yardstick for the others.",
            (("max by (comparison) (sparseety_stability_run_hard_ratio{N})", "{{comparison}}"),),
        ),
        Panel(
            "Outputs that are equal throughout",
            "bars",
            "percentunit",
            "stability",
            "Share of the prompts whose ids are all equal, by comparison. A healthy server is not always at 100 %.",
            (("min by (comparison) (sparseety_stability_run_exact_match_ratio{N})", "{{comparison}}"),),
        ),
        Panel(
            "First difference (token)",
            "bars",
            "short",
            "stability",
            "Of pairs that differ: the token at which half of them have begun to.",
            (
                (
                    "histogram_quantile(0.5,"
                    " sum by (le, comparison) (sparseety_stability_first_divergence_tokens_bucket{N}))",
                    "{{comparison}}",
                ),
            ),
        ),
        Panel(
            "Outputs to one prompt",
            "bars",
            "short",
            "stability",
            "Mean number of distinct ones over the repeats in one arm; 1 is stable.",
            (("max by (arm) (sparseety_stability_run_distinct_outputs{N})", "{{arm}}"),),
        ),
        Panel(
            "Requests of the run",
            "table",
            "short",
            "stability",
            "By arm, and how they ended.",
            (("max by (model_name, arm, outcome) (sparseety_stability_run_requests{N})", ""),),
            12,
        ),
        Panel(
            "Age of the run",
            "stat",
            "s",
            "stability",
            "Since it was judged.",
            (("time() - max(sparseety_stability_run_completion_timestamp_seconds)", ""),),
        ),
    ),
)

VERIFICATION = Dashboard(
    "sparseety-verification",
    "Verification",
    "Whether the text that clients received is that of the tokens the engine sampled. Without a verifier nothing is "
    "known about it, and this page stays empty.",
    (NOW, BATCH, STABILITY),
    ("job", "instance", "model_name"),
)
