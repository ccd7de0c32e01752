"""Every metric that the proxy publishes, said once: docs/metrics.md, the bound on series and /metrics itself are made
from this. What is exported is what stands here, and nothing else. No metrics library in here."""

from dataclasses import replace
from typing import get_args

from sparseety.metrics import (
    BUILD_INFO,
    FIRST_TOKEN_SECONDS,
    OVERHEAD_SECONDS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    Label,
    Metric,
    most_series,
    steps_1_2_5,
)
from sparseety.records import Endpoint, Kind, Outcome
from sparseety.writer_metrics import writer_metrics

OTHER = "other"
UPSTREAM = "default"  # the proxy has one, without a name
SOURCE = "proxy"
MODELS = 8  # names of models that get series of their own, by default

ENDPOINTS = get_args(Endpoint)
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort", "error", "repetition", "none", OTHER)
ERROR_TYPES = ("connect", "tls", "read_timeout", "write_timeout", "reset", "protocol", "http_4xx", "http_5xx")
COUNT_SOURCES = ("usage", "token_ids", "logprobs")
REFUSALS = ("bad_request", "headers_too_large", "request_timeout", "not_implemented", "http_version", "internal_error")
PAUSE_REASONS = ("latency", "disk")

MODEL = Label("model_name", limit=MODELS + 1)  # and "other"
_endpoint = Label("endpoint", ENDPOINTS)
_any_endpoint = Label("endpoint", (*ENDPOINTS, OTHER))
_outcome = Label("outcome", get_args(Outcome))
_source = Label("source", (SOURCE,))

# ------------------------------------------------------------------------------------------------- the service layer

BUILD = BUILD_INFO
REQUESTS = Metric(
    "sparseety_proxy_requests",
    "counter",
    "Requests that have ended, in whatever way. stream: the reply was an event stream. outcome: as in the log's "
    "stream_done and response; a reply with an HTTP error status is complete, see sparseety_upstream_errors_total. "
    "model_name: the reply's model, else the one asked for where a reply has named it before, else other. "
    "Requests that were not relayed are in sparseety_proxy_requests_refused_total instead.",
    labels=(MODEL, _any_endpoint, Label("stream", ("false", "true")), _outcome),
    layer="service",
)
REFUSED = Metric(
    "sparseety_proxy_requests_refused",
    "counter",
    "Requests that the proxy answered itself and relayed nothing of, or broke off in their body, because they are no "
    "HTTP/1 of one reading or ask for what it does not do. code: the type in the error that it answers with. They are "
    "in no log.",
    labels=(Label("code", REFUSALS),),
    layer="service",
)
IN_FLIGHT = Metric(
    "sparseety_proxy_requests_in_flight",
    "gauge",
    "Requests whose head has arrived and that have not ended.",
    labels=(_any_endpoint,),
    layer="service",
)
OPEN_STREAMS = Metric(
    "sparseety_proxy_open_streams",
    "gauge",
    "Event streams whose head has arrived and that are being relayed now.",
    layer="service",
)
DURATION = Metric(
    "sparseety_proxy_request_duration_seconds",
    "histogram",
    "From the request's last body byte received from the client (its head, where the body never came to its end) to "
    "the end of the transfer: the reply's last byte handed to the client's connection, or the moment it broke off.",
    "seconds",
    (MODEL, _any_endpoint, _outcome),
    REQUEST_SECONDS,
    "service",
)
RESPONSE_START = Metric(
    "sparseety_proxy_response_start_seconds",
    "histogram",
    "From the request's last byte handed to the upstream connection to the head of its reply received. Not observed "
    "where no reply came, or where it came before the request's end.",
    "seconds",
    (MODEL, _any_endpoint),
    FIRST_TOKEN_SECONDS,
    "service",
)
OVERHEAD = Metric(
    "sparseety_proxy_overhead_seconds",
    "histogram",
    "Time that the proxy adds. request: from the last body byte received to the last byte handed to the upstream "
    "connection, opening one included, once a request. chunk: from a read of the reply taken up to it handed to the "
    "client's connection, every 16th read of all replies; a wait for a client that does not read is in it.",
    "seconds",
    (Label("stage", ("request", "chunk")),),
    OVERHEAD_SECONDS,
    "service",
)
BYTES = Metric(
    "sparseety_proxy_bytes",
    "counter",
    "Body bytes relayed, of open requests too. request: sent on to the upstream; response: received from it.",
    "bytes",
    (Label("direction", ("request", "response")),),
    layer="service",
)
UPSTREAM_ERRORS = Metric(
    "sparseety_upstream_errors",
    "counter",
    "Requests that the upstream failed, by how: no connection (connect, tls), a limit of the proxy's own "
    "(read_timeout, write_timeout), closed or reset before the reply was complete (reset), no valid HTTP (protocol), "
    "or a reply with such a status (http_4xx, http_5xx), which may break off besides.",
    labels=(Label("error_type", ERROR_TYPES),),
    layer="service",
)
UPSTREAM_UP = Metric(
    "sparseety_upstream_up",
    "gauge",
    "1 where the last probe of the upstream's /health was answered with less than 500 within 2 s, else 0. A scrape "
    "probes, unless one was probed within 5 s. The one upstream has the name default.",
    labels=(Label("upstream", (UPSTREAM,)),),
    layer="service",
)
WORKERS = Metric("sparseety_proxy_workers", "gauge", "Worker processes that should run.", layer="service")
WORKERS_ALIVE = Metric(
    "sparseety_proxy_workers_alive", "gauge", "Worker processes that run and have said so.", layer="service"
)
WORKERS_SILENT = Metric(
    "sparseety_proxy_workers_silent",
    "gauge",
    "Worker processes that run and have said nothing for 10 s.",
    layer="service",
)
RESTARTS = Metric(
    "sparseety_proxy_worker_restarts",
    "counter",
    "Worker processes that died and were replaced. What one counted in its last second may be missing from all sums.",
    layer="service",
)

