"""Where a model is counted: the down projections of its MLPs, and the routers of its experts. By names, so it works on
vLLM's and on transformers' models alike. Modules are Any: torch is not there where this is type-checked.

The input of a down projection, not the output of an activation module: vLLM gives one activation module to all layers
of some models, transformers has none in others, and a ReLU's zeros are gone behind the projection.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sampler_hook import choices
from sparseety.records import Router, Site

# The last part of the module's name. `c_proj` and `w2` name other things too: only inside an MLP.
DOWN_PROJECTIONS = frozenset({"down_proj", "fc2", "fc_out", "dense_4h_to_h", "c_proj", "w2"})
_INSIDE_AN_MLP = frozenset({"c_proj", "w2", "fc_out"})
_MLP = re.compile(r"mlp|ffn|feed_forward", re.IGNORECASE)
ROUTERS = frozenset({"gate", "router"})
# Rows of these are image patches or audio frames, and rows of a single expert are the tokens it was given.
_OTHER_ROWS = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|encoder|experts)\.", re.IGNORECASE)


@dataclass(slots=True)
class Found:
    """What of a model is counted, and what is not, and why."""

    sites: list[tuple[Site, Any]] = field(default_factory=list)  # with its module
    routers: list[tuple[Router, Any]] = field(default_factory=list)  # with it; by_callback: with its experts
    not_observed: dict[str, str] = field(default_factory=dict)  # module name -> reason


def find(model: Any, *, config: Any = None, rank: int = 0, mixed: str | None = None, captured: bool = False) -> Found:
    """Look through a model. `config`: the model's own; `rank`: of the tensor parallel group, whose members see some
    things whole and alike: those rank 0 counts alone. `mixed`: why rows inside the experts are not the batch's, if they
    are not; `captured`: vLLM was asked to capture choices of experts, and it knows which are."""
    found = Found()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if _OTHER_ROWS.search(f"{parent}."):
            continue
        if last in DOWN_PROJECTIONS and (last not in _INSIDE_AN_MLP or _MLP.search(parent)):
            _add_site(found, name, module, rank)
        elif last in ROUTERS and (experts := getattr(modules.get(parent), "experts", None)) is not None:
            _add_router(found, name, module, experts, config, rank, None if captured else mixed, captured)
    if not (found.sites or found.routers or found.not_observed):
        found.not_observed[""] = (
            f"no module is named like a down projection ({', '.join(sorted(DOWN_PROJECTIONS))}) or a router"
        )
    for name in modules:
        parent, _, last = name.rpartition(".")
        if last == "experts" and not _OTHER_ROWS.search(f"{parent}."):
            found.not_observed[name] = "activations inside experts cannot be seen from outside"
    return found


def layer_of(name: str) -> int | None:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(number[1]) if number else None


def width_of(module: Any) -> int | None:
    """Elements of one token in the input of a linear layer, on this rank; of vLLM, torch or transformers' GPT-2."""
    base = getattr(module, "base_layer", module)  # vLLM's LoRA wraps
    return _first_int(_attributes((base,), ("input_size_per_partition", "input_size", "in_features", "nx")))


def is_sharded(module: Any) -> bool:
    """Whether each rank of a tensor parallel group sees only columns of its own."""
    base = getattr(module, "base_layer", module)
    return int(getattr(base, "tp_size", 1)) > 1 and bool(getattr(base, "input_is_parallel", False))


def _add_site(found: Found, name: str, module: Any, rank: int) -> None:
    width = width_of(module)
    if width is None:
        found.not_observed[name] = f"a {type(module).__name__} does not say how wide its input is"
    elif rank and not is_sharded(module):
        found.not_observed[name] = "all ranks see it whole; rank 0 counts it"
    else:
        found.sites.append((Site(name=name, width=width, layer=layer_of(name)), module))


def _add_router(
    found: Found, name: str, module: Any, experts: Any, config: Any, rank: int, mixed: str | None, captured: bool
) -> None:
    router = getattr(experts, "router", None)
    number = _first_int(_attributes((module, router), ("output_size", "out_features", "num_experts")))
    top_k = _first_int(_attributes((module, router), ("top_k",)))
    top_k = top_k or _first_int(_attributes((config,), ("num_experts_per_tok", "num_experts_per_token", "moe_topk")))
    reason = _not_plain(module, experts, config)
    by_callback = reason is not None and (captured or choices.place(experts) is not None)
    if reason and not by_callback:
        found.not_observed[name] = reason
    elif by_callback and mixed:
        found.not_observed[name] = f"{reason}, and {mixed}"
    elif number is None or top_k is None:
        found.not_observed[name] = "how many experts it chooses from, or how many it chooses, is not known"
    elif rank:
        found.not_observed[name] = "all ranks route alike; rank 0 counts it"
    else:
        record = Router(name=name, experts=number, top_k=top_k, layer=layer_of(name), by_callback=by_callback)
        found.routers.append((record, experts if by_callback else module))


_NOT_PLAIN = "its choice is not the top-k of its logits ({})"


def _not_plain(module: Any, experts: Any, config: Any) -> str | None:
    """Why the experts chosen do not follow from the logits alone; None: they do."""
    router = getattr(experts, "router", None)
    places = (module, experts, router)
    for attribute in ("e_score_correction_bias", "custom_routing_function", "hash_indices_table", "zero_expert_type"):
        if any(value is not None for value in _attributes(places, (attribute,))):
            return _NOT_PLAIN.format(attribute)
    if any(value for value in _attributes(places, ("use_grouped_topk",))):
        return _NOT_PLAIN.format("grouped experts")
    if (_first_int(_attributes((config,), ("n_group",))) or 0) > 1:
        return _NOT_PLAIN.format("grouped experts")
    kind = type(router).__name__
    if router is not None and kind not in ("FusedTopKRouter", "CPURouter"):
        return _NOT_PLAIN.format(kind)
    return None


def _attributes(places: Iterable[Any], names: Iterable[str]) -> Iterator[Any]:
    for place in places:
        for name in names:
            if (value := getattr(place, name, None)) is not None:
                yield value


def _first_int(values: Iterable[Any]) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
