"""What else happens to a real engine: cold and warm caches, sleep and wake, new weights, LoRA, a window of attention,
engines of prefill and decode. Most on one server, a tiny Llama; each test reads what its log gained.
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparseety.logreader import read_log
from sparseety.records import AnyRecord, EngineEvent, EngineStart, RequestAdded, RequestFinished, Step
from tests.tiny_models import HIDDEN, LAYERS, SLIDING_WINDOW
from tests.vllm_server import VllmServer, serve, tiny_model, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.e2e_full]

BLOCK = 32
ROOT = Path(__file__).parent.parent


@dataclass
class Engine:
    server: VllmServer
    logs: Path
    seen: int = 0  # records read by tests before

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.server.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200
            return json.loads(reply.read() or "null")

    def reply(self, prompt: list[int], **more: Any) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return str(self.post("/v1/completions", body | more)["choices"][0]["text"])

    def records(self) -> list[AnyRecord]:
        (path,) = self.logs.glob("engine-*.jsonl")
        return [record for _, record in read_log(path, print)]

    def new(self, kind: type, count: int) -> list[Any]:
        """The records of a kind that came since the last call, once there are `count` of them."""
        deadline = time.monotonic() + 20
        while True:
            found = [record for record in self.records()[self.seen :] if isinstance(record, kind)]
            if len(found) >= count:
                assert len(found) == count, found
                return found
            assert time.monotonic() < deadline, (found, self.server.tail())
            time.sleep(0.1)

    def begin(self) -> None:
        time.sleep(0.5)
        self.seen = len(self.records())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("events")
    model, adapter = tiny_model(folder, "llama"), folder / "adapter"
    python = vllm_environment() / "bin" / "python"
    make = [str(python), str(ROOT / "tests/tiny_adapter.py"), str(adapter), str(LAYERS), str(HIDDEN)]
    subprocess.run(make, check=True, timeout=120)
    arguments = (
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        f"tiny={adapter}",
        "--block-size",
        str(BLOCK),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /sleep, /collective_rpc and their like
        hook = {"SPARSEETY_HOOK_CAPTURE": "tokens,kv"}
        with serve(folder, hook_dir=folder / "logs", model=model, arguments=arguments, hook=hook) as server:
            yield Engine(server, folder / "logs")


@pytest.fixture
def engine(running: Engine) -> Engine:
    running.begin()
    return running


def prompt_of(first: int, length: int = 3 * BLOCK) -> list[int]:
    return list(range(first, first + length))


def test_a_prompt_is_computed_cold_and_reused_warm_until_the_cache_is_reset(engine: Engine) -> None:
    texts = [engine.reply(prompt_of(100)) for _ in range(2)]
    assert engine.post("/reset_prefix_cache") == {"success": True}
    texts.append(engine.reply(prompt_of(100)))
    assert len(set(texts)) == 1
    cold, warm, again = engine.new(RequestFinished, 3)
    assert (cold.cached_tokens, cold.computed) == (0, 3 * BLOCK)
    assert (warm.cached_tokens, warm.computed) == (2 * BLOCK, BLOCK)  # the last position is computed, and its block
    assert (again.cached_tokens, again.computed) == (0, 3 * BLOCK)
    (event,) = engine.new(EngineEvent, 1)
    assert (event.kind, event.detail, event.done) == ("cache_reset", "prefix", True)
    assert warm.ts < event.ts < again.ts


def test_sleep_and_wake_are_said_and_the_reply_after_is_the_reply_before(engine: Engine) -> None:
    before = engine.reply(prompt_of(300))
    engine.post("/sleep?level=1")
    engine.post("/wake_up")
    assert engine.reply(prompt_of(300)) == before
    events = engine.new(EngineEvent, 5)
    assert [(event.kind, event.detail) for event in events] == [
        ("sleep", "level 1"),
        ("cache_reset", "prefix"),
        ("cache_reset", "multi-modal"),
        ("cache_reset", "encoder"),
        ("wake", None),
    ]
    first, second = engine.new(RequestFinished, 2)
    assert first.ts < events[0].ts < events[-1].ts < second.ts
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_new_weights_and_their_version_are_said(engine: Engine) -> None:
    before = engine.reply(prompt_of(500))
    engine.post("/collective_rpc", {"method": "reload_weights"})  # from the files: the same ones
    engine.post("/update_weight_version", {"new_version": "step-7"})
    assert engine.reply(prompt_of(500)) == before
    update, version = engine.new(EngineEvent, 2)
    assert (update.kind, update.detail) == ("weight_update", "reload_weights")
    assert (version.kind, version.weight_version) == ("weight_version", "step-7")
    versions = [step.weight_version for step in engine.records()[engine.seen :] if isinstance(step, Step)]
    assert versions[0] is None
    assert [each for each in versions if each] == ["step-7"]  # with the first step that was made with them


def test_a_request_to_an_adapter_names_it(engine: Engine) -> None:
    assert engine.reply(prompt_of(700)) != engine.reply(prompt_of(700), model="tiny")
    plain, adapted = engine.new(RequestAdded, 2)
    assert (plain.lora, adapted.lora) == (None, "tiny")
    assert [each.cached_tokens for each in engine.new(RequestFinished, 2)] == [0, 0]  # a cache of its own


def test_the_share_of_the_context_that_a_window_reads_is_derived(tmp_path: Path) -> None:
    hook, model = {"SPARSEETY_HOOK_CAPTURE": "tokens,kv"}, tiny_model(tmp_path, "mistral")
    with serve(tmp_path, hook_dir=tmp_path / "logs", model=model, hook=hook) as server:
        engine = Engine(server, tmp_path / "logs")
        prompt = prompt_of(1100, SLIDING_WINDOW - 4)  # the window is full within the reply
        engine.reply(prompt)
        (finished,) = engine.new(RequestFinished, 1)
        (start,) = engine.new(EngineStart, 1)
    assert [(each.layer_type, each.layers, each.window) for each in start.attention] == [
        ("sliding", LAYERS, SLIDING_WINDOW)
    ]
    before = [len(prompt) + number for number in range(12)]  # positions before and at the query of each output
    assert finished.attended["sliding"] == (sum(min(each, SLIDING_WINDOW) for each in before), sum(before))


def test_of_a_prompt_that_was_computed_elsewhere_the_log_says_how_much_came_from_there(tmp_path: Path) -> None:
    """Engines of prefill and of decode share a store. Here one server plays both, its own cache emptied between."""
    store = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    store["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path / "store")}  # type: ignore[assignment]
    arguments = ("--kv-transfer-config", json.dumps(store), "--block-size", str(BLOCK))
    model = tiny_model(tmp_path, "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with serve(tmp_path, hook_dir=tmp_path / "logs", model=model, arguments=arguments) as server:
            engine = Engine(server, tmp_path / "logs")
            engine.begin()
            prompt = prompt_of(100, 4 * BLOCK + 2)
            engine.reply(prompt[:-1], kv_transfer_params={"do_remote_decode": True})
            engine.post("/reset_prefix_cache")
            engine.reply(prompt, kv_transfer_params={"do_remote_prefill": True})
            assert [each.role for each in engine.new(RequestAdded, 2)] == ["prefill", "decode"]
            first, second = engine.new(RequestFinished, 2)
            time.sleep(1.5)
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
                metrics = reply.read().decode()
    assert (first.cached_tokens, first.external_tokens, first.computed) == (0, 0, 4 * BLOCK + 1)
    assert (second.cached_tokens, second.external_tokens, second.computed) == (4 * BLOCK, 4 * BLOCK, 2)
    (line,) = [line for line in metrics.splitlines() if 'status="reused_external"' in line]
    assert line.startswith("sparseety_prompt_tokens_by_status_total")
    assert float(line.split()[-1]) == 4 * BLOCK