# --------------------------------------------------------------------------------------------------- the token layer

_FROM_BODY = "From the request's last body byte received from the client to "
_TOKEN_BEARING = "text of content, reasoning or a tool call, a tool call's name, or token ids"
_COUNTED = (
    "count_source, the best there is, one a request: usage (the server's statement), token_ids (in the reply), "
    "logprobs (their number). What has none of them is in sparseety_requests_uncounted_total."
)

FIRST_TOKEN = Metric(
    "sparseety_time_to_first_token_seconds",
    "histogram",
    f"{_FROM_BODY}the read that completed the first event with a token: {_TOKEN_BEARING}; an event with a role alone "
    "is none. Event streams only.",
    "seconds",
    (MODEL, _endpoint),
    FIRST_TOKEN_SECONDS,
    "token",
)
FIRST_CHUNK = Metric(
    "sparseety_time_to_first_chunk_seconds",
    "histogram",
    f"{_FROM_BODY}the read that completed the first event of the stream, of any kind.",
    "seconds",
    (MODEL, _endpoint),
    FIRST_TOKEN_SECONDS,
    "token",
)
INTER_CHUNK = Metric(
    "sparseety_inter_chunk_latency_seconds",
    "histogram",
    f"Between two events of a stream that bear tokens ({_TOKEN_BEARING}), of any choice, by the reads that completed "
    "them; 0 for events that came in one read.",
    "seconds",
    (MODEL, _endpoint),
    TOKEN_SECONDS,
    "token",
)
PER_TOKEN = Metric(
    "sparseety_request_time_per_output_token_seconds",
    "histogram",
    "Of each event stream: (last event with a token - first one) / (output tokens - 1). Not observed for fewer than 2 "
    "output tokens, for more than one choice, nor where the tokens are uncounted.",
    "seconds",
    (MODEL, _endpoint),
    TOKEN_SECONDS,
    "token",
)
PROMPT_TOKENS = Metric(
    "sparseety_prompt_tokens",
    "counter",
    "Input tokens of requests that have ended, cached ones included, as the server's usage states them; it is the only "
    "source (count_source) of theirs. Requests without usage are missing here.",
    "tokens",
    (MODEL, _endpoint, Label("count_source", ("usage",))),
    layer="token",
)
GENERATION_TOKENS = Metric(
    "sparseety_generation_tokens",
    "counter",
    "Output tokens of requests that have ended, all choices: sampled ones, the token that stops included where the "
    f"server counts it. {_COUNTED}",
    "tokens",
    (MODEL, _endpoint, Label("count_source", COUNT_SOURCES)),
    layer="token",
)
CACHED_TOKENS = Metric(
    "sparseety_prompt_tokens_cached",
    "counter",
    "Input tokens that the server says it took from its prefix cache (usage's cached_tokens), of requests that have "
    "ended.",
    "tokens",
    (MODEL, _endpoint),
    layer="token",
)
REQUEST_PROMPT = Metric(
    "sparseety_request_prompt_tokens",
    "histogram",
    "Input tokens of each request, where usage states them.",
    "tokens",
    (MODEL, _endpoint),
    steps_1_2_5(200_000),
    "token",
)
REQUEST_GENERATION = Metric(
    "sparseety_request_generation_tokens",
    "histogram",
    "Output tokens of each request, all choices, where they are counted.",
    "tokens",
    (MODEL, _endpoint),
    steps_1_2_5(200_000),
    "token",
)
CHARACTERS = Metric(
    "sparseety_request_output_characters",
    "histogram",
    "Unicode code points of each reply that was read: content, reasoning and tool-call arguments, all choices, as far "
    "as it came.",
    "characters",
    (MODEL, _endpoint),
    steps_1_2_5(1_000_000),
    "token",
)
CHUNK_TOKENS = Metric(
    "sparseety_chunk_tokens",
    "histogram",
    "Tokens of one choice in one stream event, where the event states them (token_ids, or else logprobs). 0: text was "
    "held back; more than 1: speculative decoding, stream_interval or coalescing.",
    "tokens",
    (MODEL, _endpoint),
    (0, 1, 2, 3, 4, 5, 6, 8, 16, 32, 64),
    "token",
)
CHUNKS = Metric(
    "sparseety_stream_chunks",
    "counter",
    "Chunk records made of stream events: one for each choice and kind in an event. kind: as in the log.",
    labels=(MODEL, _endpoint, Label("kind", get_args(Kind))),
    layer="token",
)
FINISHED = Metric(
    "sparseety_requests_finished",
    "counter",
    "Choices of replies that were read, by finish reason; n=2 counts 2. The words of /v1/responses and /v1/messages "
    "are put into those of chat. none: the choice had begun and its stream ended without a reason.",
    labels=(MODEL, _endpoint, Label("finished_reason", FINISH_REASONS)),
    layer="token",
)
UNCOUNTED = Metric(
    "sparseety_requests_uncounted",
    "counter",
    "Ended requests of a known endpoint with a 2xx reply whose output tokens are in no counter. no_count: the reply "
    "said nothing of them; unread: not readable (too large, not its JSON, cut off); paused, failed: the capture "
    "was, see sparseety_capture_sampled_requests_total; capture_off: --no-capture.",
    labels=(MODEL, _endpoint, Label("reason", ("no_count", "unread", "paused", "failed", "capture_off"))),
    layer="token",
)

