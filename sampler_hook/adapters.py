"""What differs between vLLM versions: which are known, what is there to hook, and where their objects keep a fact.

vLLM's objects are Any here: they have no stable types, and vLLM is imported only when it is asked for.
"""

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from sparseety.errors import SparseetyError

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

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


REQUIRED = ("__init__", "add_request", "update_from_output", "finish_requests")
# Without a shutdown the log is closed when the process ends; without the other, external ids are derived.
EXPECTED = [
    *(f"Scheduler.{name}" for name in (*REQUIRED, "shutdown")),
    "Request.from_engine_core_request",
    "EngineCore.shutdown",
]


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
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request
    except ImportError as error:
        raise SparseetyError(f"vLLM {version} has no scheduler where this plugin looks for it ({error})") from None
    wanted = [Target(Scheduler, name) for name in (*REQUIRED, "shutdown")]
    wanted.append(Target(Request, "from_engine_core_request"))
    targets = [target for target in wanted if target.name in vars(target.owner)]
    if lacking := [str(target) for target in wanted if target not in targets and target.name in REQUIRED]:
        raise SparseetyError(f"vLLM {version} lacks {', '.join(lacking)}, which capture stands on")
    return Vllm(version, targets)


def engine_core_shutdown() -> Target | None:
    """EngineCore.shutdown, in a process that has an EngineCore; no other process needs the module, so none loads it.

    vLLM's API server kills its engine at once after asking it to end (--shutdown-timeout 0, the default). The engine
    sees to its workers before it calls Scheduler.shutdown, and that is often too late.
    """
    owner = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    return Target(owner, "shutdown") if owner is not None and "shutdown" in vars(owner) else None


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


def cached_tokens(output: Any) -> int | None:
    """Prompt tokens taken from a cache, where this EngineCoreOutput says so; only a request's first one does."""
    stats = getattr(output, "prefill_stats", None)
    if stats is not None:
        return int(stats.num_cached_tokens)
    count = getattr(output, "num_cached_tokens", None)  # before 0.20
    return None if count is None or count < 0 else int(count)


def plain_ids(ids: Any) -> list[int]:
    """A copy of token ids, as Python's own integers: some runners hand over arrays."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def starts(scheduler_output: Any) -> dict[str, int]:
    """Position of the first token that this step computes, by engine id."""
    found = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    found.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return found


def starts_are_exact(config: Any) -> bool:
    """Under async scheduling a step is planned before it is known how many drafts of the last one were rejected."""
    return config.speculative_config is None or not config.scheduler_config.async_scheduling


def reasoning_parser(config: Any) -> str | None:
    for part in ("reasoning_config", "structured_outputs_config"):
        if name := getattr(getattr(config, part, None), "reasoning_parser", None):
            return str(name)
    return None


def served_names(model_config: Any) -> list[str]:
    names = model_config.served_model_name
    return [names] if isinstance(names, str) else list(names or [])


def data_parallel_rank(config: Any) -> int:
    # Engines of a dense model all have data_parallel_rank 0; where there is an index, it is the rank of before that.
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank) or 0)
