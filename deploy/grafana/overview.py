"""Overview: the three layers on one page, and whether the page can be trusted."""

from deploy.grafana.asking import grown, per_second, quantiles, share
from deploy.grafana.panels import Dashboard, Link, Panel, Row

WHERE_TIME_GOES = Link("Where does the time go?", "sparseety-tokens")
BY_LAYER = Link("Which layer of the model?", "sparseety-sparsity")
CAPTURE = Link("How complete is the capture?", "sparseety-capture")
VERDICTS = Link("Which findings?", "sparseety-verification")

ZEROS = 'sparseety_activation_zero_elements_total{E, site="ffn_act", zero_kind="exact"}'
ELEMENTS = 'sparseety_activation_elements_total{E, site="ffn_act"}'


def _seen(title: str, says: str, query: str) -> Panel:
    """How many there are; that there is none is said in words, since whole rows then have nothing to show."""
    words = ((0, "not seen"),)
    queries = ((f"({query}) or vector(0)", ""),)
    return Panel(title, "stat", "short", "prometheus", says, queries, words=words, good_above=1, link=CAPTURE)


WATCHED = Row(
    "Who is watching? What is not seen here is not observed below.",
    (
        _seen("Proxies", "Proxies that answer: layers 1 and 2.", 'count(up{job="sparseety-proxy"} == 1)'),
        _seen("vLLM", "Servers whose own /metrics is scraped: the engine's view.", 'count(up{job="vllm"} == 1)'),
        _seen(
            "Plugin",
            "Engines with the plugin: layer 3, and what the sampler chose. With the proxy alone neither is known.",
            "count(count by (instance, engine) (sparseety_plugin_last_event_timestamp_seconds))",
        ),
        _seen("Verifiers", "On watch: whether the text is right.", 'count(up{job="sparseety-verifier"} == 1)'),
    ),
)

SERVICE = Row(
    "Is the service well? (layer 1: service)",
    (
        Panel(
            "Requests/s by outcome",
            "stacked",
            "reqps",
            "proxy",
            "Requests that ended, by how.",
            per_second("sparseety_proxy_requests_total", "{M}", "outcome"),
            8,
        ),
        Panel(
            "Complete replies",
            "stat",
            "percentunit",
            "proxy",
            "Share of the requests whose reply went to its end, whatever its status.",
            share('sparseety_proxy_requests_total{M, outcome="complete"}', "sparseety_proxy_requests_total{M}"),
            4,
            good_above=0.95,
        ),
        Panel(
            "Errors of the upstream/s",
            "stacked",
            "reqps",
            "proxy",
            "Requests that the server failed, by how, replies with an error status too; and those that the proxy "
            "refused to pass on.",
            (
                *per_second("sparseety_upstream_errors_total", "{S}", "error_type"),
                ("sum(rate(sparseety_proxy_requests_refused_total{S}[R]))", "refused by the proxy"),
            ),
        ),
        Panel(
            "Upstream",
            "states",
            "short",
            "proxy",
            "Whether the server behind each proxy answers its readiness probe.",
            (("min by (instance, upstream) (sparseety_upstream_up{S})", "{{instance}}"),),
            words=((0, "down"), (1, "up")),
            good_above=1,
        ),
        Panel(
            "Request duration",
            "lines",
            "s",
            "proxy",
            "From the request's last byte to the end of its reply.",
            quantiles("sparseety_proxy_request_duration_seconds", "{M}", 0.5, 0.95, 0.99),
            8,
            link=WHERE_TIME_GOES,
        ),
        Panel(
            "Requests in flight",
            "stacked",
            "short",
            "proxy",
            "Requests that have arrived and not ended.",
            (("sum by (endpoint) (sparseety_proxy_requests_in_flight{S})", "{{endpoint}}"),),
            8,
        ),
        Panel(
            "In the engine",
            "lines",
            "short",
            "vllm",
            "Requests that vLLM computes, and that wait for it: a queue is the first cause of a late first token.",
            (("sum(vllm:num_requests_running{E})", "running"), ("sum(vllm:num_requests_waiting{E})", "waiting")),
            8,
            link=WHERE_TIME_GOES,
        ),
    ),
)

