"""What the plugin publishes on vLLM's /metrics: the definitions. docs/metrics.md is made from them."""

from sampler_hook import adapters
from sparseety.metrics import BUILD_INFO, OVERHEAD_SECONDS, Label, Metric
from sparseety.writer_metrics import writer_metrics

# Limits are those of one engine: a server with several has so many times as many series.
MODEL = Label("model_name", limit=1)  # as served; one engine serves one
ENGINE = Label("engine", limit=1)  # vLLM's own: the data-parallel rank
SOURCE = Label("source", ("plugin",))
LAYER = Label("layer", limit=128)  # a number; "none": the module's name has none; "all": the sum, with detail=totals
SITE = Label("site", ("ffn_act",))
PHASE = Label("phase", ("prefill", "decode"))
ZERO_KIND = Label("zero_kind", ("exact", "near"))
LAYER_TYPE = Label("layer_type", ("full", "sliding", "chunked"))

ACCEPTED_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
RATIO_BOUNDS = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

# --------------------------------------------------------------------------------------- sparsity, from the engine

PROMPT = Metric(
    "sparseety_prompt_tokens_by_status",
    "counter",
    "Prompt tokens by how their KV came to be.",
    "tokens",
    (MODEL, ENGINE, Label("status", ("computed", "reused_local", "reused_external"))),
    layer="sparsity",
)
EVICTED = Metric(
    "sparseety_kv_evicted_tokens",
    "counter",
    "KV token slots given up: by preemption of their request; by capacity, where KV blocks are recorded.",
    "tokens",
    (MODEL, ENGINE, Label("reason", ("preemption", "capacity"))),
    layer="sparsity",
    absent='`reason="capacity"`: unless `kv` is recorded',
)
CONTEXT = Metric(
    "sparseety_attention_context_tokens",
    "counter",
    "Positions full attention would have read. Derived.",
    "tokens",
    (MODEL, ENGINE, LAYER_TYPE),
    layer="sparsity",
    absent="a model whose configuration does not say how its attention reads",
)
ATTENDED = Metric(
    "sparseety_attention_attended_tokens",
    "counter",
    "Positions read in a layer of this type, by the model's configuration. Derived, output tokens only.",
    "tokens",
    (MODEL, ENGINE, LAYER_TYPE),
    layer="sparsity",
    absent="a model whose configuration does not say how its attention reads",
)
DRAFTS = Metric(
    "sparseety_draft_tokens",
    "counter",
    "Speculative tokens by outcome.",
    "tokens",
    (MODEL, ENGINE, Label("outcome", ("accepted", "rejected"))),
    layer="sparsity",
)
ACCEPTED = Metric(
    "sparseety_draft_accepted_length",
    "histogram",
    "Accepted draft tokens of a row that had any; the bonus token is not counted.",
    "tokens",
    (MODEL, ENGINE),
    ACCEPTED_BOUNDS,
    layer="sparsity",
)

# -------------------------------------------------------------------------------------- sparsity, from the workers

ELEMENTS = Metric(
    "sparseety_activation_elements",
    "counter",
    "Activation elements inspected, of recorded requests; what was computed again after a preemption is not in it.",
    labels=(MODEL, ENGINE, LAYER, SITE, PHASE),
    layer="sparsity",
    absent="unless `sparsity` is recorded",
)
ZEROS = Metric(
    "sparseety_activation_zero_elements",
    "counter",
    "Of those, the zeros. near: absolute value up to the threshold in sparseety_sparsity_config_info, exact ones too.",
    labels=(MODEL, ENGINE, LAYER, SITE, PHASE, ZERO_KIND),
    layer="sparsity",
    absent="unless `sparsity` is recorded",
)
TOKEN_ZEROS = Metric(
    "sparseety_activation_token_zero_ratio",
    "histogram",
    "Share of zeros of one token over all layers inspected; an observation for each token.",
    "ratio",
    (MODEL, ENGINE, SITE, PHASE, ZERO_KIND),
    RATIO_BOUNDS,
    layer="sparsity",
    absent="unless `sparsity` is recorded by token (`SPARSEETY_HOOK_SPARSITY_GRAIN`), where one worker sees all",
)
WEIGHT_ZEROS = Metric(
    "sparseety_weight_zero_ratio",
    "gauge",
    "Share of weights that are zero, counted once after loading; under tensor parallelism of the first rank's part.",
    "ratio",
    (
        MODEL,
        LAYER,
        Label("module", ("qkv", "attn_o", "ffn_in", "ffn_out", "experts", "embed", "head", "other")),
        Label("zero_kind", ("exact",)),
    ),
    layer="sparsity",
    absent="unless `weights` are recorded",
)
ROUTED = Metric(
    "sparseety_moe_tokens_routed",
    "counter",
    "Choices of an expert for a token (tokens x top-k), of recorded requests.",
    "tokens",
    (MODEL, ENGINE, LAYER, PHASE),
    layer="sparsity",
    absent="unless `experts` are recorded and the model has routers",
)
BALANCE = Metric(
    "sparseety_moe_load_balance_ratio",
    "gauge",
    "Mean load / highest load over the experts of one layer, in the last window; 1 is even.",
    "ratio",
    (MODEL, ENGINE, LAYER),
    layer="sparsity",
    absent="the same; and before the first window",
)
ENTROPY = Metric(
    "sparseety_moe_routing_entropy_ratio",
    "gauge",
    "Shannon entropy of the loads of one layer's experts in the last window / ln(number of experts).",
    "ratio",
    (MODEL, ENGINE, LAYER),
    layer="sparsity",
    absent="the same; and before the first window",
)
IDLE = Metric(
    "sparseety_moe_idle_experts",
    "gauge",
    "Experts of one layer that no token went to in the last window.",
    labels=(MODEL, ENGINE, LAYER),
    layer="sparsity",
    absent="the same; and before the first window",
)
EXPERT_TOKENS = Metric(
    "sparseety_moe_expert_tokens",
    "counter",
    "Tokens by the expert that they went to.",
    "tokens",
    (MODEL, ENGINE, LAYER, Label("expert", limit=128)),
    layer="sparsity",
    absent="unless `SPARSEETY_HOOK_METRICS_DETAIL=expert`",
)
SPARSITY_CONFIG = Metric(
    "sparseety_sparsity_config_info",
    "gauge",
    "1 for the settings in force, 0 for earlier ones; numbers of different settings do not compare.",
    labels=(
        MODEL,
        Label("near_zero_threshold", limit=8),
        Label("site_set", ("ffn_act", "router", "ffn_act,router", "none")),
    ),
    layer="sparsity",
    absent="unless a worker counts",
)

