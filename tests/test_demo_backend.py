"""The demo backend over HTTP, and the engine's log that it writes."""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.backend import Settings, serving
from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, EngineStart, LogClose, RequestAdded, RequestFinished, Step

TOKENIZER = Path(__file__).parent.parent / "deploy" / "demo" / "tokenizer"
PROMPT = "Write a C program that reverses a string in place."
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0.9}
COMPLETION = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.9}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Settings(token_delay=0)) as url:
        yield url


def records_in(folder: Path) -> list[AnyRecord]:
    def refuse(problem: object) -> None:
        raise AssertionError(problem)

    [path] = find_logs([str(folder)])
    return [record for _, record in read_log(path, refuse)]


def chunks(response: httpx.Response) -> list[Any]:
    assert response.text.endswith("data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]


def test_the_log_of_a_request_holds_all_that_the_plugin_would_write(tmp_path: Path) -> None:
    body = CHAT | {"stream": True, "stop": ["zzz"], "stop_token_ids": [9], "skip_special_tokens": False}
    with serving(Settings(log_dir=tmp_path, token_delay=0)) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"X-Request-Id": "abc"})
    _, start, added, *steps, finished, closed = records_in(tmp_path)
    assert isinstance(start, EngineStart)
    data = (TOKENIZER / "tokenizer.json").read_bytes()
    assert start.tokenizer.files["tokenizer.json"] == hashlib.sha256(data).hexdigest()
    assert start.tokenizer.vocab_size == 49152
    assert isinstance(added, RequestAdded)
    assert added.external_id == chunks(response)[0]["id"] == "chatcmpl-abc"
    assert re.fullmatch(r"chatcmpl-abc-[0-9a-f]{8}", added.engine_id)
    assert (added.stop, added.stop_token_ids, added.eos_ids) == (["zzz"], [9], [2])
    assert (added.max_tokens, added.skip_special_tokens) == (8, False)
    assert added.prompt_tail[-4:] == [1, 520, 9531, 198]
    rows = [row for step in steps if isinstance(step, Step) for row in step.rows]
    assert [row.first_index for row in rows] == list(range(8))
    assert [row.start for row in rows] == [0] + [None] * 7  # None: where the one before ended
    assert isinstance(finished, RequestFinished)
    assert (finished.total_ids, finished.finish_reason) == (8, "length")
    assert isinstance(closed, LogClose)


def test_children_and_prompts_are_named_as_vllm_names_them(tmp_path: Path) -> None:
    with serving(Settings(log_dir=tmp_path, token_delay=0)) as url:
        httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"n": 2}, headers={"X-Request-Id": "a"})
        reply = httpx.post(f"{url}/v1/completions", json=COMPLETION, headers={"X-Request-Id": "b"})
        both = COMPLETION | {"prompt": [PROMPT, "hi"], "n": 2, "stream": True}
        stream = httpx.post(f"{url}/v1/completions", json=both, headers={"X-Request-Id": "c"})
    added = [record for record in records_in(tmp_path) if isinstance(record, RequestAdded)]
    assert [(re.sub("-[0-9a-f]{8}$", "", r.engine_id), r.external_id, r.child) for r in added] == [
        ("0_chatcmpl-a", "chatcmpl-a", 0),
        ("1_chatcmpl-a", "chatcmpl-a", 1),
        ("cmpl-b-0", "cmpl-b-0", 0),
        ("0_cmpl-c-0", "cmpl-c-0", 0),
        ("1_cmpl-c-0", "cmpl-c-0", 1),
        ("0_cmpl-c-1", "cmpl-c-1", 0),
        ("1_cmpl-c-1", "cmpl-c-1", 1),
    ]
    assert reply.json()["id"] == "cmpl-b"
    assert {chunk["id"] for chunk in chunks(stream)} == {"cmpl-c"}
    assert {choice["index"] for chunk in chunks(stream) for choice in chunk["choices"]} == {0, 1, 2, 3}


def test_running_requests_share_steps_in_the_log(tmp_path: Path) -> None:
    async def both(url: str) -> None:
        async with httpx.AsyncClient() as client:
            body = CHAT | {"max_tokens": 40}
            await asyncio.gather(*(client.post(f"{url}/v1/chat/completions", json=body) for _ in range(3)))

    with serving(Settings(log_dir=tmp_path, token_delay=0.01)) as url:
        asyncio.run(both(url))
    steps = [record for record in records_in(tmp_path) if isinstance(record, Step)]
    assert max(len(step.rows) for step in steps) == 3
    assert [step.step for step in steps] == list(range(len(steps)))


