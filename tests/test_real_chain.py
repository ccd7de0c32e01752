"""End to end on a real vLLM: client, proxy, plugin, logs, verify-tokens. What the project exists for, once through."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparseety.logreader import LogProblem, find_logs, read_log
from sparseety.records import AnyRecord, Kv, RequestAdded, RequestFinished, Response, Step, StreamDone
from sparseety.sampling import join_key
from tests.proxy_command import start_proxy
from tests.traffic import Got, mixed_traffic, send_all, usage_of
from tests.vllm_server import DRAFTS, serve, tiny_model

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Setup:
    """A server to run the traffic through."""

    name: str
    arguments: tuple[str, ...] = ()
    tiny: str | None = None  # a tiny random model of this name; None: the chat model
    hook: dict[str, str] = field(default_factory=dict)
    longer: int = 1  # replies are so many times as long
    environment: dict[str, str] = field(default_factory=dict)  # of vLLM


PLAIN = Setup("plain")
CROWDED = Setup(
    "drafts, prompts in parts, few blocks",
    (
        *("--speculative-config", DRAFTS, "--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
        *("--max-model-len", "320", "--block-size", "32", "--num-gpu-blocks-override", "11"),
    ),  # with the chat model: a random one never says what was said before, so none of its drafts is accepted
    hook={"SPARSEETY_HOOK_CAPTURE": "tokens,kv"},
    longer=3,
)
ENGINES = Setup("two engines, two API servers", ("--data-parallel-size", "2", "--api-server-count", "2"), tiny="llama")
# Those that need not run each time. A random model says every kind of id, and starts fast.
RANKS = Setup(
    *("tensor parallel 2", ("--tensor-parallel-size", "2"), "llama"),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},  # else vLLM wants a NUMA node for each rank
)
COMPILED = Setup("compiled", ("--no-enforce-eager",), "llama")
COLD = Setup("no prefix cache", ("--no-enable-prefix-caching",), "llama")
SETUPS = [
    PLAIN,
    CROWDED,
    ENGINES,
    *(pytest.param(each, marks=pytest.mark.e2e_full) for each in (RANKS, COMPILED, COLD)),
]


@dataclass
class Chain:
    """One run of the traffic, everything stopped in order."""

    setup: Setup
    logs: Path
    got: list[Got]
    at_vllm: dict[str, dict[str, object]]  # X-Request-Id -> hash and size where vLLM sent it
    metrics: str  # what vLLM's /metrics said at the end, and the proxy's

    def records(self) -> list[AnyRecord]:
        problems: list[LogProblem] = []
        found = [record for path in find_logs([str(self.logs)]) for _, record in read_log(path, problems.append)]
        assert problems == []
        return found

    def engines(self) -> list[list[AnyRecord]]:
        """The records of each engine."""
        paths = [path for path in find_logs([str(self.logs)]) if path.name.startswith("engine")]
        return [[record for _, record in read_log(path, print)] for path in paths]

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of a metric that have these labels."""
        found = [
            sample.value
            for family in text_string_to_metric_families(self.metrics)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels} is not on /metrics"
        return sum(found)

    def verify(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verifier.cli", str(self.logs), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def chain(request, tmp_path_factory) -> Chain:
    setup = request.param
    folder = tmp_path_factory.mktemp("chain")
    logs, tap = folder / "logs", folder / "tap.jsonl"
    model = tiny_model(folder, setup.tiny) if setup.tiny else None
    arguments = ("--middleware", "tests.vllm_tap.HashBodies", *setup.arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEETY_TEST_TAP", str(tap))
        patch.setenv("PYTHONPATH", str(ROOT))
        for name, value in setup.environment.items():
            patch.setenv(name, value)
        with serve(folder, hook_dir=logs, arguments=arguments, model=model, hook=setup.hook) as server:
            proxy = start_proxy(folder, server.url, logs)
            try:
                got = asyncio.run(send_all(proxy.url, mixed_traffic(setup.longer), at_once=50))
                time.sleep(2.5)  # aborts reach the engine a little after their clients are gone; so do metrics
                metrics = "".join(
                    urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
                    for url in (server.url, proxy.admin)
                )
            finally:
                proxy.stop()
    lines = [json.loads(line) for line in tap.read_text().splitlines()]
    return Chain(setup, logs, got, {line["request_id"]: line for line in lines if line["request_id"]}, metrics)


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
    if chain.setup is PLAIN:  # the traffic is what it claims to be: each rule was needed by some request
        assert {"TRIMMED_STOP", "INCOMPLETE_UTF8_TAIL", "ABORTED_PREFIX", "SPECIAL_SKIPPED", "REFUSED"} <= codes
    print(f"\n{chain.setup.name}")
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


def test_the_proxys_counters_are_what_its_log_holds_and_no_more_than_vllm_counts(chain):
    endings = [record for record in chain.records() if isinstance(record, StreamDone | Response)]
    assert chain.metric("sparseety_proxy_requests_total") == len(endings)
    served = [record for record in endings if record.status == 200]
    usages = [record.usage for record in served if record.usage]
    stated = sum(usage.completion_tokens for usage in usages)
    assert chain.metric("sparseety_generation_tokens_total", count_source="usage") == stated > 1000
    assert chain.metric("sparseety_prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert chain.metric("sparseety_request_generation_tokens_sum") <= chain.metric("vllm:generation_tokens_total")
    counted = chain.metric("sparseety_request_generation_tokens_count")
    assert counted + chain.metric("sparseety_requests_uncounted_total") == len(served)
    first = [record for record in endings if isinstance(record, StreamDone) and record.stamps.first_token]
    assert chain.metric("sparseety_time_to_first_token_seconds_count", model_name="m") >= len(first)
    assert chain.metric("sparseety_upstream_errors_total") == sum((record.status or 0) >= 400 for record in endings)


def test_usage_is_the_number_of_ids_that_the_engine_logged(chain):
    ids: dict[str, int] = {}  # by the reply's id, over all its choices and prompts
    for records in chain.engines():
        names = {record.request: join_key(record.external_id) for record in records if isinstance(record, RequestAdded)}
        for record in records:
            for row in record.rows if isinstance(record, Step) else []:
                ids[names[row.request]] = ids.get(names[row.request], 0) + len(row.ids)
    compared = 0
    for got in chain.got:
        if got.status != 200 or not got.complete or not got.ask.named or (usage := usage_of(got)) is None:
            continue
        prefix = "chatcmpl-" if "chat" in got.ask.path else "cmpl-"
        engine = ids[prefix + got.ask.name]
        # The API server, which looks for stop strings, leaves out what was sampled past one: by a step with drafts, and
        # by those steps that the engine makes, on a busy machine, before it hears of it.
        assert usage <= engine, got.ask.name
        assert usage == engine or "stop" in got.ask.body, got.ask.name
        compared += 1
    assert compared >= 50


def test_the_accounts_of_every_request_add_up(chain):
    preempted = choices = 0
    for records in chain.engines():
        added = {record.request: record for record in records if isinstance(record, RequestAdded)}
        rows = [row for record in records if isinstance(record, Step) for row in record.rows]
        for record in records:
            if not isinstance(record, RequestFinished):
                continue
            choices += 1
            preempted += record.preemptions > 0
            mine = [row for row in rows if row.request == record.request]
            assert record.total_ids == sum(len(row.ids) for row in mine)
            assert record.drafts == record.drafts_accepted + record.drafts_rejected
            if record.computed is None:
                continue
            assert added[record.request].prompt_len == record.cached_tokens + record.computed
            if record.finish_reason != "abort":  # it caught up
                assert record.evicted == record.reused_again + record.recomputed
            assert (record.evicted > 0) == (record.preemptions > 0)
            assert mine[0].phase != "decode"  # recomputed: preempted within its prompt
    print(f"\n{chain.setup.name}: {preempted} of {choices} choices were preempted")
    assert choices > 60
    if chain.setup is CROWDED:
        assert preempted >= choices / 3
    else:
        assert preempted == 0


def test_the_accounts_are_what_vllm_itself_counted(chain):
    finished = [r for records in chain.engines() for r in records if isinstance(r, RequestFinished)]
    steps = [row for records in chain.engines() for r in records if isinstance(r, Step) for row in r.rows]
    # Of a request that is aborted, the front end may have forgotten the request before its last tokens came.
    all_ids = sum(len(row.ids) for row in steps)
    aborted = sum(record.total_ids for record in finished if record.finish_reason == "abort")
    assert all_ids - aborted <= chain.metric("vllm:generation_tokens_total") <= all_ids
    # Of a request that is aborted before it goes on, vLLM's front end never hears that it was preempted.
    went_on = sum(record.preemptions for record in finished if record.finish_reason != "abort")
    assert went_on <= chain.metric("vllm:num_preemptions_total") <= sum(record.preemptions for record in finished)
    computed = sum(record.computed or 0 for record in finished)
    cached = sum(record.cached_tokens or 0 for record in finished)
    assert chain.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == computed
    assert chain.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    if chain.setup is COLD:
        assert cached == 0
    elif chain.setup in (PLAIN, CROWDED):  # of several engines, chance decides who has seen a prompt before
        assert cached > 0
    if chain.setup is CROWDED:
        assert chain.metric("vllm:spec_decode_num_draft_tokens_total") == sum(record.drafts for record in finished) > 0
        accepted = sum(record.drafts_accepted for record in finished)
        assert chain.metric("vllm:spec_decode_num_accepted_tokens_total") == accepted


def test_the_plugins_metrics_are_on_vllms_own_page(chain):
    finished = [r for records in chain.engines() for r in records if isinstance(r, RequestFinished)]
    for status, count in (
        ("computed", sum(record.computed or 0 for record in finished)),
        ("reused_local", sum(record.cached_tokens or 0 for record in finished)),
    ):
        assert chain.metric("sparseety_prompt_tokens_by_status_total", model_name="m", status=status) == count
    rejected = sum(record.drafts_rejected for record in finished)
    assert chain.metric("sparseety_draft_tokens_total", outcome="rejected") == rejected
    assert chain.metric("sparseety_capture_sampled_requests_total", source="plugin", decision="captured") == len(
        finished
    )
    assert chain.metric("sparseety_capture_records_dropped_total") == 0
    assert chain.metric("sparseety_plugin_errors_total") == 0
    expected = chain.metric("sparseety_plugin_hooks", state="expected")
    assert chain.metric("sparseety_plugin_hooks", state="attached") == expected > 10
    engines = {record.data_parallel_rank for records in chain.engines() for record in records[1:2]}
    assert len(engines) == (2 if chain.setup is ENGINES else 1)
    for engine in engines:
        assert chain.metric("sparseety_plugin_step_overhead_seconds_count", engine=str(engine)) > 0


def test_kv_blocks_are_those_of_the_requests_that_had_them(chain):
    if chain.setup is not CROWDED:
        pytest.skip("KV blocks are recorded in one of the setups")
    (records,) = chain.engines()
    added = {record.request: record for record in records if isinstance(record, RequestAdded)}
    finished = {record.request: record for record in records if isinstance(record, RequestFinished)}
    blocks = [each for record in records if isinstance(record, Kv) for each in record.events]
    assert {each.kind for each in blocks} == {"allocated", "reused", "evicted", "preempted"}
    for request, record in finished.items():
        mine = [each for each in blocks if each.request == request and each.kind != "evicted"]
        if record.computed is None:
            continue
        held = 0
        for each in mine:
            assert each.first == (0 if each.kind == "preempted" else held)  # one after another, from the first position
            held = 0 if each.kind == "preempted" else held + each.tokens
        assert sum(each.kind == "preempted" for each in mine) == record.preemptions
        if record.finish_reason != "abort":  # room for the prompt and for all outputs but the last, and for drafts
            assert held >= added[request].prompt_len + record.total_ids - 1
    assert all(each.request in added for each in blocks if each.kind == "evicted")


def test_a_log_line_is_small(chain):
    """Reports the figure; the budget is held by the benchmark, on closed segments."""
    size = sum(path.stat().st_size for path in find_logs([str(chain.logs)]))
    tokens = sum(len(row.ids) for record in chain.records() if isinstance(record, Step) for row in record.rows)
    name, rate = chain.setup.name, size / tokens
    print(f"\n{name}: logs: {size} bytes for {tokens} tokens, {rate:.0f} bytes a token, not compressed")
    assert rate < 600


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
