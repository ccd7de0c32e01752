"""What differs between vLLM versions: which are known, what is there to hook, and where their objects keep a fact.

vLLM's objects are Any here: they have no stable types, and vLLM is imported only when it is asked for.
"""

import importlib
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparseety.errors import SparseetyError
from sparseety.records import Role

TESTED = ("0.28", "0.32")  # releases that tests/test_real_vllm.py passed with


def check_version(version: str, *, untested: bool) -> None:
    """Raises SparseetyError for a vLLM that no test has seen, unless `untested` says to go on."""
    release = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    if untested or (release and f"{release[1]}.{release[2]}" in TESTED):
        return
    known = ", ".join(f"{release}.x" for release in TESTED)
    raise SparseetyError(
        f"vLLM {version} is not one that this plugin was tested with ({known}); "
        "SPARSEETY_HOOK_UNTESTED=1 makes it work with it all the same"
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A method of vLLM that is wrapped."""

    owner: type
    name: str
    part: str  # of PARTS

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


# What is wrapped, by where it is: (module, class) -> (method, part). Optional ones may be missing in a vLLM.
SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
REQUEST = ("vllm.v1.request", "Request")
BLOCK_POOL = ("vllm.v1.core.block_pool", "BlockPool")
ENGINE_CORE = ("vllm.v1.engine.core", "EngineCore")
PARTS = ("tokens", "kv", "events", "workers")  # what is lost without a hook
REQUIRED = ("__init__", "add_request", "update_from_output", "finish_requests")
POINTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    SCHEDULER: [
        *((name, "tokens") for name in (*REQUIRED, "shutdown")),
        ("_preempt_request", "kv"),
        ("schedule", "workers"),
    ],
    REQUEST: [("from_engine_core_request", "tokens")],  # without it, external ids are derived
    BLOCK_POOL: [("_maybe_evict_cached_block", "kv")],
    # vLLM's API server kills its engine at once after asking it to end (--shutdown-timeout 0, the default). The engine
    # sees to its workers before it calls Scheduler.shutdown, and that is often too late: hence EngineCore's too.
    ENGINE_CORE: [
        ("shutdown", "tokens"),
        *(
            (name, "events")
            for name in (
                "sleep",
                "wake_up",
                "reset_prefix_cache",
                "reset_mm_cache",
                "reset_encoder_cache",
                "collective_rpc",
                "set_weight_version",
            )
        ),
    ],
}


def expected(parts: Collection[str]) -> list[str]:
    """The hooks that these parts want, by name."""
    return [f"{owner}.{name}" for (_, owner), points in POINTS.items() for name, part in points if part in parts]


@dataclass(frozen=True, slots=True)
class Vllm:
    """What this process has of vLLM."""

    version: str
    targets: list[Target] = field(default_factory=list)


def probe(*, untested: bool) -> Vllm:
    """Look at the vLLM of this process. Raises SparseetyError if it is unknown, or lacks what capture stands on."""
    import vllm

    # Not package metadata: its CPU build is distributed under another name than the one it imports as.
    version = str(vllm.__version__)
    check_version(version, untested=untested)
    try:
        importlib.import_module(SCHEDULER[0])
        importlib.import_module(REQUEST[0])
    except ImportError as error:
        raise SparseetyError(f"vLLM {version} has no scheduler where this plugin looks for it ({error})") from None
    targets = [*found(SCHEDULER), *found(REQUEST)]
    names = {target.name for target in targets}
    if lacking := [f"Scheduler.{name}" for name in REQUIRED if name not in names]:
        raise SparseetyError(f"vLLM {version} lacks {', '.join(lacking)}, which capture stands on")
    return Vllm(version, targets)


def found(point: tuple[str, str]) -> list[Target]:
    """The methods of a class that are there, in a process that has loaded its module; ours loads none for them."""
    owner = getattr(sys.modules.get(point[0]), point[1], None)
    if owner is None:
        return []
    return [Target(owner, name, part) for name, part in POINTS[point] if name in vars(owner)]


def in_engine() -> list[Target]:
    """What else there is to wrap in a process that has a scheduler."""
    return [*found(BLOCK_POOL), *found(ENGINE_CORE)]


# ------------------------------------------------------------------------------------------------- its objects

_CHILD_OF_OURS = re.compile(r"(\d+)_(?=(?:chatcmpl|cmpl|resp)[-_])")


def identity(engine_id: str, external_id: str | None) -> tuple[str, int]:
    """(external id, child) of a request.

    vLLM names child k of n > 1 `<k>_<id>`, and from 0.14 on adds `-` and 8 hexadecimal digits to every id, keeping the
    id before as external_req_id. Before that there is nothing but the engine's own id to go by.
    """
    if external_id is None:
        child = _CHILD_OF_OURS.match(engine_id)
        return (engine_id[child.end() :], int(child[1])) if child else (engine_id, 0)
    child = re.fullmatch(rf"(?:(\d+)_)?{re.escape(external_id)}(?:-[0-9a-f]{{8}})?", engine_id)
    return external_id, int(child[1] or 0) if child else 0


def eos_id(request: Any) -> int | None:
    """The tokenizer's end-of-sequence id, where it ends this request."""
    params = request.sampling_params
    if hasattr(params, "eos_token_id"):
        return None if params.eos_token_id is None else int(params.eos_token_id)
    eos = getattr(request, "eos_token_id", None)  # where the sampling parameters do not know it yet
    return None if eos is None or params.ignore_eos else int(eos)


def external_tokens(output: Any) -> int:
    """Prompt tokens fetched from another engine or store, where this EngineCoreOutput says so; only the first does."""
    return int(getattr(getattr(output, "prefill_stats", None), "num_external_cached_tokens", 0))


def text_parameters(request: Any, generation_eos: frozenset[int]) -> dict[str, Any]:
    """What decides which text is right: fields of records.RequestAdded."""
    params = request.sampling_params
    stop_token_ids = list(params.stop_token_ids or [])
    eos_ids: list[int] = []
    if not params.ignore_eos:
        if (eos := eos_id(request)) is not None:
            eos_ids.append(eos)
        eos_ids += [id_ for id_ in stop_token_ids if id_ in generation_eos and id_ not in eos_ids]
    head = plain_ids((request.prompt_token_ids or [])[:2])
    return {
        "prompt_head": head if len(head) == 2 and head[0] == head[1] else [],
        "prompt_tail": plain_ids((request.prompt_token_ids or [])[-16:]),
        "stop": [params.stop] if isinstance(params.stop, str) else list(params.stop or []),
        "stop_token_ids": [id_ for id_ in stop_token_ids if id_ not in eos_ids],
        "eos_ids": eos_ids,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "detokenize": params.detokenize,
        "max_tokens": request.max_tokens,
        "min_tokens": params.min_tokens,
    }


def role(request: Any) -> Role | None:
    """This engine's part, where prefill and decode run in different engines."""
    transfer = getattr(request, "kv_transfer_params", None) or {}
    if transfer.get("do_remote_decode"):
        return "prefill"
    return "decode" if transfer.get("do_remote_prefill") else None


def lora(request: Any) -> str | None:
    adapter = getattr(request, "lora_request", None)
    return None if adapter is None else str(adapter.lora_name)


def invalid_drafts(scheduler_output: Any, engine_id: str) -> int:
    """Drafts that a grammar ruled out beforehand: not proposed to the model, though they stand in the plan."""
    return int((getattr(scheduler_output, "num_invalid_spec_tokens", None) or {}).get(engine_id, 0))


def plain_ids(ids: Any) -> list[int]:
    """A copy of token ids, as Python's own integers: some runners hand over arrays."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def starts(scheduler_output: Any) -> tuple[dict[str, int], Collection[str]]:
    """Position of the first token that this step computes, by engine id; and those that begin again in it.

    Some runners get a resumed request as a new one: who calls this knows whether it is.
    """
    cached = scheduler_output.scheduled_cached_reqs
    positions = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    again: Collection[str] = cached.resumed_req_ids
    if new := scheduler_output.scheduled_new_reqs:
        positions.update((each.req_id, each.num_computed_tokens) for each in new)
        again = {*again, *(each.req_id for each in new)}
    return positions, again


def blocks(scheduler_output: Any) -> Iterator[tuple[str, int, Any, bool]]:
    """(engine id, start, block numbers by KV cache group, whether they are its whole table) of this step."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = scheduler_output.scheduled_cached_reqs
    for engine_id, start, numbers in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        if numbers:
            yield engine_id, start, numbers, engine_id in cached.resumed_req_ids


def block_size(config: Any) -> int | None:
    size = getattr(getattr(config, "cache_config", None), "block_size", None)
    return None if size is None else int(size)


def block_sizes(scheduler: Any) -> list[int]:
    """Tokens of a block, by KV cache group."""
    return [int(group.kv_cache_spec.block_size) for group in scheduler.kv_cache_config.kv_cache_groups]


def block_pool(scheduler: Any) -> Any:
    return getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)


