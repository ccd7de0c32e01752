"""A real vLLM's /metrics of what its workers counted: the sums of their logs, to the unit."""

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sampler_hook.catalogue import METRICS
from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, Experts, Sparsity, SparsityStart, Weights
from tests.test_hook_metrics import parse
from tests.torch_python import tiny
from tests.vllm_server import VllmServer, serve

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(5, 45)), list(range(300, 320)), list(range(1000, 1100))]
MAX_TOKENS = 70  # above 64, at which counts are written before the request's end
WAIT = 20.0
HOOK = {"SPARSEETY_HOOK_CAPTURE": "tokens,sparsity,experts,weights", "SPARSEETY_HOOK_NEAR_ZERO": "0.05"}
# The second: every process that there can be, on one machine.
SETUPS: dict[str, tuple[str, ...]] = {
    "one": (),
    "several": ("--api-server-count", "2", "--tensor-parallel-size", "2"),
}
Sums = Counter[tuple[str, ...]]


@dataclass(frozen=True)
class Served:
    """After PROMPTS were answered."""

    metrics: dict[str, dict[str, float]]
    logged: list[list[AnyRecord]]  # of each worker


@pytest.fixture(scope="module", params=["one", pytest.param("several", marks=pytest.mark.e2e_full)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metrics")
    hook = HOOK | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if request.param == "several" else {})
    with serve(
        folder,
        hook_dir=folder / "logs",
        model=tiny("glm-moe"),
        hook=hook,
        arguments=("--no-enable-prefix-caching", *SETUPS[request.param]),
    ) as server:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: complete(server, prompt), PROMPTS)) == [MAX_TOKENS] * len(PROMPTS)
        tokens = sum(map(len, PROMPTS)) + (MAX_TOKENS - 1) * len(PROMPTS)
        deadline = time.monotonic() + WAIT
        while True:  # the last counts are written with the step after the last request's end, and published each second
            logged = worker_logs(folder / "logs")
            metrics = scrape(server)
            ended = metrics["sparseety_capture_records_total"]["kind=request_finished,source=plugin"]
            if ended == len(PROMPTS) and computed(logged[0]) == tokens and elements(metrics) == summed(logged):
                break
            assert time.monotonic() < deadline, (computed(logged[0]), tokens, elements(metrics), summed(logged))
            time.sleep(0.3)
        yield Served(metrics, logged)


def complete(server: VllmServer, prompt: list[int]) -> int:
    body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return int(json.load(reply)["usage"]["completion_tokens"])


def scrape(server: VllmServer) -> dict[str, dict[str, float]]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {name: samples for name, samples in parse(text).items() if name.startswith("sparseety_")}


def worker_logs(folder: Path) -> list[list[AnyRecord]]:
    paths = [path for path in find_logs([str(folder)]) if path.name.startswith("worker")]
    return [[record for _, record in read_log(path, lambda problem: None)] for path in paths]


def computed(log: list[AnyRecord]) -> int:
    return sum(record.tokens for record in log if isinstance(record, Sparsity))


def summed(logs: list[list[AnyRecord]]) -> Sums:
    """Elements of all ranks by layer and phase."""
    return _sums(logs, lambda record: record.elements)


def _sums(logs: list[list[AnyRecord]], numbers: Any) -> Sums:
    sums: Sums = Counter()
    for log in logs:
        (start,) = [record for record in log if isinstance(record, SparsityStart)]
        for record in log:
            if isinstance(record, Sparsity) and record.phase != "recomputed":
                for site, number in zip(start.sites, numbers(record), strict=True):
                    sums[str(site.layer), record.phase] += number
    return sums


def elements(metrics: dict[str, dict[str, float]]) -> Sums:
    return by(metrics["sparseety_activation_elements_total"], "layer", "phase")


