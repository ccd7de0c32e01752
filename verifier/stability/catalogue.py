"""What a stability run publishes, in a text file for Prometheus' node exporter. docs/metrics.md is made from it."""

from sparseety.metrics import Label, Metric

MODEL = Label("model_name", limit=8)  # one a file; a host may keep files of several runs
ARM = Label("arm", limit=8)  # a1, a2, b, and yardsticks
COMPARISON = Label("comparison", limit=8)  # repeat_baseline, repeat_candidate, baseline_vs_candidate, baseline_vs_NAME
GATE = Label("gate", limit=8)  # the contract, "valid", and the bounds of bounded-change

REQUESTS = Metric(
    "sparseety_stability_run_requests",
    "gauge",
    "Requests of the last stability run, by how they ended.",
    labels=(MODEL, ARM, Label("outcome", ("ok", "error"))),
    layer="verification",
)
EXACT_MATCH = Metric(
    "sparseety_stability_run_exact_match_ratio",
    "gauge",
    "Prompts of the last stability run whose token ids are all equal. A healthy server is not always at 1.",
    "ratio",
    (MODEL, COMPARISON),
    layer="verification",
)
HARD = Metric(
    "sparseety_stability_run_hard_ratio",
    "gauge",
    "Prompts of the last stability run with a first difference that no tie explains.",
    "ratio",
    (MODEL, COMPARISON),
    layer="verification",
)
DISTINCT = Metric(
    "sparseety_stability_run_distinct_outputs",
    "gauge",
    "Mean number of distinct outputs to a prompt over the repeats within one arm; 1 is stable.",
    labels=(MODEL, ARM),
    layer="verification",
)
FIRST_DIVERGENCE = Metric(
    "sparseety_stability_first_divergence_tokens",
    "histogram",
    "Index of the first differing token, of pairs that differ.",
    "tokens",
    (MODEL, COMPARISON),
    (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    "verification",
)
GATES = Metric(
    "sparseety_stability_run_gate",
    "gauge",
    "1 accept, 0 reject, -1 inconclusive.",
    labels=(MODEL, GATE),
    layer="verification",
)
COMPLETION = Metric(
    "sparseety_stability_run_completion_timestamp_seconds",
    "gauge",
    "Unix time at which the last stability run was judged.",
    "seconds",
    layer="verification",
)

METRICS = (REQUESTS, EXACT_MATCH, HARD, DISTINCT, FIRST_DIVERGENCE, GATES, COMPLETION)