def text_config(model_config: Any) -> Any:
    return getattr(model_config, "hf_text_config", None) or getattr(model_config, "hf_config", None)


def reasoning_parser(config: Any) -> str | None:
    for part in ("reasoning_config", "structured_outputs_config"):
        if name := getattr(getattr(config, part, None), "reasoning_parser", None):
            return str(name)
    return None


def served_names(model_config: Any) -> list[str]:
    names = model_config.served_model_name
    return [names] if isinstance(names, str) else list(names or [])


def served_as(config: Any) -> str:
    """The model's name as vLLM's own metrics have it."""
    return next(iter(served_names(config.model_config)), str(config.model_config.model))


def engines(config: Any) -> int:
    """How many data-parallel engines the server has."""
    return int(getattr(config.parallel_config, "data_parallel_size", 1) or 1)


def workers(config: Any) -> int:
    """Over how many an engine's model is spread."""
    parallel = config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


def layers(config: Any) -> int:
    """How many the model has, by its configuration; 0: it does not say."""
    count = getattr(text_config(config.model_config), "num_hidden_layers", 0)
    return count if isinstance(count, int) else 0


def data_parallel_rank(config: Any) -> int:
    # Engines of a dense model all have data_parallel_rank 0; where there is an index, it is the rank of before that.
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank) or 0)
