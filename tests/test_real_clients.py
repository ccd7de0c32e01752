"""The clients that people use, with a real vLLM: each sees through the proxy what it sees without.

`make test-clients` installs them. A program of tests/clients makes the same calls twice, direct and through the proxy,
and reports all it saw; tests/client_reports.py knows the little that may differ. Nothing else asks this vLLM meanwhile,
and it caches no prompts: what it samples must depend on the request alone.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparseety.logreader import find_logs, read_log
from sparseety.records import RequestFinished
from tests.client_reports import read_report
from tests.proxy_command import start_proxy
from tests.vllm_server import serve

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "clients"
CLIENTS = ("curl", "openai", "anthropic", "langchain", "node")
SHOWN = {  # by the way each client has of saying it
    "curl": ("HTTP/1.1 100 Continue", '"finish_reason": ["length"]', '"logprobs": {"content": [{', "[DONE]"),
    "openai": (
        '"finish_reason": ["length"]',
        '"logprobs": {"content": [{',
        "response.output_text.delta",
        "APITimeoutError",
    ),
    "anthropic": ("max_tokens", "stop_sequence", "content_block_delta", "APITimeoutError"),
    "langchain": ('"finish_reason": "length"', '"logprobs": {"content": [{', "OpenAITimeoutError"),
    "node": ('"finish_reason": ["length"]', '"logprobs": {"content": [{', "APIConnectionTimeoutError"),
}
SERVER = ("--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def clients_folder() -> Path:
    """Where `make test-clients` has installed them; without it the tests are skipped."""
    value = os.environ.get("SPARSEETY_TEST_CLIENTS")
    if not value:
        pytest.skip("SPARSEETY_TEST_CLIENTS is not set (make test-clients)")
    folder = Path(value).absolute()
    for needed in ("python/bin/python", "node/node_modules/openai"):
        if not (folder / needed).exists():
            pytest.fail(f"SPARSEETY_TEST_CLIENTS={value} lacks {needed}")
    return folder


def report(client: str, url: str) -> dict[str, Any]:
    folder = clients_folder()
    command = [str(folder / "python/bin/python"), str(PROGRAMS / f"{client}_calls.py"), url]
    if client == "node":
        command = ["node", str(PROGRAMS / "openai_calls.cjs"), url]
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment |= {"NODE_PATH": str(folder / "node/node_modules"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{client} at {url}:\n{done.stdout[-500:]}\n{done.stderr}"
    return read_report(done.stdout)


@dataclass
class Run:
    logs: Path
    proxied: list[dict[str, Any]]  # what verify-tokens says of each request that went through the proxy
    unknown: list[dict[str, Any]]  # and of each that no proxy names: those that went past it
    summary: dict[str, Any]
    reports: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)  # direct, through


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    clients_folder()
    folder = tmp_path_factory.mktemp("clients")
    logs, reports = folder / "logs", {}
    with serve(folder, hook_dir=logs, arguments=SERVER) as server:
        proxy = start_proxy(folder, server.url, logs)
        try:
            for client in CLIENTS:
                began = time.monotonic()
                reports[client] = report(client, server.url), report(client, proxy.url)
                print(f"{client}: {len(reports[client][0])} calls twice, {time.monotonic() - began:.0f} s")
            time.sleep(1)  # the engine's log is written a little later
        finally:
            proxy.stop()
    command = [sys.executable, "-m", "verifier.cli", str(logs), "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    *requests, summary = [json.loads(line) for line in result.stdout.splitlines()]
    proxied = [request for request in requests if codes(request) != {"ORPHAN_BACKEND"}]
    unknown = [request for request in requests if codes(request) == {"ORPHAN_BACKEND"}]
    return Run(logs, proxied, unknown, summary, reports)


def codes(request: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in request["findings"]}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_sees_through_the_proxy_what_it_sees_without(run, client):
    direct, through = run.reports[client]
    assert list(direct) == list(through)
    for call, saw in direct.items():
        assert through[call] == saw, call


@pytest.mark.parametrize("client", CLIENTS)
def test_the_calls_show_what_they_are_there_to_show(run, client):
    """On the direct side; the other is equal. Otherwise two reports of nothing but trouble would be equal too."""
    direct, _ = run.reports[client]
    everything = json.dumps(direct)
    assert everything.count("The capital of France is Paris.") >= 6
    assert '\\"city\\": \\"Paris\\"' in everything  # the tool was called
    for shown in ("400", "404", *SHOWN[client]):
        assert shown in everything
    assert len(direct["in_parallel"]) == 8
    followed = direct["one_after_the_other"]
    replies = followed if client == "langchain" else followed["replies"]
    assert len(replies) == 40
    assert client == "langchain" or followed["connections"] == 1


def test_every_reply_through_the_proxy_is_joined_and_only_tool_calls_of_messages_are_left_unjudged(run):
    wrong = [request for request in run.proxied if request["verdict"] in ("fail", "open")]
    assert wrong == []
    unjudged = [request for request in run.proxied if request["verdict"] == "incomplete"]
    assert [request["endpoint"] for request in unjudged] == ["messages"] * 2, unjudged  # whole and streamed
    for request in unjudged:
        (finding,) = request["findings"]
        assert finding["code"] == "UNVERIFIABLE"
        assert "a parser may have laid the text into channels" in finding["detail"]
    outside = [codes(request) for request in run.proxied if request["verdict"] == "out_of_scope"]
    assert {code for each in outside for code in each} == {"REFUSED", "NOT_AN_ENDPOINT", "ABORTED_BEFORE_ID"}
    assert run.summary["damaged_lines"] == 0
    passed = [request for request in run.proxied if request["verdict"] == "pass"]
    assert {request["endpoint"] for request in passed} == {"chat", "completions", "responses", "messages"}
    found = {code for request in passed for code in codes(request)}
    assert {"TRIMMED_STOP", "ABORTED_PREFIX", "PARSED"} <= found
    print(f"\n{len(passed)} pass, {len(unjudged)} unjudged (tool calls), {len(outside)} outside: {run.summary}")


def test_nothing_is_asked_twice_on_the_way_and_nothing_is_swallowed(run):
    """The engine knows as many requests of the direct clients as are joined; but for those that were left unnamed."""
    joined = sum(request["verdict"] in ("pass", "incomplete") for request in run.proxied)
    unnamed = sum("ABORTED_BEFORE_ID" in codes(request) for request in run.proxied)
    assert joined > 400
    assert 0 <= len(run.unknown) - joined <= 2 * unnamed


def test_a_request_that_its_client_left_is_given_up_by_the_engine(run):
    """Each asks for 1000 tokens, and none gets them."""
    path = next(path for path in find_logs([str(run.logs)]) if path.name.startswith("engine"))
    problems: list[object] = []
    finished = [record for _, record in read_log(path, problems.append) if isinstance(record, RequestFinished)]
    assert problems == []
    print("\ntokens of the longest replies:", sorted(record.total_ids for record in finished)[-10:])
    assert max(record.total_ids for record in finished) < 1000
    assert sum(record.finish_reason == "abort" for record in finished) >= 2 * 3 * len(CLIENTS)