TOKENS = Row(
    "Do the tokens come as they should? (layer 2: tokens)",
    (
        Panel(
            "Tokens per minute",
            "lines",
            "short",
            "proxy",
            "As far as replies say how many there were; see requests without a count on the page Tokens.",
            (
                ("60 * sum(rate(sparseety_prompt_tokens_total{M}[R]))", "in"),
                ("60 * sum(rate(sparseety_generation_tokens_total{M}[R]))", "out"),
            ),
            8,
        ),
        Panel(
            "Time to first token: client and engine",
            "lines",
            "s",
            "proxy",
            "Both over the same buckets. What lies between them is network, proxy and vLLM's API server.",
            (
                *quantiles("sparseety_time_to_first_token_seconds", "{M}", 0.5, 0.99, before="client "),
                *quantiles("vllm:time_to_first_token_seconds", "{E}", 0.5, 0.99, before="engine "),
            ),
            8,
            link=WHERE_TIME_GOES,
        ),
        Panel(
            "Time per output token",
            "lines",
            "s",
            "proxy",
            "Of each stream, first token left out: (last - first) / (tokens - 1), as seen by the proxy.",
            quantiles("sparseety_request_time_per_output_token_seconds", "{M}", 0.5, 0.99),
            8,
            link=WHERE_TIME_GOES,
        ),
    ),
)

SPARSITY = Row(
    "Is sparsity used? (layer 3: sparsity; needs the plugin but for the prefix cache)",
    (
        Panel(
            "Activation zeros",
            "stat",
            "percentunit",
            "sparsity",
            "Share of exact zeros at the input of the down projections, over all layers and recorded requests.",
            share(ZEROS, ELEMENTS),
            link=BY_LAYER,
        ),
        Panel(
            "Prefix cache hits",
            "stat",
            "percentunit",
            "vllm",
            "Share of the prompt tokens looked up that vLLM found in its prefix cache.",
            share("vllm:prefix_cache_hits_total{E}", "vllm:prefix_cache_queries_total{E}"),
            link=BY_LAYER,
        ),
        Panel(
            "Drafts accepted",
            "stat",
            "percentunit",
            "plugin",
            "Share of the speculative tokens that were accepted; no traffic where nothing is drafted.",
            share('sparseety_draft_tokens_total{E, outcome="accepted"}', "sparseety_draft_tokens_total{E}"),
            link=BY_LAYER,
        ),
        Panel(
            "Least even layer of experts",
            "stat",
            "percentunit",
            "experts",
            "Mean load / highest load over the experts of a layer, in the layer where it is lowest; 100 % is even.",
            (("min(sparseety_moe_load_balance_ratio{E})", ""),),
            link=BY_LAYER,
        ),
    ),
)

TRUST = Row(
    "Can this page be trusted?",
    (
        Panel(
            "Wrong text (24 h)",
            "stat",
            "percentunit",
            "verifier",
            "Share of the requests judged whose client got other text than was sampled.",
            (
                (
                    grown("sparseety_verify_requests_total", '{M, verdict="fail"}', "24h")
                    + " / "
                    + grown("sparseety_verify_requests_total", "{M}", "24h"),
                    "",
                ),
            ),
            bad_above=1e-9,
            link=VERDICTS,
        ),
        Panel(
            "Checked (24 h)",
            "stat",
            "percentunit",
            "verifier",
            "Share of the requests judged that could be checked to the end: pass or fail.",
            (
                (
                    grown("sparseety_verify_requests_total", '{M, verdict!="incomplete"}', "24h")
                    + " / "
                    + grown("sparseety_verify_requests_total", "{M}", "24h"),
                    "",
                ),
            ),
            good_above=0.99,
            link=VERDICTS,
        ),
        Panel(
            "Records lost (1 h)",
            "stat",
            "short",
            "capture",
            "Of any of them: the log is not complete, says so, and each request concerned is judged incomplete.",
            ((grown("sparseety_capture_records_dropped_total", "{S}", "1h"), ""),),
            bad_above=1e-9,
            link=CAPTURE,
        ),
        Panel(
            "Share of requests recorded now",
            "stat",
            "percentunit",
            "capture",
            "What is counted of recorded requests is that share of all. 0 for the plugin: it is paused.",
            (("min by (source) (sparseety_capture_sampling_ratio{S})", "{{source}}"),),
            link=CAPTURE,
        ),
    ),
)

OVERVIEW = Dashboard(
    "sparseety-overview",
    "Overview",
    "Service, tokens and sparsity on one page. A panel without a series says what it would need; a gap or the words "
    "No traffic mean that there was nothing to measure.",
    (WATCHED, SERVICE, TOKENS, SPARSITY, TRUST),
    ("job", "instance", "model_name", "engine"),
)
