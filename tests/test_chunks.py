"""Reading OpenAI's JSON as vLLM writes it, with the oddities that servers are known for."""

import json

import pytest

from sparseety.chunks import Part, Unreadable, read_chunk, read_reply
from sparseety.records import ToolCall, Usage


def chat(delta: object, **choice: object) -> bytes:
    return json.dumps({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, **choice}]}).encode()


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (chat({"role": "assistant", "content": ""}), [Part("role")]),
        (chat({"content": "Hi"}), [Part("text", text="Hi")]),
        (chat({"content": None}), [Part("text")]),
        (chat({}), [Part("text")]),
        (chat(None, finish_reason="stop"), [Part("finish", finish_reason="stop")]),
        (chat({"content": "x"}, finish_reason=""), [Part("text", text="x")]),
        (
            chat({"content": " and"}, finish_reason="stop", stop_reason="\n4. "),
            [Part("text", text=" and", finish_reason="stop", stop_reason="\n4. ")],
        ),
        (chat({}, finish_reason="stop", stop_reason=7), [Part("finish", finish_reason="stop", stop_reason=7)]),
        (chat({"reasoning_content": "hm"}), [Part("reasoning", text="hm")]),
        (
            chat({"reasoning": "hm", "content": "so"}, token_ids=[1, 2]),
            [Part("reasoning", text="hm"), Part("text", text="so", token_ids=[1, 2])],
        ),
        (
            chat({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]}),
            [Part("tool_call", text='{"a', calls=[ToolCall(name="f", arguments='{"a')])],
        ),
        (
            chat({"function_call": {"name": "f", "arguments": "{}"}}),
            [Part("tool_call", text="{}", calls=[ToolCall(name="f", arguments="{}")])],
        ),
        (chat({"refusal": "No."}), [Part("text", lossy=True)]),
        (chat({"content": "a"}, logprobs={"content": [{}, {}]}), [Part("text", text="a", logprob_count=2)]),
        (
            b'{"id":"cmpl-1","choices":[{"index":1,"text":" a","logprobs":{"tokens":["x"]},"finish_reason":"length"}]}',
            [Part("text", 1, " a", logprob_count=1, finish_reason="length")],
        ),
        (b'{"error":{"message":"boom","code":500}}', [Part("error", lossy=True)]),
        (b'{"object":"error","message":"boom","code":400}', [Part("error", lossy=True)]),
    ],
)
def test_each_kind_of_event_is_told_apart(data, parts):
    assert read_chunk(data).parts == parts


def test_usage_is_read_with_and_without_choices():
    usage = b'"usage":{"prompt_tokens":37,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":32}}'
    alone = read_chunk(b'{"id":"chatcmpl-1","choices":[],' + usage + b"}")
    assert [part.kind for part in alone.parts] == ["usage"]
    assert alone.usage == Usage(prompt_tokens=37, completion_tokens=8, cached_tokens=32)
    beside = read_chunk(b'{"choices":[{"index":0,"delta":{"content":"x"}}],' + usage + b"}")
    assert [part.kind for part in beside.parts] == ["text"]
    assert beside.usage == alone.usage


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[1,2]",
        b'{"object":"something"}',
        b'{"choices":[{"index":"zero"}]}',
        b'{"choices":[{"index":0,"delta":{"content":["parts"]}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"\\ud800"}}]}',
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_its_json_is_refused_with_a_reason_and_never_with_another_exception(data):
    for read in (read_chunk, read_reply):
        with pytest.raises(Unreadable) as refusal:
            read(data)
        assert str(refusal.value)


def test_a_whole_reply_gives_each_choice():
    body = read_reply(
        b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop",'
        b'"token_ids":[5,2]},{"index":1,"message":{"content":null,"tool_calls":[{"function":{"arguments":"{}"}}]},'
        b'"finish_reason":"tool_calls"}],"usage":{"completion_tokens":4}}'
    )
    first, second = body.choices
    assert (first.text, first.token_ids, first.finish_reason) == ("a", [5, 2], "stop")
    assert (second.text, second.calls) == ("", [ToolCall(arguments="{}")])
    assert body.usage == Usage(completion_tokens=4)
