"""OpenTelemetry: one span for each request, at a real collector's HTTP port, and no harm where there is none."""

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator

import pytest

from proxy.config import read_config
from sparseety.errors import SparseetyError
from tests.logbook import until
from tests.raw_upstream import AwaitHangUp, RawClient, reply, running_proxy, running_upstream
from tests.test_proxy_metrics import SCRIPTS, choose, request

pytest.importorskip("opentelemetry.proto", reason="needs the extra otel")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Decodes what arrives. status: what it answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list = []
        self.resources: list = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(attributes(resource.resource))
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def value(any_value):
    kind = any_value.WhichOneof("value")
    found = getattr(any_value, kind)
    return [value(each) for each in found.values] if kind == "array_value" else found


def attributes(message) -> dict:
    return {each.key: value(each.value) for each in message.attributes}


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def ask(proxy, endpoint: str, script: str, *headers: str) -> None:
    first, rest = request(endpoint, script).split(b"\r\n", 1)
    lines = "".join(f"{header}\r\n" for header in headers).encode()
    with RawClient(proxy.service.listen.port) as client:
        client.send(first + b"\r\n" + lines + rest)
        if script == "left":
            client.read_until(b'"a"')
        else:
            client.read_to_end()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("proxy.spans.BATCH_SECONDS", 0.05)
    monkeypatch.setattr("proxy.spans.EXPORT_SECONDS", 1.0)


@pytest.fixture
def upstream():
    with running_upstream() as running:
        running.choose = choose
        yield running


def test_a_request_is_one_span_with_what_the_client_saw_and_nothing_of_its_text(tmp_path, upstream):
    with running_collector() as collector, running_proxy(tmp_path, upstream.url, otlp_endpoint=collector.url) as proxy:
        ask(proxy, "chat", "full", "x-request-id: r-1", "authorization: Bearer sk-secret")
        until(lambda: collector.spans)
    (span,) = collector.spans
    found = attributes(span)
    assert collector.resources[0]["service.name"] == "sparseety-proxy"
    assert (span.name, span.kind, span.parent_span_id, len(span.trace_id)) == ("chat m", 3, b"", 16)
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 10e9
    seconds = [
        found.pop(f"sparseety.{name}")
        for name in ("time_to_first_chunk", "time_to_first_token", "time_per_output_token")
    ]
    assert 0 < seconds[0] <= seconds[1]
    assert len(found.pop("sparseety.uuid")) == 36
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "c-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": upstream.port,
        "sparseety.capture": "captured",
        "sparseety.endpoint": "chat",
        "sparseety.outcome": "complete",
        "sparseety.output_characters": 3,
        "sparseety.output_tokens.source": "usage",
        "sparseety.stream": True,
        "sparseety.x_request_id": "r-1",
    }
    assert proxy.metric("sparseety_otlp_spans_total", result="exported") == 1


def test_the_clients_trace_is_the_spans_parent_and_goes_upstream_as_it_came(tmp_path, upstream):
    sampled, unwanted = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
    with running_collector() as collector, running_proxy(tmp_path, upstream.url, otlp_endpoint=collector.url) as proxy:
        for given in (unwanted, sampled, "nonsense"):
            ask(proxy, "completions", "whole", f"traceparent: {given}", "tracestate: a=1")
        until(lambda: len(collector.spans) == 2)
    child, alone = collector.spans
    assert (child.trace_id.hex(), child.parent_span_id.hex(), child.trace_state) == (TRACE, PARENT, "a=1")
    assert child.span_id.hex() != PARENT
    assert (alone.parent_span_id, alone.trace_id.hex() == TRACE) == (b"", False)
    sent = [dict(each.headers)[b"traceparent"].decode() for each in upstream.requests if each.body]
    assert sent == [unwanted, sampled, "nonsense"]


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        ("left", "client_gone", None),
        ("cut", "upstream_broken", "upstream_broken"),
        ("failed", "complete", "500"),
        ("unread", "complete", None),
    ],
)
def test_what_went_wrong_is_in_the_span(tmp_path, upstream, script, outcome, error):
    with running_collector() as collector, running_proxy(tmp_path, upstream.url, otlp_endpoint=collector.url) as proxy:
        ask(proxy, "chat", script)
        until(lambda: collector.spans)
    (span,) = collector.spans
    found = attributes(span)
    assert found["sparseety.outcome"] == outcome
    assert found.get("error.type") == error
    assert (span.status.code == 2) == bool(error)