def test_a_client_that_leaves_makes_the_engine_abort(tmp_path: Path) -> None:
    with serving(Settings(log_dir=tmp_path, token_delay=0.01)) as url:
        body = CHAT | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            next(response.iter_raw())
        deadline = time.monotonic() + 10
        while not any(isinstance(record, RequestFinished) for record in records_in(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    [finished] = [record for record in records_in(tmp_path) if isinstance(record, RequestFinished)]
    assert finished.finish_reason == "abort"
    assert 0 < finished.total_ids < 1000


def test_a_stop_string_is_an_abort_to_the_engine_and_a_stop_to_the_client(tmp_path: Path) -> None:
    with serving(Settings(log_dir=tmp_path, token_delay=0)) as url:
        body = CHAT | {"stop": "e", "max_tokens": 50, "return_token_ids": True}
        choice = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e")
    assert "e" not in choice["message"]["content"]
    [finished] = [record for record in records_in(tmp_path) if isinstance(record, RequestFinished)]
    assert (finished.finish_reason, finished.stop_reason) == ("abort", None)
    assert finished.total_ids == len(choice["token_ids"]) + 1


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_a_stream_and_a_whole_reply_say_the_same(endpoint: str, url: str) -> None:
    body = (CHAT if endpoint.startswith("chat") else COMPLETION) | {"n": 2, "return_token_ids": True, "logprobs": 1}
    body |= {"logprobs": True, "top_logprobs": 2} if endpoint.startswith("chat") else {}
    whole = httpx.post(f"{url}/v1/{endpoint}", json=body).json()
    streamed = chunks(
        httpx.post(f"{url}/v1/{endpoint}", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    )
    for index, choice in enumerate(whole["choices"]):
        own = [part for chunk in streamed for part in chunk["choices"] if part["index"] == index]
        text = "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in own)
        assert text == (choice["message"]["content"] if "message" in choice else choice["text"])
        assert [i for part in own for i in part.get("token_ids") or []] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
        key = "content" if "message" in choice else "tokens"
        counts = [len(part["logprobs"][key]) for part in own if part["logprobs"]]
        assert counts == [1] * 8
        assert len(choice["logprobs"][key]) == 8
    usage = streamed[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16


def test_the_request_id_comes_from_the_header_else_the_body_else_chance(url: str) -> None:
    def response_id(headers: dict[str, str], **more: str) -> str:
        reply: str = httpx.post(f"{url}/v1/chat/completions", json=CHAT | more, headers=headers).json()["id"]
        return reply

    assert response_id({"X-Request-Id": "h"}, request_id="b") == "chatcmpl-h"
    assert response_id({"X-Request-Id": ""}) == "chatcmpl-"
    assert response_id({}, request_id="b") == "chatcmpl-b"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{16}", response_id({}))


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", {"messages": "nope"}, 400, "body.messages", "array"),
        ("chat/completions", {"model": "m"}, 404, "model", "The model `m` does not exist"),
        ("chat/completions", {}, 400, "body.messages", "missing"),
        ("chat/completions", CHAT | {"max_tokens": -1}, 400, "max_tokens", "at least 1, got -1"),
        ("chat/completions", CHAT | {"n": 2, "temperature": 0}, 400, "n", "greedy"),
        ("chat/completions", CHAT | {"n": 0}, 400, "n", "at least 1"),
        ("chat/completions", CHAT | {"stop": ["a", ""]}, 400, "stop", "empty"),
        ("chat/completions", CHAT | {"max_tokens": 5000}, 400, "input_tokens", "maximum context length is 2048"),
        ("chat/completions", CHAT | {"stream_options": {}}, 400, "stream_options", "stream=True"),
        ("chat/completions", CHAT | {"tools": [{}]}, 400, "tools", "not supported"),
        ("completions", {"max_tokens": 3}, 400, "prompt", "prompt"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo", "not supported"),
    ],
)
def test_wrong_requests_are_refused_in_the_server_s_own_shape(
    path: str, body: dict[str, Any], status: int, param: str, words: str, url: str
) -> None:
    reply = httpx.post(f"{url}/v1/{path}", json=body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["param"], error["code"]) == (param, status)
    assert words in error["message"]


def test_a_body_that_is_no_json_is_a_400(url: str) -> None:
    for content in (b'{"model": }', b"", b"\xff"):
        reply = httpx.post(f"{url}/v1/chat/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "Bad Request")


def test_prompts_may_be_texts_or_ids_or_parts(url: str) -> None:
    texts = httpx.post(f"{url}/v1/completions", json=COMPLETION | {"prompt": [PROMPT]}).json()
    assert httpx.post(f"{url}/v1/completions", json=COMPLETION).json()["choices"] == texts["choices"]
    ids = httpx.post(f"{url}/v1/completions", json={"prompt": [504, 3575], "return_token_ids": True}).json()
    assert ids["choices"][0]["prompt_token_ids"] == [504, 3575]
    assert len(ids["choices"][0]["token_ids"]) == 16, "vLLM's default for a completion"
    parts = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
    chat = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"messages": [parts]}).json()
    assert chat["choices"] == httpx.post(f"{url}/v1/chat/completions", json=CHAT).json()["choices"]


def test_the_small_endpoints_answer(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").json()["version"].startswith("0.32.0+")
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "SmolLM2-135M-Instruct"
    assert httpx.get(f"{url}/v1/nothing").json() == {"detail": "Not Found"}
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_a_log_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="did not start"), serving(Settings(log_dir=tmp_path / "file")):
        pass