# ---------------------------------------------------------------------------------------------------- capture health

SAMPLED = Metric(
    "sparseety_capture_sampled_requests",
    "counter",
    "Requests that have ended, of any path, by what became of their capture. captured: to the end; paused: not, or not "
    "to the end, as the capture was paused; failed: given up by a fault of the proxy's own; skipped: --no-capture.",
    labels=(_source, Label("decision", ("captured", "skipped", "paused", "failed"))),
    layer="capture",
)
SAMPLING_RATIO = Metric(
    "sparseety_capture_sampling_ratio",
    "gauge",
    "Share of requests that is to be recorded: 1, or 0 with --no-capture. A pause does not change it.",
    "ratio",
    (_source,),
    layer="capture",
)
RECORDS = Metric(
    "sparseety_capture_records",
    "counter",
    "Records handed to the log's writer, by the record's event.",
    labels=(_source, Label("kind", ("request_start", "chunk", "stream_done", "response", "gap"))),
    layer="capture",
)
(
    RECORDS_WRITTEN,
    RECORDS_DROPPED,
    WRITTEN_BYTES,
    QUEUE_BYTES,
    QUEUE_LIMIT,
    FLUSH,
    LAST_WRITE,
    DISK_FREE,
    SEGMENTS,
    LOGS_FAILING,
) = writer_metrics(SOURCE, absent="with `--no-capture`")
PAUSED = Metric(
    "sparseety_capture_paused",
    "gauge",
    "Workers whose capture is paused now to protect serving. latency: its own work delays the relay; disk: its disk "
    "does not keep up and the queue stays full.",
    labels=(_source, Label("reason", PAUSE_REASONS)),
    layer="capture",
)
PAUSES = Metric(
    "sparseety_capture_pauses",
    "counter",
    "Times that a worker's capture was paused, by reason, as in sparseety_capture_paused.",
    labels=(_source, Label("reason", PAUSE_REASONS)),
    layer="capture",
)

SPANS = Metric(
    "sparseety_otlp_spans",
    "counter",
    "OpenTelemetry spans of requests that have ended: taken by the collector (exported), not taken by it (failed), or "
    "given up because too many waited (dropped). All 0 without otlp_endpoint.",
    labels=(Label("result", ("exported", "failed", "dropped")),),
    layer="capture",
)

METRICS: tuple[Metric, ...] = tuple({each: None for each in globals().copy().values() if isinstance(each, Metric)})
BY_NAME = {metric.name: metric for metric in METRICS}


def series_bound(models: int) -> int:
    """The samples that one scrape has at most, where so many models get series of their own. Workers do not multiply:
    the parent adds them up, and keeps to one set of names."""
    model = replace(MODEL, limit=models + 1)
    return most_series(
        replace(metric, labels=tuple(model if label is MODEL else label for label in metric.labels))
        for metric in METRICS
    )