# ------------------------------------------------------------------------------------------------- capture health

ENGINE_KINDS = ("engine_start", "engine_event", "request_added", "step", "request_finished", "kv", "gap")
WORKER_KINDS = ("sparsity_start", "weights", "sparsity", "experts", "gap")
EVENTS = ("sleep", "wake", "weight_update", "weight_version", "cache_reset", "control", "part_off", "hook_silent")

REQUESTS = Metric(
    "sparseety_capture_sampled_requests",
    "counter",
    "Requests by whether they are recorded.",
    labels=(SOURCE, Label("decision", ("captured", "forced", "skipped"))),
    layer="capture",
)
RATE = Metric(
    "sparseety_capture_sampling_ratio",
    "gauge",
    "Share of requests recorded now, 0 to 1.",
    "ratio",
    (SOURCE,),
    layer="capture",
)
RECORDS = Metric(
    "sparseety_capture_records",
    "counter",
    "Records handed to the writer, by event.",
    labels=(SOURCE, Label("kind", tuple(dict.fromkeys((*ENGINE_KINDS, *WORKER_KINDS))))),
    layer="capture",
)
PAUSED = Metric(
    "sparseety_capture_paused",
    "gauge",
    "1 while nothing is recorded, by operator or errors.",
    labels=(SOURCE, Label("reason", ("operator", "errors"))),
    layer="capture",
)
HOOKS = Metric(
    "sparseety_plugin_hooks",
    "gauge",
    "Hooks expected, attached, and fired at least once: of the engine by method, of the model (ffn_act, router) by "
    "module.",
    labels=(
        ENGINE,
        Label("site", (*adapters.expected(adapters.PARTS), "ffn_act", "router")),
        Label("state", ("expected", "attached", "fired")),
    ),
    layer="capture",
)
PLUGIN_EVENTS = Metric(
    "sparseety_plugin_events",
    "counter",
    "Events of the engine as a whole, as recorded in engine_event.",
    labels=(ENGINE, Label("kind", EVENTS)),
    layer="capture",
)
STEPS = Metric(
    "sparseety_plugin_step_overhead_seconds",
    "histogram",
    "Time that the engine's thread is held up by the plugin in a step.",
    "seconds",
    (ENGINE,),
    OVERHEAD_SECONDS,
    layer="capture",
)
ERRORS = Metric(
    "sparseety_plugin_errors",
    "counter",
    "Faults of the plugin, each of which ended a part of it.",
    labels=(ENGINE, Label("site", (*adapters.PARTS, "sparsity"))),
    layer="capture",
)
LAST = Metric(
    "sparseety_plugin_last_event_timestamp_seconds",
    "gauge",
    "Unix time of the last step recorded.",
    "seconds",
    (ENGINE,),
    layer="capture",
)

WRITER = writer_metrics("plugin")

ENGINES = (
    PROMPT, EVICTED, CONTEXT, ATTENDED, DRAFTS, ACCEPTED, REQUESTS, RATE, PAUSED, HOOKS, PLUGIN_EVENTS, STEPS,
    ERRORS, LAST, BUILD_INFO,
)  # fmt: skip
"""By the process that has the scheduler."""
WRITERS = (RECORDS, *WRITER)
"""By each process that writes a log."""
ACTIVATIONS = (ELEMENTS, ZEROS, TOKEN_ZEROS)
ROUTING = (ROUTED, BALANCE, ENTROPY, IDLE)
WORKERS = (*ACTIVATIONS, WEIGHT_ZEROS, *ROUTING, EXPERT_TOKENS, SPARSITY_CONFIG)
"""By the workers, where sparsity, experts or weights are counted."""

SUMMED = frozenset({HOOKS.name, WRITER.failing.name})
"""Gauges that add up over the processes of an engine. Of others the highest holds."""

METRICS = tuple(dict.fromkeys((*ENGINES, *WORKERS, *WRITERS)))
