"""Tokens: where the time goes, and in which form the tokens arrive."""

from deploy.grafana.asking import mean, per_second, quantiles, share
from deploy.grafana.overview import BY_LAYER, CAPTURE
from deploy.grafana.panels import Dashboard, Panel, Row

_FIRST = "sparseety_time_to_first_token_seconds"
_PER_TOKEN = "sparseety_request_time_per_output_token_seconds"


# Not vLLM's latency from end to end: its API server's own time is in that, and would be in no band.
_IN_THE_ENGINE = (
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
)


def _ratio(histogram: str, which: str) -> str:
    return mean(histogram, which, "")[0][0]


TIME = Row(
    "Where does the time go? The highest band names the layer: service (outside, queue) or engine (prefill, decode).",
    (
        Panel(
            "Mean request, by where its time goes",
            "stacked",
            "s",
            "vllm",
            "Means, since they add up, to the proxy's mean duration of complete replies. queue, prefill and decode are "
            "the engine's; outside is what is left: client, network, proxy and vLLM's API server. Requests past the "
            "proxy blur it.",
            (
                *(query for part in _IN_THE_ENGINE for query in mean(part, "{E}", part.split("_")[1])),
                (
                    _ratio("sparseety_proxy_request_duration_seconds", '{M, endpoint!="other", outcome="complete"}')
                    + "".join(f" - {_ratio(part, '{E}')}" for part in _IN_THE_ENGINE),
                    "outside",
                ),
            ),
            12,
            link=BY_LAYER,
        ),
        Panel(
            "First token: client less engine (p50)",
            "lines",
            "s",
            "vllm",
            "What network, proxy and API server add to the engine's time to first token. Event streams only on one "
            "side, all requests on the other.",
            (
                (
                    quantiles(_FIRST, "{M}", 0.5)[0][0]
                    + " - "
                    + quantiles("vllm:time_to_first_token_seconds", "{E}", 0.5)[0][0],
                    "client - engine",
                ),
            ),
        ),
        Panel(
            "Added by the proxy itself (p99)",
            "lines",
            "s",
            "proxy",
            "To a request before it is sent on, and to each piece of a reply.",
            quantiles("sparseety_proxy_overhead_seconds", "{S}", 0.99, by="stage"),
            link=CAPTURE,
        ),
        Panel(
            "Prefill: what makes it long",
            "lines",
            "percentunit",
            "vllm",
            "Share of prompt tokens found in vLLM's prefix cache (low: prompts are computed in full), and of KV memory "
            "in use (near 100 %: requests wait, or are preempted and computed again).",
            (
                *share("vllm:prefix_cache_hits_total{E}", "vllm:prefix_cache_queries_total{E}", legend="cache hits"),
                ("max(vllm:kv_cache_usage_perc{E})", "KV in use"),
            ),
            8,
            link=BY_LAYER,
        ),
        Panel(
            "Decode: time per output token",
            "lines",
            "s",
            "vllm",
            "The client's and the engine's. Where both rise, look at the sparsity layer: drafts, experts, zeros.",
            (
                *quantiles(_PER_TOKEN, "{M}", 0.5, before="client "),
                *quantiles("vllm:request_time_per_output_token_seconds", "{E}", 0.5, before="engine "),
            ),
            8,
            link=BY_LAYER,
        ),
        Panel(
            "Preemptions/s",
            "lines",
            "short",
            "vllm",
            "Requests put back for want of KV memory; what they had is computed again.",
            (("sum(rate(vllm:num_preemptions_total{E}[R]))", "preemptions"),),
            8,
            link=BY_LAYER,
        ),
    ),
)

