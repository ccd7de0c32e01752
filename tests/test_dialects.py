"""Reading the JSON of the Responses and the Messages API. The chat and completions APIs: test_chunks.py."""

import json

import pytest

from sparseety.chunks import Part, Unreadable
from sparseety.dialects import DIALECTS
from sparseety.records import ReplyChoice, ToolCall, Usage


def part_of(endpoint: str, event: dict[str, object]) -> Part:
    body = DIALECTS[endpoint].read_chunk(json.dumps(event).encode())
    (part,) = body.parts
    assert body.name == event.get("type", "")
    return part


@pytest.mark.parametrize(
    ("event", "part"),
    [
        ({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}}, ("text", "a", 1)),
        (
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
            ("reasoning", "hm", 0),
        ),
        (
            {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
            ("tool_call", '{"a', 2),
        ),
        (
            {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
            ("control", "", 1),
        ),
        ({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "x"}}, ("text", "x", 1)),
        ({"type": "content_block_stop", "index": 1}, ("control", "", 1)),
        ({"type": "ping"}, ("control", "", 0)),
        ({"type": "message_stop"}, ("done", "", 0)),
    ],
)
def test_each_event_of_the_messages_api_is_told_apart(event, part):
    kind, text, block = part
    assert part_of("messages", event) == Part(kind, text=text, block=block)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f"}}, "tool_call"),
        ({"type": "content_block_start", "index": 0, "content_block": {"type": "redacted_thinking"}}, "control"),
        ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "s"}}, "control"),
        ({"type": "error", "error": {"type": "internal_error", "message": "boom"}}, "error"),
        ({"type": "yet_to_be_invented"}, "control"),
    ],
)
def test_an_event_of_the_messages_api_that_says_more_than_its_record_is_kept(event, kind):
    part = part_of("messages", event)
    assert (part.kind, part.lossy) == (kind, True)


def test_a_message_names_its_id_its_end_and_its_usage_with_the_cached_tokens():
    read = DIALECTS["messages"].read_chunk
    start = read(
        b'{"type":"message_start","message":{"id":"m1","content":[],"usage":{"input_tokens":5,"output_tokens":0}}}'
    )
    assert (start.response_id, start.usage, start.end) == ("m1", Usage(prompt_tokens=5, completion_tokens=0), False)
    end = read(
        b'{"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":"END"},'
        b'"usage":{"input_tokens":5,"output_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":32}}'
    )
    assert end.parts == [Part("finish", finish_reason="stop_sequence", stop_reason="END")]
    assert end.usage == Usage(prompt_tokens=37, completion_tokens=3, cached_tokens=32)
    assert read(b'{"type":"message_stop"}').end


@pytest.mark.parametrize(
    ("event", "part"),
    [
        ({"type": "response.output_text.delta", "output_index": 1, "delta": "a", "logprobs": []}, ("text", "a", 1)),
        ({"type": "response.refusal.delta", "output_index": 0, "delta": "No"}, ("text", "No", 0)),
        ({"type": "response.reasoning_text.delta", "output_index": 0, "delta": "hm"}, ("reasoning", "hm", 0)),
        ({"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "{"}, ("tool_call", "{", 2)),
        ({"type": "response.output_text.done", "output_index": 1, "text": "a"}, ("control", "", 1)),
        ({"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}}, ("control", "", 1)),
        ({"type": "response.in_progress", "response": {"id": "r"}}, ("control", "", 0)),
    ],
)
def test_each_event_of_the_responses_api_is_told_apart(event, part):
    kind, text, block = part
    assert part_of("responses", event) == Part(kind, text=text, block=block)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}}, "tool_call"),
        ({"type": "error", "code": "x", "message": "boom"}, "error"),
        ({"error": {"message": "boom", "code": 500}}, "error"),
        ({"type": "response.failed", "response": {"status": "failed", "error": {"code": "x"}}}, "error"),
        ({"type": "response.web_search_call.searching", "output_index": 0}, "control"),
    ],
)
def test_an_event_of_the_responses_api_that_says_more_than_its_record_is_kept(event, kind):
    part = part_of("responses", event)
    assert (part.kind, part.lossy) == (kind, True)


@pytest.mark.parametrize(
    ("name", "details", "reason"),
    [
        ("response.completed", None, "completed"),
        ("response.completed", {"reason": "max_output_tokens"}, "max_output_tokens"),
        ("response.incomplete", {"reason": "content_filter"}, "content_filter"),
        ("response.failed", None, "completed"),
    ],
)
def test_a_response_has_three_ends(name, details, reason):
    response = {"id": "r", "status": "completed", "incomplete_details": details, "output": [], "usage": None}
    body = DIALECTS["responses"].read_chunk(json.dumps({"type": name, "response": response}).encode())
    assert body.end
    assert (body.response_id, body.parts[0].finish_reason) == ("r", reason)


def test_whole_replies_are_read_into_one_choice():
    message = {
        "id": "m1",
        "type": "message",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "name": "f", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }
    body = DIALECTS["messages"].read_reply(json.dumps(message).encode())
    assert body.choices == [ReplyChoice(text="ab", reasoning="hm", calls=[ToolCall(index=3)], finish_reason="tool_use")]
    assert (body.response_id, body.usage) == ("m1", Usage(prompt_tokens=1, completion_tokens=2))
    response = {
        "id": "r1",
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "ab", "logprobs": [{}, {}]}]},
        ],
        "usage": {"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 1}},
    }
    body = DIALECTS["responses"].read_reply(json.dumps(response).encode())
    assert body.choices == [ReplyChoice(text="ab", reasoning="hm", logprob_count=2, finish_reason="completed")]
    assert body.usage == Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1)


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", b"[]", b"null", b"{}", b'{"type":7}', b'{"type":"x","response":[]', b'{"a":' * 100_000, b"\xff"],
)
def test_what_is_not_its_json_is_refused_and_never_with_another_exception(endpoint, data):
    for read in DIALECTS[endpoint][:2]:
        with pytest.raises(Unreadable):
            read(data)
