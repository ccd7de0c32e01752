"""The pure capture core, over streams of a real vLLM."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from proxy.capture import Limits, RequestCapture, RequestHead
from sparseety.records import AnyRecord, Chunk, Gap, RequestStart, Response, StreamDone, ToolCall

SAMPLES = Path(__file__).parent / "data" / "sse"
STREAMS = [
    "chat-n2",
    "chat-usage",
    "completion-two-prompts",
    "completion-emoji",
    "chat-stop-string",
    "chat-return-token-ids",
    "chat-engine-death",
    "chat-reasoning",
    "chat-tools-auto-hermes",
    "chat-tools-named",
]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
BODY = b'{"model":"m","stream":true}'


def begin(path: str = "/v1/chat/completions", limits: Limits | None = None) -> RequestCapture:
    head = RequestHead("POST", path, [(b"authorization", b"Bearer secret")])
    return RequestCapture(1, "u", head, 1.0, limits or Limits())


def capture(reads: list[bytes], outcome="complete", *, limits: Limits | None = None) -> list[AnyRecord]:
    """All records of a request whose reply is an event stream in these reads; time is counted, not measured."""
    request = begin(limits=limits)
    found = [*request.request_body(BODY, 2.0), *request.request_ended(3.0), *request.reply_head(200, SSE, 4.0)]
    for number, data in enumerate(reads):
        found += request.reply_body(data, 5.0 + number)
    return [*found, *request.ended(outcome, 1e6)]


def chunks(found: list[AnyRecord], kind: str | None = None) -> list[Chunk]:
    return [record for record in found if isinstance(record, Chunk) and kind in (None, record.kind)]


def text(found: list[AnyRecord], choice: int = 0) -> str:
    return "".join(record.delta_text for record in chunks(found) if record.choice == choice)


def said_by(data: bytes, choice: int = 0) -> str:
    """The text of one choice, read as a client reads it."""
    said = ""
    for line in data.decode().split("\n"):
        if line.startswith("data: {"):
            for part in json.loads(line[6:]).get("choices", []):
                delta = part.get("delta", {})
                if part["index"] == choice:
                    said += (part.get("text") or "") + (delta.get("reasoning") or "") + (delta.get("content") or "")
                    for call in delta.get("tool_calls") or []:
                        said += call["function"].get("arguments") or ""
    return said


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_vllm_is_recorded_as_its_client_reads_it(name):
    data = (SAMPLES / f"{name}.sse").read_bytes()
    found = capture([data])
    done = found[-1]
    assert isinstance(done, StreamDone)
    assert (done.bytes, done.sha256, done.reads) == (len(data), hashlib.sha256(data).hexdigest(), 1)
    assert done.end_marker
    assert not chunks(found, "unparsed")
    assert [record.wire_index for record in chunks(found, "done")] == [done.events] == [data.count(b"data: ")]
    total = 0
    for choice in {record.choice for record in chunks(found)}:
        assert text(found, choice) == said_by(data, choice)
        bearing = [record for record in chunks(found) if record.choice == choice and record.delta_text]
        assert [record.chunk_index for record in bearing] == list(range(1, len(bearing) + 1))
        assert bearing[-1].accumulated_len == len(said_by(data, choice))
        total += len(bearing)
    assert (done.chunk_count, done.total_text_len) == (
        total,
        sum(len(said_by(data, choice)) for choice in (0, 1)),
    )
    assert [record.response_id for record in found if isinstance(record, Chunk) and record.response_id] == [
        json.loads(data.split(b"\n")[0][6:])["id"]
    ]


@pytest.mark.parametrize("name", [name for name in STREAMS if (SAMPLES / f"{name}.sse").stat().st_size < 4000])
def test_records_do_not_depend_on_how_the_network_sliced_the_stream(name):
    data = (SAMPLES / f"{name}.sse").read_bytes()
    expected = _without_reads(capture([data]))
    for cut in range(1, len(data)):
        assert _without_reads(capture([data[:cut], data[cut:]])) == expected, cut
    assert _without_reads(capture([data[at : at + 1] for at in range(len(data))])) == expected


def _without_reads(found: list[AnyRecord]) -> list[object]:
    """The records as plain data, less what is about reads and their times."""
    plain = [msgspec.to_builtins(record) for record in found]
    for record in plain:
        for name in ("ts", "read", "reads", "stamps"):
            record.pop(name, None)
    return plain


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_cut_anywhere_loses_nothing_that_arrived(name):
    data = (SAMPLES / f"{name}.sse").read_bytes()
    for cut in range(0, len(data), 37):
        found = capture([data[:cut]] if cut else [], "upstream_broken")
        done = found[-1]
        assert isinstance(done, StreamDone)
        assert (done.outcome, done.bytes) == ("upstream_broken", cut)
        end = data.rfind(b"\n\n", 0, cut) + 2 if b"\n\n" in data[:cut] else 0
        unparsed = [record.raw_base64 or record.raw.encode() for record in chunks(found, "unparsed")]
        assert unparsed == ([data[end:cut]] if cut > end else [])


def test_what_a_server_sends_beside_plain_text_is_kept():
    finishes = {record.choice: record.finish_reason for record in chunks(_sample("chat-n2")) if record.finish_reason}
    assert finishes.keys() == {0, 1}
    (usage,) = chunks(_sample("chat-usage"), "usage")
    assert usage.usage == _sample("chat-usage")[-1].usage
    assert usage.usage.completion_tokens > 0
    assert chunks(_sample("chat-return-token-ids"), "text")[0].token_ids == [504]
    assert chunks(_sample("chat-reasoning"), "reasoning")[0].delta_text == " asked"
    assert "EngineCore" in chunks(_sample("chat-engine-death"), "error")[0].raw
    named, *rest = chunks(_sample("chat-tools-named"), "tool_call")
    assert named.tool_calls == [ToolCall(name="get_weather")]
    assert "".join(record.delta_text for record in rest) == '"Paris"'
    assert all(record.raw is None for record in chunks(_sample("chat-n2")))


def _sample(name: str) -> list[AnyRecord]:
    return capture([(SAMPLES / f"{name}.sse").read_bytes()])


@pytest.mark.parametrize(
    ("event", "kind", "raw"),
    [
        (b": ping", "comment", ": ping"),
        (b"event: x\nid: 7", "control", "event: x\nid: 7"),
        (b"", "control", ""),
        (b"data: [DONE]", "done", None),
        (b"data: ", "unparsed", "data: "),
        (b"data: null", "unparsed", "data: null"),
        (b'data: {"choices": 7}', "unparsed", 'data: {"choices": 7}'),
        (b'data: {"a": "\0"}', "unparsed", 'data: {"a": "\0"}'),
        (b"\0", "control", "\0"),
        (b"<html>", "control", "<html>"),
        (b'event: error\ndata: {"error": "x"}', "error", 'event: error\ndata: {"error": "x"}'),
        (b"event: error\ndata: overloaded", "error", "event: error\ndata: overloaded"),
        (b'error: {"code":400}', "error", 'error: {"code":400}'),
        (b'event: e\ndata: {"choices":[{"text":"a"}]}', "text", 'event: e\ndata: {"choices":[{"text":"a"}]}'),
        (b'data: {"choices":[{"text":"a"}]}\n: c', "text", 'data: {"choices":[{"text":"a"}]}\n: c'),
    ],
)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_event_of_any_form_makes_one_record_and_breaks_nothing(event, kind, raw, line_end):
    found = capture([event.replace(b"\n", line_end) + line_end * 2, b"data: [DONE]" + line_end * 2])
    first, last = chunks(found)
    kept = None if first.raw is None else first.raw.replace("\r\n", "\n").replace("\r", "\n")
    assert (first.kind, kept, first.wire_index) == (kind, raw, 1)
    assert (last.kind, last.wire_index, found[-1].end_marker) == ("done", 2, True)


def test_bytes_that_are_no_utf8_are_kept_as_they_are():
    (first, _) = chunks(capture([b"data: \xff\xfe\n\n", b"data: [DONE]\n\n"]))
    assert (first.kind, first.raw, first.raw_base64) == ("unparsed", None, b"data: \xff\xfe")


def test_thousands_of_events_in_one_read_share_its_time_and_number():
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    found = chunks(capture([event * 5000]))
    assert [record.wire_index for record in found] == list(range(1, 5001))
    assert {(record.ts, record.read or record.wire_index) for record in found} == {(5.0, 1)}


def test_an_id_that_is_empty_names_nothing():
    events = [b'data: {"id":"%b","choices":[]}\n\n' % name for name in (b"", b"a", b"")]
    assert [record.response_id for record in chunks(capture(events))] == [None, "a", None]


def test_a_read_number_is_written_only_where_it_differs_from_the_events():
    found = capture([b"data: {", b"}\n\ndata: [DONE]\n\n"])
    assert [(record.wire_index, record.read) for record in chunks(found)] == [(1, 2), (2, None)]


def test_an_event_with_two_choices_makes_two_records_and_says_its_usage_once():
    event = (
        b'data: {"id":"i","choices":[{"index":0,"text":"a"},{"index":1,"text":"bc"}],"usage":{"completion_tokens":2}}'
    )
    first, second = chunks(capture([event + b"\n\n"]))
    assert (first.delta_text, first.response_id, first.usage) == ("a", "i", None)
    assert (second.choice, second.chunk_index, second.accumulated_len, second.response_id) == (1, 1, 2, None)
    assert second.usage.completion_tokens == 2


@pytest.mark.parametrize("step", [10, 100, 1000])
def test_an_event_beyond_the_limit_is_a_gap_and_reading_goes_on_behind_it(step):
    long = b'data: {"choices":[{"text":"' + b"x" * 200 + b'"}]}\n\n'
    stream = b'data: {"choices":[{"text":"a"}]}\n\n' + long + long + b'data: {"choices":[{"text":"b"}]}\n\n'
    stream += b"data: [DONE]\n\n" + long[:150]
    reads = [stream[at : at + step] for at in range(0, len(stream), step)]
    found = capture(reads, "upstream_broken", limits=Limits(event_bytes=100))
    gaps = [record for record in found if isinstance(record, Gap)]
    assert [(gap.count, gap.captures) for gap in gaps] == [(1, [1])] * 3
    assert "more than 100 bytes" in gaps[0].reason
    assert "xx" not in gaps[0].reason
    assert [(record.wire_index, record.delta_text) for record in chunks(found)] == [(1, "a"), (4, "b"), (5, "")]
    done = found[-1]
    assert isinstance(done, StreamDone)
    assert (done.events, done.reads, done.end_marker, done.bytes) == (6, len(reads), True, len(stream))


def test_a_request_body_beyond_the_limit_is_not_kept():
    request = begin(limits=Limits(body_bytes=10))
    assert request.request_body(b"0123456789", 2.0) == []
    start, gap = request.request_body(b"x", 2.0)
    assert isinstance(start, RequestStart)
    assert (start.endpoint, start.parameters) == ("chat", None)
    assert isinstance(gap, Gap)
    assert request.request_body(b"x" * 100, 2.0) == []
    assert request.request_ended(3.0) == []


def test_a_whole_reply_is_read_into_choices():
    data = (SAMPLES / "chat-nonstream.body").read_bytes()
    request = begin()
    request.request_ended(2.0)
    request.reply_head(200, [(b"content-type", b"application/json")], 3.0)
    for at in range(0, len(data), 100):
        request.reply_body(data[at : at + 100], 4.0)
    (end,) = request.ended("complete", 5.0)
    assert isinstance(end, Response)
    assert end.response_id == "chatcmpl-sample-chat-nonstream"
    assert [(choice.text, choice.finish_reason) for choice in end.choices] == [
        ("The capital of France is Paris.", "stop")
    ]
    assert (end.unread, end.bytes, end.sha256) == (None, len(data), hashlib.sha256(data).hexdigest())
    assert (end.stamps.sent, end.stamps.headers, end.stamps.first_chunk, end.stamps.end) == (2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("status", "headers", "body", "unread"),
    [
        (400, [], b'{"error":{}}', "status 400"),
        (200, [], b"<html>", "JSON is malformed: invalid character (byte 0)"),
        (200, [(b"content-encoding", b"gzip")], b"\x1f\x8b", "the compressed body is cut off"),
        (200, [(b"content-encoding", b"gzip")], b"no gzip", "not gzip: error"),
        (200, [(b"content-encoding", b"gzip, br")], b"x", "content coding gzip, br is not known"),
        (200, [], b"x" * 101, "body of more than 100 bytes"),
    ],
)
def test_a_reply_that_is_not_read_says_why(status, headers, body, unread):
    request = begin(limits=Limits(body_bytes=100))
    request.reply_head(status, headers, 3.0)
    request.reply_body(body, 4.0)
    (end,) = request.ended("complete", 5.0)
    assert isinstance(end, Response)
    assert (end.choices, end.unread, end.bytes) == ([], unread, len(body))


def test_other_paths_are_recorded_by_size_and_status_only():
    request = begin("/v1/embeddings")
    assert request.request_body(b"private", 2.0) == []
    (start,) = request.request_ended(2.0)
    request.reply_head(200, [], 3.0)
    request.reply_body(b"private", 4.0)
    (end,) = request.ended("complete", 5.0)
    written = msgspec.json.encode([start, end])
    assert b"private" not in written
    assert b"secret" not in written
    assert (start.endpoint, end.bytes, end.sha256, end.unread) == (None, 7, None, None)


def test_the_events_of_another_path_are_counted_and_not_kept():
    request = begin("/v1/embeddings")
    request.reply_head(200, SSE, 3.0)
    assert request.reply_body(b"event: a\ndata: private\n\n", 4.0) == []
    (end,) = request.ended("complete", 5.0)
    assert isinstance(end, StreamDone)
    assert (end.events, end.chunk_count) == (1, 0)


@pytest.mark.parametrize("outcome", ["client_gone", "upstream_unreachable", "shutdown"])
def test_a_request_without_reply_has_a_beginning_and_an_end(outcome):
    start, end = begin().ended(outcome, 2.0, "why")
    assert isinstance(start, RequestStart)
    assert isinstance(end, Response)
    assert (end.outcome, end.status, end.error, end.unread) == (outcome, None, "why", None)


KEYS = ["QUERYSECRET1", "HEADERSECRET2", "HEADERSECRET3", "HEADERSECRET4", "HEADERSECRET5"]


def with_keys() -> RequestCapture:
    headers = [
        (b"AUTHORIZATION", b"Bearer HEADERSECRET2"),
        (b"X-Api-Key", b"HEADERSECRET3"),
        (b"api-key", b"HEADERSECRET4"),
        (b"Cookie", b"s=HEADERSECRET5; a=1"),
    ]
    head = RequestHead("POST", "/v1/chat/completions", headers, b"key=QUERYSECRET1&x=stay-here")
    return RequestCapture(1, "u", head, 1.0, Limits())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "event",
    [b'data: {"error":{"message":"bad key %b here"}}\n\n', b": %b\n\n", b"data: %b\xff\n\n", b"data: cut %b"],
)
def test_a_credential_that_the_server_quotes_is_not_recorded(key, event):
    request = with_keys()
    found = [*request.request_body(BODY, 2.0), *request.request_ended(3.0), *request.reply_head(200, SSE, 4.0)]
    found += request.reply_body(event % key.encode(), 5.0)
    found += request.ended("upstream_broken", 6.0, f"no way to http://a/?key={key}")
    written = msgspec.json.encode(found)
    kept = b"".join(record.raw_base64 or (record.raw or "").encode() for record in chunks(found))
    assert key.encode() not in written + kept
    assert b"[credential]" in kept
    assert found[-1].error == "no way to http://a/?key=[credential]"


def test_what_is_no_credential_stays():
    request = with_keys()
    found = [*request.reply_head(200, SSE, 4.0), *request.reply_body(b": s=1 a=1 Bearer stay-here\n\n", 5.0)]
    assert [record.raw for record in chunks(found)] == [": s=1 a=1 Bearer stay-here"]


def test_a_last_event_that_says_another_text_than_the_deltas_is_kept():
    """Many clients show the text of response.completed, not that of the deltas."""
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"abc"}\n\n'
    for text, kept in ((b"abc", False), (b"abcd", True)):
        last = b'{"type":"response.completed","response":{"id":"r","status":"completed","output":[{"type":"message",'
        last += b'"content":[{"type":"output_text","text":"%b"}]}]}}' % text
        request = begin("/v1/responses")
        request.reply_head(200, SSE, 4.0)
        (_, end) = request.reply_body(delta + b"event: response.completed\ndata: " + last + b"\n\n", 5.0)
        assert isinstance(end, Chunk)
        assert (end.kind, end.finish_reason, end.raw is not None) == ("finish", "completed", kept)
