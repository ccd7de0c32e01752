"""One OpenTelemetry span for each request, sent to a collector from a thread of its own. Optional: the extra `otel`.

A span is made after its request has ended, of what the capture read. What the queue cannot hold or the collector does
not take is counted and given up: serving never waits for it.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

import sparseety
from proxy.headers import HeaderList, get
from proxy.tally import Tally
from sparseety.errors import SparseetyError
from sparseety.records import Endpoint, Outcome

log = logging.getLogger("sparseety.proxy")

WAITING = 2048  # requests whose spans may wait
BATCH = 256  # spans sent at once
BATCH_SECONDS = 1.0  # that they wait for each other
EXPORT_SECONDS = 5.0  # for the collector to take a batch, tries included
SAY_AGAIN_SECONDS = 600.0
RESULTS = ("exported", "failed", "dropped")

OPERATIONS: dict[Endpoint, str] = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
}

Send = Callable[[Sequence[Any]], bool]
"""Sends spans; False: they were not taken."""


class Ended(msgspec.Struct, frozen=True):
    """A request that has ended."""

    uuid: str
    endpoint: Endpoint
    carried: dict[str, str]  # headers of the request that a span needs, by name
    began: float  # Unix seconds: its head arrived
    ended: float
    outcome: Outcome
    tally: Tally


CARRIED = ("traceparent", "tracestate", "x-request-id")


def carried(headers: HeaderList) -> dict[str, str]:
    """Of a request's headers, what its span needs. No others wait in memory."""
    found = {name: get(headers, name.encode()) for name in CARRIED}
    return {name: value.decode("latin-1") for name, value in found.items() if value is not None}


class Spans:
    """Takes requests that have ended, from the thread that serves; `close` ends it."""

    def __init__(self, endpoint: str, upstream: str) -> None:
        """Raises SparseetyError: OpenTelemetry is not installed."""
        self.counts = dict.fromkeys(RESULTS, 0)
        self._endpoint = endpoint
        self._make, self._send, self._end = _sdk(endpoint, upstream)
        self._waiting: queue.Queue[Ended] = queue.Queue(WAITING)
        self._stopping = threading.Event()
        self._said = -SAY_AGAIN_SECONDS
        self._thread = threading.Thread(target=self._run, name="sparseety-spans", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self, seconds: float) -> None:
        """Send the rest, for no longer than that."""
        self._stopping.set()
        self._thread.join(seconds)
        self._end()

    def _run(self) -> None:
        while not self._stopping.wait(BATCH_SECONDS):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while batch := self._batch():
            try:
                spans = [span for each in batch if (span := self._make(each)) is not None]
                sent = not spans or self._send(spans)
            except Exception as error:  # noqa: BLE001 -- a library and a network; the relay is not to hear of it
                log.debug("sending spans failed: %r", error)
                sent, spans = False, batch
            self.counts["exported" if sent else "failed"] += len(spans)
            if not sent and time.monotonic() - self._said > SAY_AGAIN_SECONDS:
                self._said = time.monotonic()
                log.warning("spans cannot be sent to %s; they are given up and counted", self._endpoint)

    def _batch(self) -> list[Ended]:
        batch: list[Ended] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < BATCH:
                batch.append(self._waiting.get_nowait())
        return batch


def _sdk(endpoint: str, upstream: str) -> tuple[Callable[[Ended], Any], Send, Callable[[], None]]:
    """What OpenTelemetry is needed for: to make a span, to send some, to end. Raises SparseetyError."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        raise SparseetyError("--otlp-endpoint: OpenTelemetry is not installed; pip install 'sparseety[otel]'") from None
    # It says each try that fails; we say it once.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
    ids, propagator = RandomIdGenerator(), TraceContextTextMapPropagator()
    scope = InstrumentationScope("sparseety", sparseety.__version__)
    resource = Resource.create({"service.name": "sparseety-proxy", "service.version": sparseety.__version__})
    server = urlsplit(upstream)
    port = server.port or (443 if server.scheme == "https" else 80)
    address = {"server.address": server.hostname, "server.port": port}

    def make(ended: Ended) -> Any:
        parent = trace.get_current_span(propagator.extract(ended.carried)).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None  # whoever began this trace does not want it
        context = trace.SpanContext(
            trace_id=parent.trace_id if parent.is_valid else ids.generate_trace_id(),
            span_id=ids.generate_span_id(),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            trace_state=parent.trace_state,
        )
        attributes = attributes_of(ended)
        failed = "error.type" in attributes
        return ReadableSpan(
            name=f"{attributes['gen_ai.operation.name']} {ended.tally.asked or ''}".strip(),
            context=context,
            parent=parent if parent.is_valid else None,
            resource=resource,
            attributes=attributes | address,
            kind=trace.SpanKind.CLIENT,
            status=trace.Status(trace.StatusCode.ERROR if failed else trace.StatusCode.UNSET),
            start_time=round(ended.began * 1e9),
            end_time=round(ended.ended * 1e9),
            instrumentation_scope=scope,
        )

    return make, lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS, exporter.shutdown


def attributes_of(ended: Ended) -> dict[str, Any]:
    """OpenTelemetry's names (GenAI conventions) where there are any, our own under `sparseety.`."""
    tally = ended.tally
    asked, usage, output = tally.parameters, tally.usage, tally.output()
    found: Mapping[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[ended.endpoint],
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": tally.asked,
        "gen_ai.request.choice.count": asked.n if asked and asked.n != 1 else None,
        "gen_ai.request.max_tokens": asked.max_tokens if asked else None,
        "gen_ai.request.temperature": asked.temperature if asked else None,
        "gen_ai.request.top_p": asked.top_p if asked else None,
        "gen_ai.request.seed": asked.seed if asked else None,
        "gen_ai.response.id": tally.response_id,
        "gen_ai.response.model": tally.model,
        "gen_ai.response.finish_reasons": [reason for reason in tally.finished.values() if reason] or None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens if usage else None,
        "gen_ai.usage.output_tokens": output[0] if output else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens if usage else None,
        "gen_ai.output.messages": _messages(tally),
        "http.response.status_code": tally.status,
        "error.type": _error(ended.outcome, tally.status),
        "sparseety.endpoint": ended.endpoint,
        "sparseety.uuid": ended.uuid,
        "sparseety.x_request_id": ended.carried.get("x-request-id"),
        "sparseety.outcome": ended.outcome,
        "sparseety.capture": tally.decision,
        "sparseety.stream": tally.streams,
        "sparseety.output_tokens.source": output[1] if output else None,
        "sparseety.output_characters": tally.characters,
        "sparseety.time_to_first_chunk": _since(tally.began, tally.first_chunk),
        "sparseety.time_to_first_token": _since(tally.began, tally.first_token),
        "sparseety.time_per_output_token": tally.per_token(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _since(began: float, at: float | None) -> float | None:
    return None if at is None else round(at - began, 6)


def _error(outcome: Outcome, status: int | None) -> str | None:
    if outcome not in ("complete", "client_gone"):
        return outcome
    return str(status) if status is not None and status >= 400 else None


def _messages(tally: Tally) -> str | None:
    """The reply's text, where it was asked for."""
    if tally.texts is None:
        return None
    messages = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(parts)}],
            "finish_reason": tally.finished.get(choice) or "none",
        }
        for choice, parts in sorted(tally.texts.items())
    ]
    return msgspec.json.encode(messages).decode() if messages else None