def test_text_is_in_a_span_where_it_was_asked_for(tmp_path, upstream):
    settings = {"otlp_content": True}
    with running_collector() as collector:
        settings["otlp_endpoint"] = collector.url
        with running_proxy(tmp_path, upstream.url, **settings) as proxy:
            ask(proxy, "chat", "two")
            until(lambda: collector.spans)
    assert attributes(collector.spans[0])["gen_ai.output.messages"] == (
        '[{"role":"assistant","parts":[{"type":"text","content":"éé"}],"finish_reason":"length"},'
        '{"role":"assistant","parts":[{"type":"text","content":"é"}],"finish_reason":"stop"}]'
    )


def test_a_collector_that_refuses_or_is_not_there_harms_nobody_is_counted_and_said_once(tmp_path, upstream, caplog):
    with running_collector() as collector:
        collector.status = 400  # which is final; others are tried again
        with running_proxy(tmp_path, upstream.url, otlp_endpoint=collector.url) as proxy:
            for _ in range(3):
                ask(proxy, "completions", "whole")
            until(lambda: proxy.metric("sparseety_otlp_spans_total", result="failed") == 3)
    url = collector.url  # where nobody listens now
    with running_proxy(tmp_path / "second", upstream.url, otlp_endpoint=url) as proxy:
        with proxy.client() as client:
            client.send(request("completions", "whole").replace(b"connection: close\r\n", b""))
            assert client.read_reply()[0] == 200
        until(lambda: proxy.metric("sparseety_otlp_spans_total", result="failed") == 1)
    assert [record.message for record in caplog.records] == [
        f"spans cannot be sent to {url}; they are given up and counted"
    ] * 2  # once by each proxy


def test_spans_wait_in_a_queue_with_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.spans.WAITING", 5)
    monkeypatch.setattr("proxy.spans.BATCH_SECONDS", 600.0)
    with running_collector() as collector, running_upstream(*SCRIPTS["whole"]) as upstream:
        with running_proxy(tmp_path, upstream.url, otlp_endpoint=collector.url) as proxy:
            for _ in range(8):
                ask(proxy, "completions", "whole")
            until(lambda: proxy.metric("sparseety_otlp_spans_total", result="dropped") == 3)
        assert len(collector.spans) == 5  # what waited is sent at the end


def test_a_collector_that_hangs_does_not_hold_up_the_end(tmp_path, upstream):
    with (
        running_upstream(AwaitHangUp) as hanging,
        running_proxy(tmp_path, upstream.url, otlp_endpoint=f"{hanging.url}/v1/traces") as proxy,
    ):
        ask(proxy, "completions", "whole")
        hanging.next_request()
    assert proxy.summary.requests == 1  # and the block has ended, which waits for no more than a moment


def test_the_address_of_the_collector_is_checked():
    assert read_config(["--otlp-endpoint", "http://c:4318"]).otlp_endpoint == "http://c:4318/v1/traces"
    assert read_config(["--otlp-endpoint", "https://c/x"]).otlp_endpoint == "https://c/x"
    assert read_config([]).otlp_endpoint is None
    for bad, words in (("c:4318", "is not the URL of a collector"), ("http://u:p@c", "OTEL_EXPORTER_OTLP_HEADERS")):
        with pytest.raises(SparseetyError, match=words):
            read_config(["--otlp-endpoint", bad])


def test_without_opentelemetry_the_proxy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        running_upstream(reply()) as upstream,
        pytest.raises(SparseetyError, match=r"pip install 'sparseety\[otel\]'"),
        running_proxy(tmp_path, upstream.url, otlp_endpoint="http://127.0.0.1:9"),
    ):
        pass
    assert not (tmp_path / "logs").exists()  # nothing was begun