LATENCY = Row(
    "Latency as the client sees it",
    (
        Panel(
            "Time to first token",
            "heatmap",
            "s",
            "proxy",
            "From the request's last byte to the first event that bears a token; an event with a role alone is none.",
            ((f"sum by (le) (increase({_FIRST}_bucket{{M}}[R]))", "{{le}}"),),
            8,
        ),
        Panel(
            "Time per output token",
            "heatmap",
            "s",
            "proxy",
            "Of each stream of two tokens or more.",
            ((f"sum by (le) (increase({_PER_TOKEN}_bucket{{M}}[R]))", "{{le}}"),),
            8,
        ),
        Panel(
            "Between two events",
            "lines",
            "s",
            "proxy",
            "Gaps between events that bear tokens; 0 for those that came in one read.",
            quantiles("sparseety_inter_chunk_latency_seconds", "{M}", 0.5, 0.99),
            8,
        ),
        Panel(
            "First event of any kind",
            "lines",
            "s",
            "proxy",
            "The first event may bear no token; OpenTelemetry's time to first chunk.",
            quantiles("sparseety_time_to_first_chunk_seconds", "{M}", 0.5, 0.99),
            12,
        ),
        Panel(
            "Upstream's answer",
            "lines",
            "s",
            "proxy",
            "From the request handed on to the head of its reply.",
            quantiles("sparseety_proxy_response_start_seconds", "{M}", 0.5, 0.99),
            12,
        ),
    ),
)

VOLUME = Row(
    "How much, and of which shape?",
    (
        Panel(
            "Output tokens/s",
            "stacked",
            "short",
            "proxy",
            "By model, as far as replies say how many there were.",
            per_second("sparseety_generation_tokens_total", "{M}", "model_name"),
            8,
        ),
        Panel(
            "Output tokens of a request",
            "lines",
            "short",
            "proxy",
            "All choices together.",
            quantiles("sparseety_request_generation_tokens", "{M}", 0.5, 0.9, 0.99),
            8,
        ),
        Panel(
            "Prompt tokens of a request",
            "lines",
            "short",
            "proxy",
            "Where the reply's usage states them.",
            quantiles("sparseety_request_prompt_tokens", "{M}", 0.5, 0.9, 0.99),
            8,
        ),
        Panel(
            "Finish reasons",
            "shares",
            "short",
            "proxy",
            "Choices by the reason their client was told.",
            per_second("sparseety_requests_finished_total", "{M}", "finished_reason"),
            8,
        ),
        Panel(
            "Characters of a reply",
            "lines",
            "short",
            "proxy",
            "Unicode code points of a reply's text, all choices.",
            quantiles("sparseety_request_output_characters", "{M}", 0.5, 0.99),
            8,
        ),
        Panel(
            "Prompt tokens from the cache",
            "lines",
            "percentunit",
            "proxy",
            "As the server says in usage; only where it does.",
            share("sparseety_prompt_tokens_cached_total{M}", "sparseety_prompt_tokens_total{M}", legend="cached"),
            8,
        ),
    ),
)

CHUNKS = Row(
    "In which pieces? Are the counts right?",
    (
        Panel(
            "Tokens of an event",
            "heatmap",
            "short",
            "proxy",
            "Where events state them. 0: text was held back. More than 1: speculative decoding, or a busy server.",
            (("sum by (le) (increase(sparseety_chunk_tokens_bucket{M}[R]))", "{{le}}"),),
            8,
        ),
        Panel(
            "Tokens of an event (mean)",
            "lines",
            "short",
            "proxy",
            "1 for plain decoding.",
            mean("sparseety_chunk_tokens", "{M}", "tokens"),
            4,
        ),
        Panel(
            "Events/s by kind",
            "stacked",
            "short",
            "proxy",
            "Records made of stream events.",
            per_second("sparseety_stream_chunks_total", "{M}", "kind"),
        ),
        Panel(
            "Output tokens: proxy / engine",
            "lines",
            "percentunit",
            "vllm",
            "100 %: every token that vLLM generated was counted in a reply. Below: requests past the proxy, or replies "
            "that do not say how many there were.",
            share("sparseety_generation_tokens_total{M}", "vllm:generation_tokens_total{E}", legend="proxy / engine"),
        ),
        Panel(
            "Requests without a count/s",
            "stacked",
            "reqps",
            "proxy",
            "Whose output tokens are in no counter, and why.",
            per_second("sparseety_requests_uncounted_total", "{M}", "reason"),
            12,
        ),
        Panel(
            "Bytes/s",
            "lines",
            "Bps",
            "proxy",
            "Of bodies, relayed.",
            per_second("sparseety_proxy_bytes_total", "{S}", "direction"),
            12,
        ),
    ),
)

TOKENS = Dashboard(
    "sparseety-tokens",
    "Tokens",
    "From slow to which layer: the first row splits a request's time, and its panels lead on to the layer concerned.",
    (TIME, LATENCY, VOLUME, CHUNKS),
    ("job", "instance", "model_name", "engine"),
)
