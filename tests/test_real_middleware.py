"""The capture inside a real vLLM, with a proxy before it: two records of the same traffic, each judged by the ids."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, LogClose, LogOpen, RequestStart, Response, StreamDone
from tests.proxy_command import start_proxy
from tests.traffic import Ask, Got, mixed_traffic, send_all
from tests.vllm_server import serve

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent
QUESTION = "What is the capital of France?"
STORY = "Tell me a short story about a fox, with emoji."
LONG = "Write a long story about a fox."


def message(name: str, prompt: str, **fields: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "stream": True, "temperature": 0.9}
    leave = fields.pop("leave", None)
    return Ask(name, "/v1/messages", body | fields, True, leave)


def response(name: str, prompt: str, **fields: Any) -> Ask:
    leave = fields.pop("leave", None)
    return Ask(name, "/v1/responses", {"input": prompt, "max_output_tokens": 24, "stream": True} | fields, True, leave)


def other_endpoints() -> list[Ask]:
    asks = [message(f"message-{n}", prompt) for n, prompt in enumerate([QUESTION, STORY] * 2)]
    asks += [response(f"response-{n}", prompt) for n, prompt in enumerate([QUESTION, STORY] * 2)]
    asks += [
        message("message-stop", QUESTION, temperature=0, stop_sequences=["Fra"]),
        message("message-whole-stop", QUESTION, temperature=0, stop_sequences=["Fra"], stream=False),
        message("message-whole", QUESTION, stream=False, system="You are terse."),
        # Not at random: a reply that ends by itself after a few tokens is over before its client can leave.
        message("message-left", LONG, temperature=0, max_tokens=300, leave=3),
        message("message-refused", QUESTION, max_tokens=-1),
        response("response-whole", QUESTION, stream=False),
        response("response-length", STORY, max_output_tokens=5),
        response("response-instructed", QUESTION, instructions="You are terse.", temperature=0),
        response("response-left", LONG, temperature=0, max_output_tokens=300, leave=6),
        response("response-refused", QUESTION, model="nope"),
    ]
    return asks


@dataclass
class Run:
    engine: Path
    inside: Path  # the middleware's log
    hop: Path  # the proxy's
    got: list[Got]
    output: str  # what vLLM printed

    def verify(self, logs: Path) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "verifier.cli", str(logs), str(self.engine), "--json"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        return [json.loads(line) for line in result.stdout.splitlines()]


def records(folder: Path) -> list[AnyRecord]:
    (path,) = find_logs([str(folder)])
    return [record for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("middleware")
    engine, inside, hop = folder / "engine", folder / "inside", folder / "hop"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("SPARSEETY_PROXY_LOG_DIR", str(inside))
        with serve(folder, hook_dir=engine, arguments=("--middleware", "proxy.middleware.Capture")) as server:
            patch.delenv("SPARSEETY_PROXY_LOG_DIR")
            proxy = start_proxy(folder, server.url, hop)
            try:
                asks = [*other_endpoints(), *mixed_traffic()[::3]]
                got = asyncio.run(send_all(proxy.url, asks, at_once=20))
                time.sleep(1)  # aborts reach the engine a little after their clients are gone
            finally:
                proxy.stop()
    return Run(engine, inside, hop, got, server.output.read_text(errors="replace"))


def test_vllm_says_that_it_is_recorded_and_the_log_is_closed_in_order(run):
    opening, *_, closing = records(run.inside)
    assert isinstance(opening, LogOpen)
    assert opening.scope.mounting == "middleware"
    assert isinstance(closing, LogClose)
    assert closing.lost == 0
    assert "their text included, are recorded in" in run.output


@pytest.mark.parametrize("mounting", ["inside", "hop"])
def test_every_request_passes_by_the_record_of_either_mounting(run, mounting):
    *requests, summary = run.verify(getattr(run, mounting))
    wrong = [request for request in requests if request["verdict"] in ("fail", "incomplete", "open")]
    assert wrong == []
    passed = {request["request_id"] for request in requests if request["verdict"] == "pass"}
    for ask in other_endpoints():
        if ask.path == "/v1/messages" and "refused" not in ask.name:
            assert f"chatcmpl-{ask.name}" in passed, ask.name
    assert len([request_id for request_id in passed if request_id.startswith("resp_")]) >= 7
    assert {finding["code"] for request in requests for finding in request["findings"]} >= {"TRIMMED_STOP", "REFUSED"}
    print(f"\n{mounting}: {summary}")


def ended(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each request that had a whole reply, by what the reply hashes to, less what is about the place."""
    by_capture: dict[int, list[AnyRecord]] = {}
    for record in records(folder):
        if (number := getattr(record, "capture", None)) is not None:
            by_capture.setdefault(number, []).append(record)
    found = {}
    for each in by_capture.values():
        end = each[-1]
        assert isinstance(each[0], RequestStart)
        assert isinstance(end, StreamDone | Response)
        if end.outcome == "complete" and end.sha256:
            plain = [msgspec.to_builtins(record) for record in each]
            for record in plain:
                for name in ("ts", "uuid", "capture", "read", "reads", "stamps"):
                    record.pop(name, None)
            found[end.sha256] = plain
    return found


def test_both_mountings_record_the_same_of_every_reply_that_came_whole(run):
    inside, hop = ended(run.inside), ended(run.hop)
    complete = {got.sha256 for got in run.got if got.complete}
    assert len(complete) > 30
    assert complete <= hop.keys()
    assert complete <= inside.keys()
    for digest in complete:
        assert inside[digest] == hop[digest]


def test_a_client_that_left_is_one_that_left_in_both(run):
    for folder in (run.inside, run.hop):
        starts = {record.capture: record for record in records(folder) if isinstance(record, RequestStart)}
        ends = [record for record in records(folder) if isinstance(record, StreamDone | Response)]
        outcomes = {starts[end.capture].x_request_id: end.outcome for end in ends}
        assert {outcomes["message-left"], outcomes["response-left"]} == {"client_gone"}
