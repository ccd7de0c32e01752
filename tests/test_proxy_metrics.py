"""What /metrics says: the traffic sent, to the unit, with any number of workers; and never more series than said."""

import concurrent.futures
import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy import front
from proxy.catalogue import METRICS, REFUSALS, series_bound
from proxy.config import read_config
from proxy.counters import Counters, ModelNames
from proxy.refusal import Refusal
from proxy.tally import Tally
from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs, read_log
from sparseety.records import Gap, Response, StreamDone
from tests.logbook import until
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    AwaitHangUp,
    Close,
    RawClient,
    chunk,
    chunked,
    records,
    reply,
    running_proxy,
    running_upstream,
)
from tests.test_proxy_cli import admin_port, get, started, stop

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str, index: int = 0, model: str = "m", **fields) -> bytes:
    return event(id="c-1", model=model, choices=[{"index": index, "delta": {"content": text}} | fields])


ROLE = event(id="c-1", model="m", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = b"data: [DONE]\n\n"


def stream(*events: bytes, end=(LAST_CHUNK,)) -> tuple:
    return (chunked(EVENT_STREAM), *map(chunk, events), *end)


def named(kind: str, **fields) -> bytes:
    return f"event: {kind}\n".encode() + event(type=kind, **fields)


SCRIPTS = {
    # A stream with everything: ids, usage, a comment, two tokens in one event.
    "full": stream(
        ROLE,
        b": ping\n\n",
        delta("a", token_ids=[1]),
        delta("bc", token_ids=[2, 3], finish_reason="stop"),
        event(id="c-1", model="m", choices=[], usage=USAGE),
        DONE,
    ),
    "two": stream(
        *(delta("é", index, logprobs={"content": [{}]}) for index in (0, 1, 0)),
        delta("", 0, finish_reason="length"),
        delta("", 1, finish_reason="stop"),
        DONE,
    ),
    "mute": stream(ROLE, delta("a"), delta("", finish_reason="tool_calls"), DONE),
    "left": stream(ROLE, delta("a", token_ids=[1]), end=(AwaitHangUp,)),
    "cut": stream(ROLE, delta("a", token_ids=[1]), end=(Close,)),
    "torn": (chunked(EVENT_STREAM), b"nonsense"),
    "whole": (
        reply(
            json.dumps(
                {"id": "c-2", "model": "m", "choices": [{"text": "five!", "finish_reason": "stop"}], "usage": USAGE}
            ).encode(),
            b"content-type: application/json",
        ),
    ),
    "unread": (reply(b"no JSON"),),
    "failed": (reply(b'{"error":{}}', status=b"500 No"),),
    "refused": (reply(b'{"error":{}}', status=b"404 No"),),
    "gone": (Close,),
    "messages": stream(
        named("message_start", message={"id": "m-1", "model": "m", "usage": {"input_tokens": 5, "output_tokens": 1}}),
        named("content_block_start", content_block={"type": "text", "text": ""}),
        named("content_block_delta", delta={"type": "text_delta", "text": "hi"}),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
        named("message_stop"),
    ),
    "responses": stream(
        named("response.created", response={"id": "r-1", "model": "m"}),
        named("response.output_text.delta", delta="hey"),
        named(
            "response.incomplete",
            response={
                "id": "r-1",
                "incomplete_details": {"reason": "max_output_tokens"},
                "usage": {"input_tokens": 6, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}},
            },
        ),
    ),
}
# endpoint, script, how the request ends; the client leaves where the upstream waits for that
TRAFFIC = [
    ("chat", "full", "complete"),
    ("chat", "two", "complete"),
    ("chat", "mute", "complete"),
    ("chat", "left", "client_gone"),
    ("chat", "cut", "upstream_broken"),
    ("chat", "torn", "upstream_broken"),
    ("chat", "failed", "complete"),
    ("chat", "gone", "upstream_broken"),
    ("completions", "whole", "complete"),
    ("completions", "unread", "complete"),
    ("messages", "messages", "complete"),
    ("responses", "responses", "complete"),
    ("other", "refused", "complete"),
]

