"""Request bodies and headers: the pure parts around the relay."""

from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.headers import content_coding, end_to_end, for_upstream, is_event_stream
from proxy.request import read_parameters
from sparseety.records import Endpoint, RequestParameters


def test_what_decides_about_the_text_is_read_from_a_chat_request():
    body = b"""{"model":"m","stream":true,"n":2,"max_completion_tokens":7,"max_tokens":9,"temperature":0,"seed":4,
        "stop":"END","stop_token_ids":[1,2],"skip_special_tokens":false,"logprobs":true,"top_logprobs":2,
        "tools":[{"type":"function"}],"response_format":{"type":"json_schema"},"stream_options":{"include_usage":true},
        "messages":[{"role":"user","content":"caf\\u00e9"},{"role":"user","content":[{"type":"text","text":"ab"},
        {"type":"image_url","image_url":{"url":"x"}}]},{"role":"assistant","content":null},7]}"""
    assert read_parameters(body, "chat") == RequestParameters(
        model="m",
        stream=True,
        n=2,
        max_tokens=7,
        temperature=0.0,
        seed=4,
        stop=["END"],
        stop_token_ids=[1, 2],
        skip_special_tokens=False,
        logprobs=True,
        tools=True,
        structured=True,
        include_usage=True,
        messages=4,
        prompt_chars=6,
    )


def test_what_decides_about_the_text_is_read_from_a_responses_request():
    body = b"""{"model":"m","stream":true,"max_output_tokens":7,"max_tokens":9,"temperature":0,"n":3,"stop":["END"],
        "include":["message.output_text.logprobs"],"text":{"format":{"type":"json_schema"}},"instructions":"abc",
        "input":[{"role":"user","content":[{"type":"input_text","text":"de"}]},{"role":"user","content":"f"}]}"""
    assert read_parameters(body, "responses") == RequestParameters(
        model="m",
        stream=True,
        max_tokens=7,
        temperature=0.0,
        stop=["END"],
        logprobs=True,
        structured=True,
        messages=2,
        prompt_chars=6,
    )
    assert read_parameters(b'{"input":"abc"}', "responses") == RequestParameters(messages=1, prompt_chars=3)


def test_what_decides_about_the_text_is_read_from_a_messages_request():
    body = b"""{"model":"m","stream":true,"max_tokens":9,"temperature":0.5,"stop_sequences":["END"],"stop":["not this"],
        "system":[{"type":"text","text":"abc"}],"tools":[{"name":"f"}],"skip_special_tokens":false,
        "output_config":{"format":{"type":"json_schema"}},"messages":[{"role":"user","content":"de"}]}"""
    assert read_parameters(body, "messages") == RequestParameters(
        model="m",
        stream=True,
        max_tokens=9,
        temperature=0.5,
        stop=["END"],
        tools=True,
        structured=True,
        messages=1,
        prompt_chars=5,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts", "chars"),
    [
        ('"abc"', 1, 3),
        ('["a", "bc"]', 2, 3),
        ("[1, 2, 3]", 1, None),
        ("[[1, 2], [3]]", 2, None),
        ('["a", [3]]', 2, None),
        ("null", 1, None),
        ("7", 1, None),
        ("[]", 1, None),
    ],
)
def test_a_prompt_is_one_or_many_of_text_or_ids(prompt, prompts, chars):
    found = read_parameters(f'{{"prompt": {prompt}, "logprobs": 0}}'.encode(), "completions")
    assert found is not None
    assert (found.prompts, found.prompt_chars, found.logprobs) == (prompts, chars, True)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ('"stop": ["a", "b"]', RequestParameters(stop=["a", "b"])),
        ('"stop": null', RequestParameters()),
        ('"stop": 7', RequestParameters()),
        ('"n": "2"', RequestParameters(n=2)),
        ('"n": {}', RequestParameters()),
        ('"stream": "true"', RequestParameters(stream=True)),
        ('"max_tokens": 1e400', RequestParameters()),
        ('"stream_options": [1]', RequestParameters()),
        ('"response_format": {"type": "text"}', RequestParameters()),
        ('"messages": {"role": "user"}', RequestParameters()),
    ],
)
def test_a_field_of_an_odd_type_counts_as_absent(field, expected):
    assert read_parameters(b"{" + field.encode() + b"}", "chat") == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"\xff", b'{"a":', b'{"a":"\\ud83d"}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_has_no_parameters(body):
    assert read_parameters(body, "chat") is None


OTHER_FIELDS = ["prompt", "response_format", "input", "instructions", "include", "text", "system", "output_config"]

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may share the machine
@given(
    st.dictionaries(st.sampled_from([*RequestParameters.__struct_fields__, *OTHER_FIELDS]), _json),
    st.sampled_from(get_args(Endpoint)),
)
def test_no_request_body_raises(body, endpoint):
    found = read_parameters(msgspec.json.encode(body), endpoint)
    assert isinstance(found, RequestParameters)


def test_hop_by_hop_headers_and_those_that_connection_names_stay_here():
    headers = [
        (b"a", b"1"),
        (b"connection", b"close, X-Hop ,content-length"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"1"),
        (b"te", b"trailers"),
        (b"content-length", b"3"),
        (b"a", b"2"),
    ]
    assert end_to_end(headers) == [(b"a", b"1"), (b"content-length", b"3"), (b"a", b"2")]


def test_a_chunked_request_stays_chunked_and_one_without_host_gets_the_upstreams():
    headers = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked"), (b"a", b"1")]
    assert for_upstream(headers, b"vllm:8000") == [
        (b"host", b"vllm:8000"),
        (b"a", b"1"),
        (b"transfer-encoding", b"chunked"),
    ]


def test_a_media_type_is_read_without_its_parameters_and_a_coding_without_identity():
    assert is_event_stream([(b"content-type", b"Text/Event-Stream ;charset=utf-8")])
    assert not is_event_stream([(b"content-type", b"text/event-streams")])
    assert content_coding([(b"content-encoding", b"identity")]) is None
    assert content_coding([(b"content-encoding", b"gzip"), (b"content-encoding", b"br")]) == "gzip, br"
