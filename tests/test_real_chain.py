"""End to end on a real vLLM: client, proxy, plugin, logs, verify-tokens. What the project exists for, once through."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparseety.logreader import LogProblem, find_logs, read_log
from sparseety.records import AnyRecord, Response, Step, StreamDone
from tests.proxy_command import start_proxy
from tests.traffic import Got, mixed_traffic, send_all, usage_of
from tests.vllm_server import serve

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent


@dataclass
class Chain:
    """One run of the traffic, everything stopped in order."""

    logs: Path
    got: list[Got]
    at_vllm: dict[str, dict[str, object]]  # X-Request-Id -> hash and size where vLLM sent it

    def records(self) -> list[AnyRecord]:
        problems: list[LogProblem] = []
        found = [record for path in find_logs([str(self.logs)]) for _, record in read_log(path, problems.append)]
        assert problems == []
        return found

    def verify(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verifier.cli", str(self.logs), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Chain:
    folder = tmp_path_factory.mktemp("chain")
    logs, tap = folder / "logs", folder / "tap.jsonl"
    environment = {"SPARSEETY_TEST_TAP": str(tap), "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with serve(folder, hook_dir=logs, arguments=("--middleware", "tests.vllm_tap.HashBodies")) as server:
            proxy = start_proxy(folder, server.url, logs)
            try:
                got = asyncio.run(send_all(proxy.url, mixed_traffic(), at_once=50))
                time.sleep(1)  # aborts reach the engine a little after their clients are gone
            finally:
                proxy.stop()
    lines = [json.loads(line) for line in tap.read_text().splitlines()]
    return Chain(logs, got, {line["request_id"]: line for line in lines if line["request_id"]})


def test_every_named_request_is_joined_and_passes_without_a_false_alarm(chain):
    result = chain.verify("--json")
    *requests, summary = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = [request for request in requests if request["verdict"] in ("fail", "incomplete", "open")]
    assert wrong == [], chain.verify("-v", "--show-text").stdout + result.stderr
    assert result.returncode == 0, result.stderr
    served = [got for got in chain.got if got.status == 200]
    assert len(served) >= 60
    judged = [request for request in requests if request["verdict"] == "pass"]
    left = [got for got in chain.got if got.ask.leave == 0]
    assert len(served) <= len(judged) <= len(served) + len(left)
    assert summary["coverage"] == 1.0
    assert summary["tokens"] == summary["checked"] > 1000
    codes = {finding["code"] for request in requests for finding in request["findings"]}
    # The traffic is what it claims to be: each rule was needed by some request.
    assert {"TRIMMED_STOP", "INCOMPLETE_UTF8_TAIL", "ABORTED_PREFIX", "SPECIAL_SKIPPED", "REFUSED"} <= codes
    print(f"\nreal vLLM: {chain.verify().stdout}", f"choices compared: {sum(r['choices'] for r in requests)}", sep="")


def test_the_client_gets_the_very_bytes_that_vllm_sent(chain):
    compared = 0
    recorded = {
        ending.sha256
        for ending in chain.records()
        if isinstance(ending, StreamDone | Response) and ending.outcome == "complete"
    }
    for got in chain.got:
        if got.complete and got.ask.named:
            assert got.sha256 == chain.at_vllm[got.ask.name]["sha256"], got.ask.name
            assert got.sha256 in recorded, got.ask.name
            compared += 1
    assert compared >= 60


def test_usage_is_the_number_of_ids_that_the_engine_logged(chain):
    ids: dict[int, int] = {}
    external: dict[str, list[int]] = {}
    for record in chain.records():
        if isinstance(record, Step):
            for row in record.rows:
                ids[row.request] = ids.get(row.request, 0) + len(row.ids)
        elif hasattr(record, "external_id"):
            reply_id = record.external_id
            if reply_id.startswith("cmpl-"):
                reply_id = reply_id.rpartition("-")[0]
            external.setdefault(reply_id, []).append(record.request)
    compared = 0
    for got in chain.got:
        if got.status != 200 or not got.complete or not got.ask.named or (usage := usage_of(got)) is None:
            continue
        prefix = "chatcmpl-" if "chat" in got.ask.path else "cmpl-"
        assert usage == sum(ids[request] for request in external[prefix + got.ask.name]), got.ask.name
        compared += 1
    assert compared >= 50


def test_a_log_line_is_small(chain):
    """Reports the figure; the budget is held by the benchmark, on closed segments."""
    size = sum(path.stat().st_size for path in find_logs([str(chain.logs)]))
    tokens = sum(len(row.ids) for record in chain.records() if isinstance(record, Step) for row in record.rows)
    print(f"\nlogs: {size} bytes for {tokens} tokens, {size / tokens:.0f} bytes a token, not compressed")
    assert size / tokens < 600


def test_a_fault_put_into_a_copy_of_the_logs_is_found(chain, tmp_path):
    """The pass above means something: the same logs with one character changed do not pass."""
    changed = tmp_path / "changed"
    changed.mkdir()
    done = False
    for path in find_logs([str(chain.logs)]):
        lines = path.read_bytes().splitlines(keepends=True)
        if path.name.startswith("proxy"):
            for index, line in enumerate(lines):
                record = json.loads(line)
                if not done and record["event"] == "chunk" and record.get("delta_text", "").strip():
                    record["delta_text"] = "§" * len(record["delta_text"])  # as long as before: the log is whole
                    lines[index] = json.dumps(record).encode() + b"\n"
                    done = True
        (changed / path.name).write_bytes(b"".join(lines))
    assert done
    command = [sys.executable, "-m", "verifier.cli", str(changed)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stdout