# What one round of it comes to. `m` and no other model is named by replies.
EXPECTED = {
    ("sparseety_proxy_requests_total", ""): 13,
    ("sparseety_proxy_requests_total", 'outcome="complete"'): 9,
    ("sparseety_proxy_requests_total", 'outcome="upstream_broken"'): 3,
    ("sparseety_proxy_requests_total", 'outcome="client_gone"'): 1,
    ("sparseety_proxy_requests_total", 'stream="true"'): 8,
    ("sparseety_proxy_requests_total", 'model_name="m",endpoint="chat",stream="true",outcome="complete"'): 3,
    ("sparseety_proxy_requests_total", 'endpoint="other"'): 1,
    ("sparseety_proxy_request_duration_seconds_count", ""): 13,
    ("sparseety_proxy_response_start_seconds_count", ""): 12,
    ("sparseety_proxy_overhead_seconds_count", 'stage="request"'): 13,
    ("sparseety_upstream_errors_total", 'error_type="reset"'): 2,
    ("sparseety_upstream_errors_total", 'error_type="protocol"'): 1,
    ("sparseety_upstream_errors_total", 'error_type="http_4xx"'): 1,
    ("sparseety_upstream_errors_total", 'error_type="http_5xx"'): 1,
    ("sparseety_upstream_errors_total", ""): 5,
    ("sparseety_time_to_first_token_seconds_count", 'model_name="m",endpoint="chat"'): 5,
    ("sparseety_time_to_first_token_seconds_count", ""): 7,
    ("sparseety_time_to_first_chunk_seconds_count", ""): 7,
    ("sparseety_inter_chunk_latency_seconds_count", ""): 3,  # full 1, two 2
    ("sparseety_request_time_per_output_token_seconds_count", ""): 3,  # full, messages, responses
    ("sparseety_prompt_tokens_total", 'count_source="usage"'): 7 + 7 + 5 + 6,
    ("sparseety_prompt_tokens_cached_total", ""): 4 + 4 + 1,
    ("sparseety_generation_tokens_total", 'count_source="usage"'): 3 + 3 + 2 + 2,
    ("sparseety_generation_tokens_total", 'count_source="logprobs"'): 3,  # two
    ("sparseety_generation_tokens_total", 'count_source="token_ids"'): 2,  # left, cut: what the client was sent
    ("sparseety_request_prompt_tokens_sum", ""): 25,
    ("sparseety_request_generation_tokens_sum", ""): 15,
    ("sparseety_request_generation_tokens_count", ""): 7,
    ("sparseety_request_output_characters_sum", ""): 3 + 3 + 1 + 1 + 1 + 5 + 2 + 3,
    ("sparseety_chunk_tokens_sum", ""): 3 + 3 + 1 + 1,
    ("sparseety_chunk_tokens_count", ""): 2 + 3 + 1 + 1,
    ("sparseety_stream_chunks_total", 'kind="role"'): 4 + 1,
    ("sparseety_stream_chunks_total", 'kind="text"'): 2 + 3 + 1 + 1 + 1 + 1 + 1,
    ("sparseety_stream_chunks_total", 'kind="finish"'): 2 + 1 + 1 + 1,
    ("sparseety_stream_chunks_total", 'kind="usage"'): 1,
    ("sparseety_stream_chunks_total", 'kind="comment"'): 1,
    ("sparseety_stream_chunks_total", 'kind="done"'): 3 + 1,
    ("sparseety_requests_finished_total", 'finished_reason="stop"'): 1 + 1 + 1 + 1,
    ("sparseety_requests_finished_total", 'finished_reason="length"'): 1 + 1,
    ("sparseety_requests_finished_total", 'finished_reason="tool_calls"'): 1,
    ("sparseety_requests_finished_total", 'finished_reason="none"'): 2,
    ("sparseety_requests_uncounted_total", 'reason="no_count"'): 1 + 1,  # mute, torn
    ("sparseety_requests_uncounted_total", 'reason="unread"'): 1,
    ("sparseety_requests_uncounted_total", ""): 3,
    ("sparseety_capture_sampled_requests_total", 'decision="captured"'): 13,
    ("sparseety_capture_records_total", 'kind="request_start"'): 13,
    ("sparseety_capture_records_total", 'kind="stream_done"'): 8,
    ("sparseety_capture_records_total", 'kind="response"'): 5,
    ("sparseety_capture_records_dropped_total", ""): 0,
}


