"""Which experts each token went to, on a real vLLM: by a plain router's logits, by vLLM's own callback of others."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparseety.records import Experts, Gap, SparsityStart
from tests.torch_python import ROOT
from tests.vllm_runs import PROMPTS, Run, generate, plain

pytestmark = [pytest.mark.vllm, pytest.mark.e2e_full]

# sitecustomize is imported by each of vLLM's processes, before the plugin.
BY_CALLBACK = """
import sampler_hook.sites as sites
sites._not_plain = lambda *args: "for the test"
"""
# What vLLM's model runner V2, which a CPU has not, does for --enable-return-routed-experts: to the runner there is.
CAPTURED_BY_VLLM = """
def capture(self, kv_cache_config):
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as theirs
    own(self, kv_cache_config)
    rows = self.vllm_config.scheduler_config.max_num_batched_tokens
    self.capturer = theirs.RoutedExpertsCapturer(rows, self.vllm_config)
    theirs.bind_routed_experts_capturer(self.model_runner.get_model(), self.capturer)
    import sampler_hook.choices as choices
    seen = choices.captured_by_vllm
    def told(callback):
        found = seen(callback)
        print("read from vLLM's own capture:", found is not None, flush=True)
        return found
    choices.captured_by_vllm = told
import importlib.abc, sys
class WhenLoaded(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "vllm.v1.worker.cpu_worker" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import vllm.v1.worker.gpu_worker as module
            global own
            own = module.Worker.initialize_from_config
            module.Worker.initialize_from_config = capture
sys.meta_path.insert(0, WhenLoaded())
"""


def run(model: str, folder: Path, prelude: str = "", *, eager: bool = True) -> Run:
    (folder / "sitecustomize.py").write_text(prelude)
    return generate(
        *(model, folder),
        eager=eager,
        SPARSEETY_HOOK_CAPTURE="tokens,experts",
        SPARSEETY_HOOK_SPARSITY_GRAIN="token",
        PYTHONPATH=f"{folder}:{ROOT}",
    )


def choices(run: Run) -> list[list[list[set[int]]]]:
    """By prompt, router and token: the experts."""
    assert run.of(Gap) == []
    (start,) = run.of(SparsityStart)
    found = []
    for number, prompt in enumerate(PROMPTS):
        records: list[Experts] = [each for each in run.of(Experts) if each.engine_id.startswith(f"{number}-")]
        assert [record.positions for record in records][:2] == [[(0, len(prompt))], [(len(prompt), 1)]]
        tokens: list[list[set[int]]] = []
        for router in range(len(start.routers)):
            tokens.append([set(each) for record in records for each in (record.token_experts or [])[router]])
        found.append(tokens)
    return found


@pytest.fixture(scope="module")
def by_logits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda model: run(model, tmp_path_factory.mktemp(model)))


def shares(mine: list[list[list[set[int]]]], reference: list[dict[str, Any]]) -> tuple[int, int]:
    """(tokens whose experts are all the same, tokens), over routers."""
    same = total = 0
    for routers, theirs in zip(mine, reference, strict=True):
        for tokens, layer in zip(routers, theirs["experts"], strict=True):
            assert len(tokens) == len(layer)
            same += sum(chosen == set(expected) for chosen, expected in zip(tokens, layer, strict=True))
            total += len(layer)
    return same, total


@pytest.mark.parametrize("model", ["mixtral", "qwen-moe"])
def test_experts_of_single_tokens_are_those_of_a_plain_forward(by_logits: Any, model: str) -> None:
    same, total = shares(choices(by_logits(model)), plain(model, by_logits(model)))
    print(f"\n{model}: both experts of {same} of {total} tokens equal")
    assert same / total > 0.95


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_router_with_groups_and_a_bias_is_read_by_its_callback(tmp_path: Path, eager: bool) -> None:
    found = run("glm-moe", tmp_path, eager=eager)
    (start,) = found.of(SparsityStart)
    assert [(router.experts, router.top_k, router.by_callback) for router in start.routers] == [(8, 2, True)] * 3
    assert "mlp.gate" not in str(start.not_observed)
    same, total = shares(choices(found), plain("glm-moe", found))
    print(f"\nglm-moe: both experts of {same} of {total} tokens equal")
    assert same / total > 0.95


def test_vllms_callback_says_the_same_as_the_logits_of_a_plain_router(by_logits: Any, tmp_path: Path) -> None:
    called = run("mixtral", tmp_path, BY_CALLBACK)
    assert called.outputs == by_logits("mixtral").outputs
    assert all(router.by_callback for router in called.of(SparsityStart)[0].routers)
    assert choices(called) == choices(by_logits("mixtral"))


def test_where_vllm_captures_experts_itself_its_capture_is_read(by_logits: Any, tmp_path: Path) -> None:
    captured = run("qwen-moe", tmp_path, BY_CALLBACK + CAPTURED_BY_VLLM)
    assert captured.outputs == by_logits("qwen-moe").outputs
    assert choices(captured) == choices(by_logits("qwen-moe"))
    assert captured.said.count("read from vLLM's own capture: True") == 4  # one for each layer