def by(samples: dict[str, float], *labels: str, **only: str) -> Sums:
    sums: Sums = Counter()
    for text, value in samples.items():
        found = dict(pair.split("=", 1) for pair in text.split(","))
        if all(found[name] == wanted for name, wanted in only.items()):
            sums[tuple(found[label] for label in labels)] += int(value)
    return sums


def test_zeros_by_layer_and_phase_are_those_of_the_workers_logs(served: Served) -> None:
    zeros = served.metrics["sparseety_activation_zero_elements_total"]
    near = by(zeros, "layer", "phase", zero_kind="near")
    assert near == _sums(served.logged, lambda record: record.near)
    assert by(zeros, "layer", "phase", zero_kind="exact") == _sums(served.logged, lambda record: record.zeros)
    assert sum(near.values()) > 0
    print({place: f"{near[place] / count:.3f}" for place, count in summed(served.logged).items()})


def test_choices_of_experts_are_counted_once_however_many_ranks_route_alike(served: Served) -> None:
    sums: Sums = Counter()
    for log in served.logged:
        (start,) = [record for record in log if isinstance(record, SparsityStart)]
        for record in log:
            if isinstance(record, Experts):
                for router, counts in zip(start.routers, record.counts, strict=True):
                    sums[str(router.layer), record.phase] += sum(counts)
    assert by(served.metrics["sparseety_moe_tokens_routed_total"], "layer", "phase") == sums
    assert sum(sums.values()) > 0


def test_what_a_server_shows_is_what_the_catalogue_has_and_all_of_it_but_what_is_off(served: Served) -> None:
    names = {metric.wire_name for metric in METRICS}
    shown = {name for name in names if any(sample in served.metrics for sample in (name, f"{name}_bucket"))}
    known = {f"{name}{suffix}" for name in names for suffix in ("", "_bucket", "_sum", "_count")}
    assert served.metrics.keys() <= known
    assert names - shown == {
        "sparseety_activation_token_zero_ratio",  # not counted by token
        "sparseety_moe_expert_tokens_total",  # not asked for
        # A window lasts a minute.
        "sparseety_moe_load_balance_ratio",
        "sparseety_moe_routing_entropy_ratio",
        "sparseety_moe_idle_experts",
    }


def test_health_of_workers_and_engine_is_one(served: Served) -> None:
    records = served.metrics["sparseety_capture_records_total"]
    of = Counter(str(record.__struct_config__.tag) for log in served.logged for record in log)
    for kind in ("sparsity_start", "weights", "sparsity", "experts"):
        assert records[f"kind={kind},source=plugin"] == of[kind]
    assert records["kind=request_added,source=plugin"] == len(PROMPTS)
    assert sum(served.metrics["sparseety_capture_records_dropped_total"].values()) == 0
    assert served.metrics["sparseety_sparsity_config_info"] == {
        "model_name=m,near_zero_threshold=0.05,site_set=ffn_act,router": 1
    }
    hooks = served.metrics["sparseety_plugin_hooks"]
    starts = [record for log in served.logged for record in log if isinstance(record, SparsityStart)]
    for site, count in (
        ("ffn_act", sum(len(start.sites) for start in starts)),
        ("router", sum(len(start.routers) for start in starts)),
    ):
        assert count > 0
        assert {state: hooks[f"engine=0,site={site},state={state}"] for state in ("expected", "attached", "fired")} == (
            dict.fromkeys(("expected", "attached", "fired"), count)
        )


def test_weights_are_those_of_the_first_rank(served: Served) -> None:
    (first,) = [
        log
        for log in served.logged
        if any(isinstance(record, SparsityStart) and record.tensor_parallel_rank == 0 for record in log)
    ]
    (weights,) = [record for record in first if isinstance(record, Weights)]
    shares = {each.name: each.zeros / each.elements for each in weights.parameters}
    shown = served.metrics["sparseety_weight_zero_ratio"]
    (head,) = [share for name, share in shares.items() if name.endswith("lm_head.weight")]
    assert shown["layer=none,model_name=m,module=head,zero_kind=exact"] == pytest.approx(head)