def request(endpoint: str, script: str, model: str = "m") -> bytes:
    body = json.dumps({"model": model, "stream": True, "messages": [], "script": script}).encode()
    lines = [f"POST {PATHS.get(endpoint, '/v1/other')} HTTP/1.1", "host: a", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


def choose(received) -> tuple:
    return SCRIPTS[json.loads(received.body)["script"]] if received.body else (reply(b"{}"),)


def send(port: int, endpoint: str, script: str) -> None:
    with RawClient(port) as client:
        client.send(request(endpoint, script))
        if script == "left":
            client.read_until(b'"a"')
        else:
            client.read_to_end()


def scrape(admin: int) -> list:
    status, body = get(admin, "/metrics")
    assert status == 200
    return list(text_string_to_metric_families(body.decode()))


def samples(families: list) -> list:
    return [sample for family in families for sample in family.samples]


def total(families: list, name: str, labels: str = "") -> float:
    wanted = dict(re.findall(r'(\w+)="(\w+)"', labels))
    return sum(
        sample.value for sample in samples(families) if sample.name == name and wanted.items() <= sample.labels.items()
    )


@pytest.fixture(scope="module", params=[1, 4], ids=["1 worker", "4 workers"])
def scraped(request, tmp_path_factory):
    """The scrapes after so many rounds of the traffic, and what a first one said."""
    folder = tmp_path_factory.mktemp("metrics")
    rounds = 6
    with running_upstream() as upstream:
        upstream.choose = choose
        flags = ("--workers", str(request.param), "--log-min-free-bytes", "0")
        with started(folder, upstream.url, *flags) as (process, banner, port):
            admin = admin_port(banner)
            before = scrape(admin)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                asked = [pool.submit(send, port, endpoint, script) for endpoint, script, _ in TRAFFIC * rounds]
                for each in asked:
                    each.result()
            until(lambda: not total(scrape(admin), "sparseety_proxy_requests_in_flight"))
            after = [scrape(admin) for _ in range(20)]
            sizes = Counter({way: total(after[0], "sparseety_proxy_bytes_total", f'direction="{way}"') for way in WAYS})
            stop(process)
        sent = sum(len(each.body) for each in upstream.requests)
    logs = [record for path in find_logs([str(folder / "logs")]) for _, record in read_log(path, pytest.fail)]
    return before, after, rounds, logs, sizes, sent


WAYS = ("request", "response")


def test_the_counters_are_the_traffic_sent_to_the_unit(scraped):
    _, after, rounds, *_ = scraped
    found = {key: total(after[0], *key) for key in EXPECTED}
    assert found == {key: count * rounds for key, count in EXPECTED.items()}


def test_the_counters_are_what_stands_in_the_log(scraped):
    _, after, _, log, sizes, sent = scraped
    endings = [record for record in log if isinstance(record, Response | StreamDone)]
    told = Counter(record.outcome for record in endings)
    assert told == {
        outcome: count
        for outcome in told | Counter(shutdown=0)
        if (count := total(after[0], "sparseety_proxy_requests_total", f'outcome="{outcome}"'))
    }
    assert sizes == {"request": sent, "response": sum(record.bytes for record in endings)}
    assert not any(isinstance(record, Gap) for record in log)


def test_twenty_scrapes_in_a_row_say_the_same_of_what_has_ended(scraped):
    _, after, *_ = scraped
    counted = [
        [sample for sample in samples(each) if sample.name.startswith(("sparseety_proxy_requests_t", "sparseety_gen"))]
        for each in after
    ]
    assert counted[0]
    assert counted == [counted[0]] * 20


def test_what_is_scraped_is_what_the_catalogue_says_and_the_other_way_round(scraped):
    _, after, *_ = scraped
    families = {family.name: family for family in after[0]}
    assert families.keys() == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        assert family.samples, metric.name
        suffixes = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}[metric.kind]
        assert {sample.name.removeprefix(metric.name) for sample in family.samples} == suffixes
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {label.name for label in metric.labels}
            assert all(sample.labels[label.name] in label.values for label in metric.labels if label.values)
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        assert bounds == ({*metric.bounds, float("inf")} if metric.bounds else set())


def test_every_child_of_a_closed_set_is_there_before_anything_happened(scraped):
    before, *_ = scraped
    for metric in METRICS:
        if metric.kind == "counter" and not any(label.limit for label in metric.labels):
            count = sum(sample.name == metric.wire_name for sample in samples(before))
            assert count == metric.most_series, metric.name
    assert total(before, "sparseety_proxy_requests_total") == 0
    kinds = {sample.labels["kind"] for sample in samples(before) if sample.name == "sparseety_stream_chunks_total"}
    assert {"text", "error", "unparsed"} <= kinds


