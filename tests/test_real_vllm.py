"""The plugin inside a real vLLM, on the CPU. `make test-vllm`; see tests/vllm_server.py for what has to be there.

A server takes half a minute to come up, so each of the two is started once for the whole module, and never both at once
for longer than it takes: `plain_replies` stops its server before it returns.
"""

import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparseety import doctor
from sparseety.logreader import read_log
from sparseety.records import AnyRecord, EngineStart, LogClose, RequestAdded, RequestFinished, Step
from tests.vllm_server import VllmServer, serve

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SKY = [{"role": "user", "content": "Why is the sky blue? Explain it step by step."}]
EMOJI = [{"role": "user", "content": "Repeat exactly: 🌍🚀 naïve 日本語 Ελληνικά"}]

# Temperature 0 (or a seed), one at a time: what is sampled does not depend on what else the server does.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": SKY, "max_tokens": 48}),
    "chat-stream": (CHAT, {"messages": SKY, "max_tokens": 48, "stream": True}),
    "chat-stream-usage": (
        CHAT,
        {"messages": EMOJI, "max_tokens": 48, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-ends-by-itself": (CHAT, {"messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 200}),
    "chat-stop-string": (CHAT, {"messages": SKY, "max_tokens": 96, "stop": [" light", "\n\n"]}),
    "chat-stop-string-stream": (
        CHAT,
        {"messages": SKY, "max_tokens": 96, "stop": [" light"], "include_stop_str_in_output": True, "stream": True},
    ),
    "chat-logprobs": (CHAT, {"messages": SKY, "max_tokens": 16, "logprobs": True, "top_logprobs": 3}),
    "chat-logprobs-stream": (
        CHAT,
        {"messages": SKY, "max_tokens": 16, "logprobs": True, "top_logprobs": 3, "stream": True},
    ),
    "chat-n": (CHAT, {"messages": SKY, "max_tokens": 24, "n": 2, "temperature": 0.8, "seed": 7}),
    "chat-n-stream": (CHAT, {"messages": SKY, "max_tokens": 24, "n": 2, "temperature": 0.8, "seed": 7, "stream": True}),
    "chat-special-tokens": (CHAT, {"messages": SKY, "max_tokens": 200, "skip_special_tokens": False}),
    "chat-ids": (CHAT, {"messages": SKY, "max_tokens": 24, "return_token_ids": True}),
    "chat-wrong": (CHAT, {"messages": SKY, "max_tokens": 24, "temperature": -1}),
    "completions": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 48}),
    "completions-prompts": (
        COMPLETIONS,
        {"prompt": ["Once upon a time", "The capital of"], "max_tokens": 24, "stop_token_ids": [28]},
    ),
    "completions-stream": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 48, "stream": True, "echo": True}),
    "completions-ignoring-the-end": (COMPLETIONS, {"prompt": "The end.", "max_tokens": 64, "ignore_eos": True}),
    "completions-logprobs": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": 2}),
}


