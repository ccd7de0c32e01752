"""A worker's sums on vLLM's /metrics: what its log holds, added up. Records in, a scrape out; no torch."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sampler_hook import worker_metrics
from sampler_hook.catalogue import ERRORS, HOOKS, WORKERS, WRITERS
from sampler_hook.detail import series
from sampler_hook.settings import HookSettings
from sampler_hook.tally import WINDOW_CHOICES, WINDOW_PATIENCE, WINDOW_SECONDS, Windows, module_of, spread
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import Experts, ParameterZeros, Phase, Router, Scope, Site, Sparsity, SparsityStart, Weights
from tests.logbook import until
from tests.test_hook_metrics import check_against, families_in, folder, scrape

__all__ = ["folder"]  # a fixture

_closing: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _closing:
        _closing.pop()()


SITES = [Site(name=f"layers.{layer}.mlp.down_proj", width=10, layer=layer) for layer in range(2)]
ROUTERS = [Router(name=f"layers.{layer}.mlp.gate", experts=4, top_k=2, layer=layer) for layer in range(2)]
BOTH = "engine=0,{}model_name=m,{}"


class Worker:
    """One that publishes into the folder."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        rank: int = 0,
        layers: int = 2,
        now: Clock = time.monotonic,
        **changes: Any,
    ) -> None:
        parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=ranks, pipeline_parallel_size=1)
        text_config = SimpleNamespace(num_hidden_layers=layers)
        model = SimpleNamespace(served_model_name="m", model="a/model", hf_text_config=text_config)
        settings = {name: changes.pop(name) for name in ("detail", "max_series", "metrics") if name in changes}
        start = SparsityStart(
            ts=0.0,
            runtime="vllm",
            model="a/model",
            threshold=0.05,
            tensor_parallel_rank=rank,
            **{"sites": SITES, "routers": [] if rank else ROUTERS} | changes,
        )
        hooks = {"ffn_act": {"expected": 2, "attached": 2, "fired": 1}}
        self.writer = LogWriter(folder.parent / "logs", "worker", Scope(), clock=lambda: 1.0)
        _closing.append(self.writer.close)
        made = worker_metrics.metrics_of(
            HookSettings(Path("logs"), **settings),
            {"SPARSEETY_METRICS_DIR": str(folder)},
            SimpleNamespace(model_config=model, parallel_config=parallel),
            SimpleNamespace(start=start, hooks=lambda: hooks),  # type: ignore[arg-type]
            now,
        )
        self.metrics = made
        if made is not None:
            _closing.append(made.close)
        self.note(start)

    def note(self, *records: Any) -> None:
        assert self.metrics is not None
        for record in records:
            self.metrics.note(record)
        self.metrics.publish([self.writer], 0)


def sparsity(phase: Phase, zeros: list[int], near: list[int], elements: list[int], **more: Any) -> Sparsity:
    return Sparsity(ts=1.0, engine_id="a", phase=phase, tokens=1, zeros=zeros, near=near, elements=elements, **more)


def experts(phase: Phase, *counts: list[int]) -> Experts:
    return Experts(ts=1.0, engine_id="a", phase=phase, tokens=1, counts=list(counts))


def test_zeros_and_elements_are_published_by_layer_and_phase_and_what_was_computed_again_is_not(folder: Path) -> None:
    worker = Worker(folder)
    before = scrape(folder)
    worker.note(
        sparsity("prefill", [4, 1], [5, 2], [20, 20]),
        sparsity("prefill", [1, 0], [1, 0], [10, 0]),  # the second module was not observed
        sparsity("decode", [0, 3], [0, 4], [10, 10]),
        sparsity("recomputed", [9, 9], [9, 9], [10, 10]),
    )
    found = scrape(folder)
    elements, zeros = found["sparseety_activation_elements_total"], found["sparseety_activation_zero_elements_total"]
    place = "engine=0,layer={},model_name=m,phase={},site=ffn_act"
    assert elements == {
        place.format(0, "prefill"): 30,
        place.format(1, "prefill"): 20,
        place.format(0, "decode"): 10,
        place.format(1, "decode"): 10,
    }
    assert zeros[f"{place.format(0, 'prefill')},zero_kind=exact"] == 5
    assert zeros[f"{place.format(0, 'prefill')},zero_kind=near"] == 6
    assert zeros[f"{place.format(1, 'decode')},zero_kind=near"] == 4
    assert set(before["sparseety_activation_elements_total"]) == set(elements), "else increase() misses the first"
    assert set(before["sparseety_activation_zero_elements_total"]) == set(zeros)
    assert sum(before["sparseety_activation_elements_total"].values()) == 0


def test_ranks_add_up_and_what_rank_0_counts_alone_is_counted_once(folder: Path) -> None:
    for rank in range(2):
        worker = Worker(folder, ranks=2, rank=rank)
        worker.note(sparsity("decode", [1, 2], [1, 2], [5, 5]))
        if rank == 0:
            worker.note(experts("decode", [1, 1, 0, 0], [2, 0, 0, 0]))
    found = scrape(folder)
    assert sum(found["sparseety_activation_elements_total"].values()) == 20
    assert sum(found["sparseety_moe_tokens_routed_total"].values()) == 4
    assert found["sparseety_plugin_hooks"]["engine=0,site=ffn_act,state=expected"] == 4
    assert found["sparseety_plugin_hooks"]["engine=0,site=ffn_act,state=fired"] == 2
    assert len(found["sparseety_sparsity_config_info"]) == 1


