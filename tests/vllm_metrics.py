"""vLLM 0.32's own metrics that our rules and dashboards ask for. tests/test_grafana_dashboards.py holds them against
the source of the vLLM that is installed."""

from sparseety.metrics import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, Label, Metric

_both = (Label("model_name", limit=1), Label("engine", limit=1))


def _counter(name: str, *labels: Label) -> Metric:
    return Metric(f"vllm:{name}", "counter", "Of vLLM.", labels=(*_both, *labels))


def _gauge(name: str) -> Metric:
    return Metric(f"vllm:{name}", "gauge", "Of vLLM.", labels=_both)


def _histogram(name: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(f"vllm:{name}", "histogram", "Of vLLM.", labels=_both, bounds=bounds)


VLLM = (
    _gauge("num_requests_running"),
    _gauge("num_requests_waiting"),
    _gauge("kv_cache_usage_perc"),
    _counter("num_preemptions"),
    _counter("prefix_cache_queries"),
    _counter("prefix_cache_hits"),
    _counter("generation_tokens"),
    _counter("request_success", Label("finished_reason", ("stop", "length", "abort", "error", "repetition"))),
    _counter("spec_decode_num_drafts"),
    _counter("spec_decode_num_draft_tokens"),
    _counter("spec_decode_num_accepted_tokens"),
    _counter("spec_decode_num_accepted_tokens_per_pos", Label("position", ("0", "1", "2", "3"))),
    _histogram("time_to_first_token_seconds", FIRST_TOKEN_SECONDS),
    _histogram("request_time_per_output_token_seconds", TOKEN_SECONDS[3:]),
    _histogram("e2e_request_latency_seconds", REQUEST_SECONDS[5:]),
    _histogram("request_queue_time_seconds", REQUEST_SECONDS[5:]),
    _histogram("request_prefill_time_seconds", REQUEST_SECONDS[5:]),
    _histogram("request_decode_time_seconds", REQUEST_SECONDS[5:]),
)