def post(server: VllmServer, name: str) -> tuple[int, bytes]:
    """Send one of REQUESTS under its own name as X-Request-Id; returns status and body."""
    path, body = REQUESTS[name]
    request = urllib.request.Request(
        server.url + path,
        json.dumps({"model": "m", "temperature": 0} | body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def folded(body: bytes) -> Any:
    """What a client makes of a body, less the time of day; of a stream, without where it was cut.

    A server whose client reads slowly joins deltas, so where a stream is cut is chance.
    """
    if not body.startswith(b"data: "):
        return _timeless(json.loads(body))
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    whole: dict[str, Any] = {"choices": defaultdict(lambda: defaultdict(list))}
    for event in map(json.loads, events):
        choices = _timeless(event).pop("choices")
        whole |= event
        for choice in choices:
            into = whole["choices"][choice["index"]]
            for key, value in (choice | choice.pop("delta", {})).items():
                into[key].append(value)
    for choice in whole["choices"].values():
        for key in ("content", "text", "reasoning"):
            choice[key] = "".join(piece or "" for piece in choice[key])
        choice["logprobs"] = [
            entry for piece in choice["logprobs"] if piece for entry in piece.get("content", piece.get("tokens", []))
        ]
        choice["token_ids"] = [id_ for piece in choice["token_ids"] if piece for id_ in piece]
        for key in set(choice) - {"content", "text", "reasoning", "logprobs", "token_ids"}:
            choice[key] = [value for value in choice[key] if value is not None][-1:]
    return json.loads(json.dumps(whole))


def _timeless(body: dict[str, Any]) -> dict[str, Any]:
    body.pop("created", None)
    return body


@pytest.fixture(scope="module")
def plain_replies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bytes]]:
    """What a vLLM without the plugin replies to each of REQUESTS. Its server is gone when this returns."""
    with serve(tmp_path_factory.mktemp("plain"), hook_dir=None) as server:
        replies = {name: post(server, name) for name in REQUESTS}
        assert "sparseety" not in server.output.read_text()
        return replies


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM with the plugin, for all tests of this module. Its log is `engine_log(server)`."""
    folder = tmp_path_factory.mktemp("plugin")
    with serve(folder, hook_dir=folder / "logs") as server:
        yield server


def engine_log(server: VllmServer) -> list[AnyRecord]:
    """What the plugin has written so far."""
    time.sleep(0.5)  # the writer's interval, and the abort that follows a stop string
    (path,) = (server.output.parent / "logs").glob("engine-*.jsonl")
    problems: list[object] = []
    found = [record for _, record in read_log(path, problems.append)]
    assert problems == []
    return found


def engine_ids(found: list[AnyRecord]) -> dict[tuple[str, int], list[int]]:
    """The accepted ids by (external id, child). Where an external id was used again, the last one counts."""
    added = {record.request: record for record in found if isinstance(record, RequestAdded)}
    ids: dict[int, list[int]] = {number: [] for number in added}
    for record in found:
        for row in record.rows if isinstance(record, Step) else []:
            assert not row.ids or row.first_index == len(ids[row.request])
            ids[row.request] += row.ids
    return {(record.external_id, record.child): ids[number] for number, record in added.items()}


def test_a_vllm_with_the_plugin_loaded_replies_as_without_it(
    plain_replies: dict[str, tuple[int, bytes]], server: VllmServer
) -> None:
    for name, (status, body) in plain_replies.items():
        plugin_status, plugin_body = post(server, name)
        assert (name, plugin_status, folded(plugin_body)) == (name, status, folded(body))
    recorded = {external_id.removesuffix("-0").removesuffix("-1") for external_id, _ in engine_ids(engine_log(server))}
    expected = {f"{'cmpl' if path == COMPLETIONS else 'chatcmpl'}-{name}" for name, (path, _) in REQUESTS.items()}
    assert recorded == expected - {"chatcmpl-chat-wrong"}


def test_the_log_has_the_ids_that_the_server_itself_says_it_delivered(server: VllmServer) -> None:
    _, body = post(server, "chat-ids")
    (choice,) = json.loads(body)["choices"]
    assert engine_ids(engine_log(server))["chatcmpl-chat-ids", 0] == choice["token_ids"]


def test_the_start_names_the_engine_and_all_hooks_are_attached(server: VllmServer) -> None:
    (start,) = [record for record in engine_log(server) if isinstance(record, EngineStart)]
    assert start.served_names == ["m"]
    assert start.max_model_len == 2048
    assert "tokenizer.json" in start.tokenizer.files
    assert (start.tokenizer.vocab_size or 0) > 1000
    assert start.hooks_attached == start.hooks_expected


def test_the_doctor_finds_the_plugin_alive_its_hooks_attached_and_the_tokenizer_the_same(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = str(server.output.parent / "logs")
    doctor.main(["--json", "--log-dir", logs, "--upstream", server.url])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    found = {name: check["status"] for name, check in checks.items()}
    areas = (
        "plugin.version",
        "plugin.alive",
        "plugin.hooks",
        "verifier.tokenizer",
        "upstream.reachable",
        "logs.folder",
    )
    assert {name: found[name] for name in areas} == dict.fromkeys(areas, "ok"), checks
    # As its prometheus_client is: with the colon for both, or lost towards a Prometheus 2.
    assert "vllm:…" in checks["upstream.metrics"]["text"]


def test_a_stopped_vllm_has_closed_its_log_with_every_reply_in_it(tmp_path: Path) -> None:
    """With a time to drain. Without (vLLM's default) it kills its engine a moment after asking it to end."""
    with serve(tmp_path, hook_dir=tmp_path / "logs", arguments=("--shutdown-timeout", "30")) as server:
        post(server, "chat")
        server.stop()
        assert server.exit_code == 0, server.tail()
        found = engine_log(server)
    assert isinstance(found[-1], LogClose)
    assert found[-1].lost == 0
    (finished,) = [record for record in found if isinstance(record, RequestFinished)]
    assert finished.total_ids == len(engine_ids(found)["chatcmpl-chat", 0]) == 48
