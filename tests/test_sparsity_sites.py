"""Which modules of a model are counted, by their names, on stand-ins for modules."""

from types import SimpleNamespace
from typing import Any

import pytest

from sampler_hook.counting import first_tensor
from sampler_hook.sites import Found, find, layer_of


def linear(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def model(**modules: Any) -> SimpleNamespace:
    """A model by its modules, with `__` for the dot."""
    named = {name.replace("__", "."): module for name, module in modules.items()}
    return SimpleNamespace(named_modules=lambda: named.items())


def names(found: Found) -> list[str]:
    return [site.name for site, _ in found.sites]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.down_proj",  # Llama, Qwen, Gemma
        "model.decoder.layers.3.fc2",  # OPT
        "transformer.h.3.mlp.dense_4h_to_h",  # Falcon, BLOOM
        "transformer.h.3.mlp.c_proj",  # GPT-2
        "model.layers.3.mlp.shared_expert.down_proj",  # Qwen MoE
        "model.layers.3.mlp.shared_experts.down_proj",  # DeepSeek
        "model.layers.3.feed_forward.w2",  # InternLM
    ],
)
def test_the_down_projection_of_an_mlp_is_counted(name: str) -> None:
    (found,) = find(model(**{name: linear(in_features=512)})).sites
    assert (found[0].name, found[0].layer, found[0].width) == (name, 3, 512)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.3.attn.c_proj",  # GPT-2's attention has one, too
        "model.layers.3.mlp.experts.5.down_proj",  # its rows are the tokens that the expert was given
        "vision_tower.encoder.layers.3.mlp.fc2",  # its rows are image patches
        "visual.blocks.3.mlp.down_proj",
        "model.encoder.layers.3.fc2",
        "model.layers.3.mlp.up_proj",
    ],
)
def test_what_is_no_down_projection_of_the_batch_is_left_alone(name: str) -> None:
    assert names(find(model(**{name: linear(in_features=512)}))) == []


def test_a_model_with_nothing_to_count_is_said_and_not_silent() -> None:
    assert "no module is named like a down projection" in find(model(lm_head=linear(in_features=1))).not_observed[""]


def test_a_projection_that_does_not_say_its_width_is_named() -> None:
    found = find(model(layers__0__down_proj=linear()))
    assert found.not_observed == {"layers.0.down_proj": "a SimpleNamespace does not say how wide its input is"}


def test_under_tensor_parallelism_a_rank_counts_its_own_columns_and_rank_0_what_all_see_whole() -> None:
    sharded = linear(input_size_per_partition=256, input_size=512, tp_size=2, input_is_parallel=True)
    whole = linear(input_size_per_partition=512, input_size=512, tp_size=1, input_is_parallel=True)
    gate = linear(output_size=8)
    modules = {
        "layers.0.down_proj": sharded,
        "layers.1.down_proj": whole,
        "layers.1.gate": gate,
        "layers.1": linear(experts=linear()),
    }
    config = linear(num_experts_per_tok=2)
    first, second = (find(model(**modules), config=config, rank=rank) for rank in (0, 1))
    assert [site.width for site, _ in first.sites] == [256, 512]
    assert [router.name for router, _ in first.routers] == ["layers.1.gate"]
    assert names(second) == ["layers.0.down_proj"]
    assert second.routers == []
    assert set(second.not_observed) == {"layers.1.down_proj", "layers.1.gate"}


def moe(gate: Any = None, experts: Any = None) -> SimpleNamespace:
    experts = experts or linear()
    block = linear(experts=experts)
    gate = gate or linear(out_features=8)
    return model(layers__0__mlp=block, layers__0__mlp__gate=gate, layers__0__mlp__experts=experts)


def test_a_plain_router_is_counted_and_activations_inside_experts_are_said_not_to_be() -> None:
    found = find(moe(), config=linear(num_experts_per_tok=2))
    ((router, _),) = found.routers
    assert (router.name, router.experts, router.top_k, router.layer) == ("layers.0.mlp.gate", 8, 2, 0)
    assert found.not_observed == {"layers.0.mlp.experts": "activations inside experts cannot be seen from outside"}


def test_a_gate_that_has_no_experts_beside_it_is_no_router() -> None:
    found = find(model(layers__0__mlp=linear(), layers__0__mlp__gate=linear(out_features=8)))
    assert found.routers == []


@pytest.mark.parametrize(
    ("gate", "experts", "config"),
    [
        (linear(out_features=8, e_score_correction_bias=0.0), None, linear(num_experts_per_tok=2)),
        (None, linear(router=type("GroupedTopKRouter", (), {})()), linear(num_experts_per_tok=2)),
        (None, linear(router=type("CPURouter", (), {"use_grouped_topk": True})()), linear(num_experts_per_tok=2)),
        (None, None, linear(num_experts_per_tok=2, n_group=8)),
        (None, None, linear()),
    ],
)
def test_a_router_whose_choice_does_not_follow_from_its_logits_is_not_observed(
    gate: Any, experts: Any, config: Any
) -> None:
    found = find(moe(gate, experts), config=config)
    assert found.routers == []
    assert "layers.0.mlp.gate" in found.not_observed


@pytest.mark.parametrize(("name", "layer"), [("h.12.mlp.c_proj", 12), ("layers.0", 0), ("mlp.fc2", None)])
def test_the_layer_is_the_number_in_the_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_a_tuple_stands_for_its_first_tensor_and_nothing_for_none() -> None:
    assert first_tensor((1.5, None), float) == 1.5
    assert first_tensor(1.5, float) == 1.5
    assert first_tensor(None, float) is None
    assert first_tensor((None, 1.5), float) is None
    assert first_tensor((), float) is None