def test_names_follow_the_rules_that_promtool_checks(scraped):
    for metric in METRICS:
        assert re.fullmatch(r"sparseety_[a-z0-9_]+", metric.name)
        assert not re.search(r"(_total|_count|_sum|_bucket)$", metric.name)
        assert not re.search(r"milliseconds|kilobytes|percent|_ms$", metric.name)
        assert metric.name.endswith("_info") <= (metric.kind == "gauge")
        assert metric.help.endswith(".")


# ----------------------------------------------------------------------------------------------- the bound on series


def test_hostile_traffic_makes_no_more_series_than_the_bound(tmp_path):
    """The upstream is as bad as it gets: it answers to any name of a model, as some servers do."""
    dice = random.Random(5)

    def echo(received) -> tuple:
        if not received.body:
            return (reply(b"{}", status=dice.choice([b"200 OK", b"404 No", b"599 No"])),)
        model = json.loads(received.body)["model"]
        reason = dice.choice(["stop", "length", "x" * dice.randrange(9)])
        return stream(delta("a", model=model, token_ids=[1], finish_reason=reason), DONE)

    def attack(port: int) -> None:
        model = dice.choice(["a", "b", "other", "", "x" * 5000, f"m-{dice.random()}", "\n\u2028\x00", '{"le":"1"}'])
        path = dice.choice([*PATHS.values(), f"/{dice.random()}", "/v1/chat/completions/"])
        method = dice.choice(["POST"] * 6 + ["GET", "PUT", "PROPFIND", "DELETE"])
        body = json.dumps({"model": model, "messages": []}).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nx-{dice.randrange(999)}: {dice.random()}\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        with RawClient(port) as client:
            client.send(head.encode() + body)
            client.read_to_end()

    with running_upstream() as upstream:
        upstream.choose = echo
        flags = ("--workers", "2", "--metrics-models", "3", "--max-series", "9000", "--log-min-free-bytes", "0")
        with (
            started(tmp_path, upstream.url, *flags) as (process, banner, port),
            concurrent.futures.ThreadPoolExecutor(4) as pool,
        ):
            for each in [pool.submit(attack, port) for _ in range(300)]:
                each.result()
            families = scrape(admin_port(banner))
            stop(process)
    models = {sample.labels["model_name"] for sample in samples(families) if "model_name" in sample.labels}
    assert len(models) == 4
    assert "other" in models
    assert len(samples(families)) <= series_bound(3) <= 9000
    assert total(families, "sparseety_proxy_requests_total") == 300


def test_settings_that_allow_more_series_than_are_wanted_are_refused():
    with pytest.raises(
        SparseetyError, match=r"--metrics-models: 100 names of models make up to \d+ series.* \(20000\)"
    ):
        read_config(["--metrics-models", "100"])
    assert read_config(["--metrics-models", "100", "--max-series", "1000000"]).metrics_models == 100
    assert series_bound(read_config([]).metrics_models) < 20_000


def test_several_workers_share_one_set_of_names_whatever_each_has_learnt():
    workers, names = [Counters(), Counters()], ModelNames(2)
    (metric,) = (metric for metric in METRICS if metric.name == "sparseety_prompt_tokens_cached")
    for counters, models in zip(workers, (("a", "b", "other"), ("c", "a", "other")), strict=True):
        for model in models:
            counters.add(1, metric, model, "chat")
    for _ in range(2):
        total = Counters()
        for counters in workers:
            total.merge(counters, names)
        children = total.children[metric.name]
        assert children == {("a", "chat"): [2], ("b", "chat"): [1], ("other", "chat"): [3]}


# -------------------------------------------------------------------------------------------- what is not known is said


def test_without_the_capture_what_needs_no_reading_is_counted_and_the_rest_is_said_to_be_uncounted(tmp_path):
    with running_upstream() as upstream:
        upstream.choose = choose
        with running_proxy(tmp_path, upstream.url, capture=False) as proxy:
            for endpoint, script in (("chat", "full"), ("completions", "whole"), ("other", "refused")):
                send(proxy.service.listen.port, endpoint, script)
            metric = proxy.metric
            until(lambda: metric("sparseety_proxy_requests_total") == 3)
            assert metric("sparseety_proxy_requests_total", endpoint="chat", stream="true", model_name="other") == 1
            assert metric("sparseety_requests_uncounted_total", reason="capture_off") == 2
            assert metric("sparseety_capture_sampled_requests_total", decision="skipped") == 3
            assert metric("sparseety_capture_sampling_ratio") == 0
            assert metric("sparseety_proxy_request_duration_seconds_count") == 3
            for unknown in ("time_to_first_token_seconds_count", "capture_queue_bytes", "capture_disk_free_bytes"):
                assert metric(f"sparseety_{unknown}") is None