def test_with_totals_alone_the_layers_are_one_series(folder: Path) -> None:
    worker = Worker(folder, detail="totals")
    worker.note(sparsity("decode", [1, 2], [1, 2], [5, 5]))
    elements = scrape(folder)["sparseety_activation_elements_total"]
    assert elements["engine=0,layer=all,model_name=m,phase=decode,site=ffn_act"] == 10
    assert len(elements) == 2


@pytest.mark.parametrize(
    ("most", "published", "said"),
    [
        (20_000, "expert", None),
        (series("expert", layers=81, experts=4, engines=1) - 1, "layer", "published with detail=layer"),
        (series("layer", layers=81, experts=4, engines=1) - 1, "totals", "published with detail=totals"),
        (10, None, "none are published"),
    ],
)
def test_above_the_bound_on_series_less_is_published_and_it_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, most: int, published: str | None, said: str | None
) -> None:
    make: Callable[[], Worker] = lambda: Worker(folder, detail="expert", max_series=most, layers=80)  # noqa: E731
    if published is None:
        with pytest.raises(AssertionError):  # there is nothing to note records in
            make()
        assert list(folder.iterdir()) == []
    else:
        make().note(experts("decode", [1, 1, 0, 0], [2, 0, 0, 0]))
        found = scrape(folder)
        assert ("sparseety_moe_expert_tokens_total" in found) is (published == "expert")
        layers = {"layer=all" in labels for labels in found["sparseety_moe_tokens_routed_total"]}
        assert layers == {published == "totals"}
        assert sum(map(len, found.values())) <= most
    assert [record.getMessage().count("SPARSEETY_HOOK_MAX_SERIES") for record in caplog.records] == [1] * bool(said)
    assert said is None or said in caplog.text


def test_the_share_of_single_tokens_is_published_where_one_worker_sees_them_whole(folder: Path) -> None:
    worker = Worker(folder, per_token=True, routers=[])
    worker.note(
        sparsity(
            *("decode", [12, 0], [14, 2], [20, 10]),
            # Of the second token the second module was not observed.
            token_zeros=[[2, 10], [0, -1]],
            token_near=[[4, 10], [2, -1]],
        )
    )
    buckets = scrape(folder)["sparseety_activation_token_zero_ratio_bucket"]
    of = "engine=0,le={},model_name=m,phase=decode,site=ffn_act,zero_kind={}"
    assert [buckets[of.format(le, "exact")] for le in ("0.05", "0.1", "0.99", "1.0", "+Inf")] == [0, 1, 1, 2, 2]
    assert [buckets[of.format(le, "near")] for le in ("0.2", "0.3", "+Inf")] == [0, 1, 2]


def test_it_is_not_where_a_worker_sees_a_part_of_each_token_nor_where_tokens_are_not_counted_singly(
    folder: Path,
) -> None:
    Worker(folder, per_token=True, ranks=2)
    Worker(folder)
    assert not any(name.startswith("sparseety_activation_token") for name in scrape(folder))


def test_weights_are_published_by_layer_and_module(folder: Path) -> None:
    worker = Worker(folder)
    parameters = [
        ParameterZeros(name=f"model.layers.0.{name}.weight", zeros=zeros, elements=10)
        for name, zeros in (("self_attn.q_proj", 5), ("self_attn.k_proj", 0), ("mlp.down_proj", 10))
    ]
    worker.note(Weights(ts=0.0, parameters=[*parameters, ParameterZeros(name="lm_head.weight", zeros=1, elements=4)]))
    assert scrape(folder)["sparseety_weight_zero_ratio"] == {
        "layer=0,model_name=m,module=qkv,zero_kind=exact": 0.25,
        "layer=0,model_name=m,module=ffn_out,zero_kind=exact": 1.0,
        "layer=none,model_name=m,module=head,zero_kind=exact": 0.25,
    }


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.self_attn.qkv_proj.weight", "qkv"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "qkv"),
        ("transformer.h.1.attn.c_attn.weight", "qkv"),
        ("transformer.h.1.attn.c_proj.weight", "attn_o"),
        ("transformer.h.1.mlp.c_proj.weight", "ffn_out"),
        ("model.decoder.layers.0.self_attn.out_proj.weight", "attn_o"),
        ("model.decoder.layers.0.fc1.weight", "ffn_in"),
        ("transformer.h.0.self_attention.query_key_value.weight", "qkv"),
        ("model.layers.0.mlp.gate_up_proj.weight", "ffn_in"),
        ("model.layers.0.block_sparse_moe.experts.w13_weight", "experts"),
        ("model.layers.0.mlp.shared_experts.down_proj.weight", "ffn_out"),
        ("model.layers.0.mlp.gate.weight", "other"),
        ("model.embed_tokens.weight", "embed"),
        ("lm_head.weight", "head"),
    ],
)
def test_a_weight_is_told_by_its_name(name: str, module: str) -> None:
    assert module_of(name) == module


