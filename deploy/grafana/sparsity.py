"""Sparsity: what the model, its caches and its drafts left out, by layer of the model."""

from deploy.grafana.asking import mean, per_second, quantiles, share
from deploy.grafana.overview import CAPTURE, ELEMENTS, ZEROS
from deploy.grafana.panels import Dashboard, Link, Panel, Row

_THIS_LAYER = Link("Only this layer", "sparseety-sparsity", layer=True)
_EXPERTS = 'sparseety_moe_expert_tokens_total{E, layer=~"$layer"}'


def _of_layer(series: str) -> str:
    return series.replace("{E", '{E, layer=~"$layer"')


def _zeros(by: str, phase: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Of rates, hence by what was counted: a mean of ratios would give few tokens as much weight as many."""
    chosen = f"{{E, phase{phase}"
    return share(_of_layer(ZEROS).replace("{E", chosen), _of_layer(ELEMENTS).replace("{E", chosen), by, legend)


_BY_LAYER = _zeros("layer", '=~"$phase"', "{{layer}}")
_YESTERDAY = _BY_LAYER[0][0].replace("[R]", "[R] offset 1d")


ACTIVATION = Row(
    "Activations: which layer of the model? (needs the plugin)",
    (
        Panel(
            "Zeros by layer",
            "rows",
            "percentunit",
            "sparsity",
            "Share of exact zeros at the input of a layer's down projection. The layer all stands for all of them "
            "where SPARSEETY_HOOK_METRICS_DETAIL is totals.",
            _BY_LAYER,
            12,
            link=_THIS_LAYER,
        ),
        Panel(
            "Zeros by phase",
            "lines",
            "percentunit",
            "sparsity",
            "Of prompts (prefill) and of tokens generated (decode).",
            share(_of_layer(ZEROS), _of_layer(ELEMENTS), "phase", "{{phase}}"),
        ),
        Panel(
            "Exact and near zeros",
            "lines",
            "percentunit",
            "sparsity",
            "near: up to the threshold in sparseety_sparsity_config_info; exact zeros are among them.",
            share(
                _of_layer('sparseety_activation_zero_elements_total{E, site="ffn_act"}'),
                _of_layer(ELEMENTS),
                "zero_kind",
                "{{zero_kind}}",
                of_all=True,
            ),
        ),
        Panel(
            "Zeros since yesterday, by layer",
            "bars",
            "percentunit",
            "sparsity",
            "Now less the same time yesterday. Look at the output's quality before calling a rise an improvement.",
            ((f"{_BY_LAYER[0][0]} - {_YESTERDAY}", "{{layer}}"),),
            12,
            link=_THIS_LAYER,
        ),
        Panel(
            "Zeros of a token",
            "lines",
            "percentunit",
            "single tokens",
            "Share of exact zeros of one token over all layers: how far tokens differ.",
            quantiles(
                "sparseety_activation_token_zero_ratio", '{E, zero_kind="exact", phase=~"$phase"}', 0.1, 0.5, 0.9
            ),
        ),
        Panel(
            "Zeros of the weights",
            "table",
            "percentunit",
            "weights",
            "Counted once, after loading.",
            (("max by (layer, module) (sparseety_weight_zero_ratio{N})", ""),),
        ),
    ),
)

EXPERTS = Row(
    "Experts (needs the plugin, and a model that has experts)",
    (
        Panel(
            "Evenness by layer",
            "rows",
            "percentunit",
            "experts",
            "Mean load / highest load over a layer's experts in the last window; 100 % is even.",
            (('min by (layer) (sparseety_moe_load_balance_ratio{E, layer=~"$layer"})', "{{layer}}"),),
            8,
            link=_THIS_LAYER,
        ),
        Panel(
            "Entropy of the routing by layer",
            "lines",
            "percentunit",
            "experts",
            "Of a layer's loads in the last window, against even ones.",
            (('min by (layer) (sparseety_moe_routing_entropy_ratio{E, layer=~"$layer"})', "{{layer}}"),),
            8,
            link=_THIS_LAYER,
        ),
        Panel(
            "Idle experts by layer",
            "lines",
            "short",
            "experts",
            "Those that no token went to in the last window.",
            (('max by (layer) (sparseety_moe_idle_experts{E, layer=~"$layer"})', "{{layer}}"),),
            8,
            link=_THIS_LAYER,
        ),
        Panel(
            "Choices of an expert/s",
            "lines",
            "short",
            "experts",
            "Tokens x top-k, by phase.",
            per_second("sparseety_moe_tokens_routed_total", '{E, layer=~"$layer"}', "phase"),
            12,
        ),
        Panel(
            "Ten busiest experts",
            "table",
            "percentunit",
            "single experts",
            "Their share of their layer's choices.",
            (
                (
                    f"topk(10, sum by (layer, expert) (rate({_EXPERTS}[R]))"
                    f" / on (layer) group_left () sum by (layer) (rate({_EXPERTS}[R])))",
                    "",
                ),
            ),
            12,
        ),
    ),
)

CACHE = Row(
    "Prefix cache, KV memory, attention",
    (
        Panel(
            "Prompt tokens by how they came",
            "stacked",
            "short",
            "plugin",
            "Computed, or taken from a cache.",
            per_second("sparseety_prompt_tokens_by_status_total", "{E}", "status"),
        ),
        Panel(
            "KV memory in use",
            "lines",
            "percentunit",
            "vllm",
            "Of each engine.",
            (("max by (instance, engine) (vllm:kv_cache_usage_perc{E})", "{{instance}} {{engine}}"),),
        ),
        Panel(
            "KV tokens given up/s",
            "lines",
            "short",
            "plugin",
            "By preemption of their request; by capacity where KV blocks are recorded.",
            per_second("sparseety_kv_evicted_tokens_total", "{E}", "reason"),
        ),
        Panel(
            "Context not read",
            "lines",
            "percentunit",
            "plugin",
            "Share of the positions that full attention would have read and layers of this type do not. Derived from "
            "the model's configuration; output tokens only.",
            (
                (
                    "1 - sum by (layer_type) (rate(sparseety_attention_attended_tokens_total{E}[R]))"
                    " / sum by (layer_type) (rate(sparseety_attention_context_tokens_total{E}[R]))",
                    "{{layer_type}}",
                ),
            ),
        ),
    ),
)

DRAFTS = Row(
    "Speculative decoding",
    (
        Panel(
            "Accepted by position",
            "lines",
            "percentunit",
            "drafts",
            "Share of the drafts whose token at this position was accepted.",
            share(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total{E}",
                "vllm:spec_decode_num_drafts_total{E}",
                "position",
                "{{position}}",
                of_all=True,
            ),
            8,
        ),
        Panel(
            "Tokens of a step",
            "lines",
            "short",
            "plugin",
            "Accepted ones and the one that comes with them (mean), of steps with drafts.",
            (("1 + " + mean("sparseety_draft_accepted_length", "{E}", "")[0][0], "tokens"),),
            8,
        ),
        Panel(
            "Rejected drafts for each output token",
            "lines",
            "short",
            "plugin",
            "What drafting costs: tokens computed for nothing.",
            share(
                'sparseety_draft_tokens_total{E, outcome="rejected"}',
                "vllm:generation_tokens_total{E}",
                legend="rejected",
            ),
            8,
        ),
    ),
)

PAYS = Row(
    "Does sparsity pay? Compare before reading anything into it.",
    (
        Panel(
            "Time per output token and zeros",
            "lines",
            "s",
            "sparsity",
            "Both over the same time. Load moves the first, prompts move the second: two lines that move together "
            "prove nothing by themselves.",
            (
                *quantiles("vllm:request_time_per_output_token_seconds", "{E}", 0.5, before="engine "),
                *_zeros("", '="decode"', "zeros (decode)"),
            ),
            12,
            right="percentunit",
            link=CAPTURE,
        ),
        Panel(
            "Settings in force",
            "table",
            "short",
            "sparsity",
            "Numbers counted under other settings do not compare.",
            (("max by (model_name, near_zero_threshold, site_set) (sparseety_sparsity_config_info{N}) == 1", ""),),
            12,
        ),
    ),
)

SPARSITY = Dashboard(
    "sparseety-sparsity",
    "Sparsity",
    "What was left out, by layer of the model. Without the plugin only vLLM's own numbers are here; what it would need "
    "stands on each panel.",
    (ACTIVATION, EXPERTS, CACHE, DRAFTS, PAYS),
    ("model_name", "engine", "layer", "phase"),
)