def test_the_time_to_the_first_token_passes_over_a_role_and_begins_with_the_requests_last_byte(tmp_path):
    pause = 0.2
    with running_upstream() as upstream:
        upstream.choose = lambda received: SCRIPTS["full"]
        with running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
            data = request("chat", "full")
            client.send(data[:-3])
            time.sleep(pause)  # a client that uploads slowly is not the server's doing
            client.send(data[-3:])
            client.read_to_end()
            until(lambda: proxy.metric("sparseety_time_to_first_token_seconds_count") == 1)
            first = proxy.metric("sparseety_time_to_first_token_seconds_sum")
            assert 0 < proxy.metric("sparseety_time_to_first_chunk_seconds_sum") <= first < pause
            assert first <= proxy.metric("sparseety_proxy_request_duration_seconds_sum") < pause


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"POST / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"x" * (1 << 17) + b"\r\n\r\n", "headers_too_large"),
        (b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n", "not_implemented"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "bad_request"),
    ],
)
def test_what_is_refused_before_it_is_relayed_is_counted_by_itself(tmp_path, data, code):
    with running_upstream(reply(b"{}")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        with proxy.client() as client:
            client.send(data)
            client.read_to_end()
        assert proxy.metric("sparseety_proxy_requests_refused_total") == 1
        assert proxy.metric("sparseety_proxy_requests_refused_total", code=code) == 1
        until(lambda: not proxy.metric("sparseety_proxy_requests_in_flight"))


def test_each_refusal_of_the_front_has_its_label():
    codes = {each.code for each in vars(front).values() if isinstance(each, Refusal)}
    assert codes == set(REFUSALS)


def test_a_fault_in_the_counting_harms_neither_the_request_nor_the_log(tmp_path, monkeypatch, caplog):
    counted, faults = Tally.ended, iter([True])

    def ended(*args):
        if next(faults, False):
            raise ZeroDivisionError
        counted(*args)

    monkeypatch.setattr(Tally, "ended", ended)
    with running_upstream() as upstream:
        upstream.choose = choose
        with running_proxy(tmp_path, upstream.url) as proxy:
            for _ in range(2):
                send(proxy.service.listen.port, "completions", "whole")
            until(lambda: proxy.metric("sparseety_proxy_requests_total") == 1)
    assert "request 1 is not counted" in caplog.text
    assert sum(isinstance(record, Response) for record in records(proxy.log_dir)) == 2


def test_whether_the_upstream_is_up_is_asked_by_the_scrape(tmp_path):
    with running_upstream(reply(b"", status=b"503 No")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        assert proxy.metric("sparseety_upstream_up") is None  # nobody has asked
        assert b'sparseety_upstream_up{upstream="default"} 0.0' in proxy.admin("/metrics")[1]
        upstream.scripts = [(reply(),)]
        assert proxy.admin("/readyz")[0] == 200
        assert b'sparseety_upstream_up{upstream="default"} 1.0' in proxy.admin("/metrics")[1]


@pytest.mark.parametrize("stated", [-5, 1 << 70, "many"])
def test_no_count_that_a_server_states_makes_a_counter_go_down_or_break(tmp_path, stated):
    usage = {"prompt_tokens": stated, "completion_tokens": stated}
    with running_upstream() as upstream:
        upstream.choose = lambda received: stream(
            delta("a", token_ids=[1]), event(id="c-1", model="m", choices=[], usage=usage), DONE
        )
        with running_proxy(tmp_path, upstream.url) as proxy:
            send(proxy.service.listen.port, "chat", "full")
            until(lambda: proxy.metric("sparseety_proxy_requests_total") == 1)
            proxy.admin("/metrics")
            counted = proxy.metric("sparseety_generation_tokens_total", count_source="token_ids")
            uncounted = proxy.metric("sparseety_requests_uncounted_total")
            assert (counted, uncounted) in ((1, 0), (0, 1))  # an event that is no chunk at all makes ids incomplete
            assert proxy.metric("sparseety_prompt_tokens_total") == 0


def test_the_operations_page_names_metrics_that_exist_and_the_number_of_series():
    page = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    names = set(re.findall(r"`(sparseety_\w+)`", page))
    assert len(names) > 10
    assert names <= {metric.wire_name for metric in METRICS}
    assert f"{series_bound(read_config([]).metrics_models):,} at the default" in page