def test_the_settings_in_force_are_1_and_earlier_ones_0_and_their_number_is_bounded(folder: Path) -> None:
    worker = Worker(folder)
    assert worker.metrics is not None
    for threshold in [0.05, 0.1, *(number / 1000 for number in range(1, 40))]:
        worker.note(
            SparsityStart(ts=1.0, runtime="vllm", model="a/model", threshold=threshold, sites=SITES, routers=ROUTERS)
        )
    found = scrape(folder)["sparseety_sparsity_config_info"]
    label = "model_name=m,near_zero_threshold={},site_set=ffn_act,router"
    assert (found[label.format("0.05")], found[label.format("0.1")]) == (0, 0)
    assert found[label.format("other")] == 1
    assert len(found) == 8
    worker.note(SparsityStart(ts=2.0, runtime="vllm", model="a/model", threshold=0.1, sites=SITES, routers=ROUTERS))
    assert scrape(folder)["sparseety_sparsity_config_info"][label.format("0.1")] == 1


def test_the_scrape_has_every_metric_of_the_workers_once_there_is_something_and_no_other(
    folder: Path,
) -> None:
    now = 0.0
    worker = Worker(folder, detail="expert", per_token=True, now=lambda: now)
    until(lambda: worker.writer.done.disk_free is not None)
    weights = Weights(ts=0.0, parameters=[ParameterZeros(name="lm_head.weight", zeros=1, elements=4)])
    now = WINDOW_SECONDS
    worker.note(weights, experts("decode", [80, 0, 0, 0], [1, 0, 0, 0]))
    families = families_in(folder)
    expected = {metric.name: metric for metric in (*WORKERS, *WRITERS, HOOKS, ERRORS)}
    assert families.keys() == expected.keys()
    for name, family in families.items():
        check_against(expected[name], family)


# ------------------------------------------------------------------------------------------------------- experts


def test_even_loads_are_balanced_and_one_busy_expert_is_not() -> None:
    assert spread([5, 5, 5, 5]) == spread([1, 1, 1, 1])
    assert (spread([5, 5, 5, 5]).balance, spread([5, 5, 5, 5]).idle) == (1.0, 0)
    assert spread([5, 5, 5, 5]).entropy == pytest.approx(1.0)
    assert (spread([8, 0, 0, 0]).balance, spread([8, 0, 0, 0]).entropy, spread([8, 0, 0, 0]).idle) == (0.25, 0.0, 3)


def test_a_window_of_loads_is_of_a_minute_and_of_choices_enough_and_is_given_up_after_five() -> None:
    windows = Windows(1, now=0.0)
    windows.look([[40, 40, 0, 0]], now=WINDOW_SECONDS - 1)
    assert windows.latest == {}
    windows.look([[40, 40, 0, 0]], now=WINDOW_SECONDS)
    assert windows.latest[0] == spread([1, 1, 0, 0])
    # The next one: too few choices for the number of experts, until there are more.
    later = 2 * WINDOW_SECONDS
    windows.look([[40, 40, WINDOW_CHOICES * 4 - 1, 0]], now=later)
    assert windows.latest[0] == spread([1, 1, 0, 0])
    windows.look([[40, 40, WINDOW_CHOICES * 4, 0]], now=later + 1)
    assert windows.latest[0] == spread([0, 0, 1, 0])
    windows.look([[41, 40, WINDOW_CHOICES * 4, 0]], now=later + WINDOW_PATIENCE)
    assert windows.latest[0] == spread([0, 0, 1, 0])
    windows.look([[41, 40, WINDOW_CHOICES * 4, 0]], now=later + 1 + WINDOW_PATIENCE)
    assert windows.latest[0] is None


def test_the_spread_of_a_layer_is_absent_before_its_first_window_and_no_number_after_its_last(
    folder: Path,
) -> None:
    now = 0.0
    worker = Worker(folder, now=lambda: now)
    worker.note(experts("decode", [80, 0, 0, 0], [1, 0, 0, 0]))
    assert "sparseety_moe_load_balance_ratio" not in scrape(folder)
    now = WINDOW_SECONDS
    worker.note()
    found = scrape(folder)
    assert found["sparseety_moe_load_balance_ratio"] == {"engine=0,layer=0,model_name=m": 0.25}
    assert found["sparseety_moe_idle_experts"] == {"engine=0,layer=0,model_name=m": 3}
    now += WINDOW_PATIENCE
    worker.note()
    assert math.isnan(scrape(folder)["sparseety_moe_load_balance_ratio"]["engine=0,layer=0,model_name=m"])


def test_with_metrics_off_or_nowhere_to_publish_a_worker_keeps_no_sums() -> None:
    assert worker_metrics.metrics_of(HookSettings(Path("logs")), {}, None, None) is None  # type: ignore[arg-type]
