"""Sparsity counted inside a real vLLM on the CPU, against transformers' own forward. `make test-vllm`.

Each model is run once with the counters on (half a minute each), without a server: what counts is in the workers.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparseety.records import Experts, Gap, LogClose, Sparsity, SparsityStart, Weights
from tests.torch_python import ROOT
from tests.vllm_runs import ALL, PROMPTS, THRESHOLD, Run, generate, plain, summed, worst_difference

pytestmark = pytest.mark.vllm
full = pytest.mark.e2e_full
LLAMA = pytest.param("llama", False, marks=full)  # compiled: minutes


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(model: str, eager: bool) -> Run:
        return generate(model, tmp_path_factory.mktemp(model), eager=eager, SPARSEETY_HOOK_CAPTURE=ALL)

    return run


@pytest.mark.parametrize(("model", "eager"), [("opt", True), LLAMA])
def test_counts_agree_with_a_plain_forward_for_each_request_phase_and_layer(
    counted: Any, model: str, eager: bool
) -> None:
    run = counted(model, eager)
    assert all(near > 0 for sites in summed(run).values() for _, _, near in sites)  # or they would agree on nothing
    worst = worst_difference(model, run)
    print(f"{model}, {'eager' if eager else 'compiled'}: counts differ by {worst:.3%} of the elements at most")
    assert worst <= 0.005


@full
def test_the_ranks_of_a_tensor_parallel_group_add_up_to_a_plain_forward(tmp_path: Path) -> None:
    run = generate(
        *("llama", tmp_path),
        engine={"tensor_parallel_size": 2},
        SPARSEETY_HOOK_CAPTURE=ALL,
        VLLM_CPU_OMP_THREADS_BIND="0|1",  # else vLLM wants a NUMA node for each rank
    )
    assert sorted(start.tensor_parallel_rank for start in run.of(SparsityStart)) == [0, 1]
    assert worst_difference("llama", run) <= 0.005


@full
def test_what_a_preempted_request_computes_again_is_counted_apart(tmp_path: Path) -> None:
    run = generate(
        *("opt", tmp_path),
        max_tokens=400,
        engine={"num_gpu_blocks_override": 34, "block_size": 32, "enable_prefix_caching": False},
        SPARSEETY_HOOK_CAPTURE=ALL,
    )
    assert sum(record.tokens for record in run.of(Sparsity) if record.phase == "recomputed") > 0
    assert worst_difference("opt", run) <= 0.005


def test_experts_agree_with_a_plain_forward(counted: Any) -> None:
    run = counted("mixtral", True)
    (start,) = run.of(SparsityStart)
    assert [(router.experts, router.top_k) for router in start.routers] == [(8, 2)] * 4
    reference = plain("mixtral", run)
    same = total = 0
    for number in range(len(PROMPTS)):
        for phase, rows in (("prefill", slice(len(PROMPTS[number]))), ("decode", slice(len(PROMPTS[number]), None))):
            mine = [
                [sum(column) for column in zip(*tables, strict=True)]
                for tables in zip(
                    *(
                        record.counts
                        for record in run.of(Experts)
                        if record.engine_id.startswith(f"{number}-") and record.phase == phase
                    ),
                    strict=True,
                )
            ]
            for counts, layer in zip(mine, reference[number]["experts"], strict=True):
                chosen = [expert for token in layer[rows] for expert in token]
                assert sum(counts) == len(chosen)
                same += sum(min(counts[expert], chosen.count(expert)) for expert in range(8))
                total += len(chosen)
    print(f"mixtral: {same} of {total} choices of experts equal")
    assert same / total > 0.97


@pytest.mark.parametrize(("model", "eager"), [("opt", True), LLAMA, ("mixtral", True)])
def test_the_log_is_whole_and_says_what_was_counted(counted: Any, model: str, eager: bool) -> None:
    run = counted(model, eager)
    (start,), (weights,) = run.of(SparsityStart), run.of(Weights)
    assert (start.threshold, len(start.sites) + len(start.routers)) == (THRESHOLD, 4)
    assert not any(site.name in start.not_observed for site in start.sites)
    assert run.of(Gap) == []
    (end,) = run.of(LogClose)
    assert end.lost == 0
    assert len(weights.parameters) >= 2 + 4 * 4  # vLLM packs them for the CPU right after they were counted
    for record in run.of(Sparsity):
        assert sum(count for _, count in record.positions) == record.tokens


@full
def test_replies_with_sparsity_counted_are_those_without(counted: Any, tmp_path: Path) -> None:
    assert generate("opt", tmp_path, SPARSEETY_HOOK_CAPTURE="tokens").outputs == counted("opt", True).outputs
    assert list((tmp_path / "logs").glob("worker-*")) == []  # off until asked for


FAULTS = """
import sampler_hook.counting as counting
def broken(*args, **kwargs):
    raise RuntimeError("broken for the test")
"""


@full
@pytest.mark.parametrize("method", ["attach", "before_step", "computed", "finished", "close"])
def test_a_fault_in_any_hook_ends_the_counting_alone(counted: Any, tmp_path: Path, method: str) -> None:
    # sitecustomize is imported by each of vLLM's processes, before the plugin.
    (tmp_path / "sitecustomize.py").write_text(f"{FAULTS}counting.Counting.{method} = broken\n")
    path = f"{tmp_path}:{ROOT}"
    run = generate("opt", tmp_path, SPARSEETY_HOOK_CAPTURE=ALL, PYTHONPATH=path)
    check_that_counting_alone_ended(run, counted("opt", True), tmp_path)


@full
def test_a_fault_in_a_hook_of_a_compiled_model_ends_the_counting_alone(counted: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"{FAULTS}counting.Counting.computed = broken\n")
    run = generate("llama", tmp_path, eager=False, SPARSEETY_HOOK_CAPTURE=ALL, PYTHONPATH=f"{tmp_path}:{ROOT}")
    check_that_counting_alone_ended(run, counted("llama", False), tmp_path)


def check_that_counting_alone_ended(run: Run, unbroken: Run, folder: Path) -> None:
    assert run.outputs == unbroken.outputs
    assert [gap.reason for gap in run.of(Gap)] == ["counting sparsity switched itself off: RuntimeError"]
    (engine,) = (folder / "logs").glob("engine-*.jsonl")
    assert '"event":"request_finished"' in engine.read_text()  # tokens are recorded all the same
