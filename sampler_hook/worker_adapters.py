"""What worker.py has to know of vLLM's worker side: how its batches are laid out, and where its rows are no batch.

vLLM's objects are Any, as in adapters.py.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from sampler_hook.ledger import Rows

FROM_ENGINE = "_sparseety"  # on a SchedulerOutput, which is pickled to the workers: what the engine's part tells them
_NO_COMPILE_CACHE = "VLLM_DISABLE_COMPILE_CACHE"


def keep_out_of_the_compile_cache(environ: MutableMapping[str, str]) -> None:
    """Hooks are no part of vLLM's cache key: a graph cached without counters would count nothing, and one cached with
    them would go on writing where nobody reads. So nothing is cached, unless the operator decided otherwise."""
    environ.setdefault(_NO_COMPILE_CACHE, "1")


@contextmanager
def before_weights_are_packed(look: Callable[[Any], object]) -> Iterator[None]:
    """While a model is loaded in this block, `look` gets it with its weights as they were read from the files; what
    vLLM makes of them next (quantized, or packed for the CPU's kernels) does not tell its zeros any more."""
    base_loader = sys.modules.get("vllm.model_executor.model_loader.base_loader")  # the worker has loaded it
    own = getattr(base_loader, "process_weights_after_loading", None)
    if base_loader is None or own is None:
        yield
        return

    def ours(model: Any, *args: Any, **kwargs: Any) -> Any:
        look(model)
        return own(model, *args, **kwargs)

    vars(base_loader)["process_weights_after_loading"] = ours
    try:
        yield
    finally:
        vars(base_loader)["process_weights_after_loading"] = own


def rows_are_not_the_batch(config: Any) -> str | None:
    """Why a row of a module's input need not be the batch's token of that number; None: it is."""
    parallel = config.parallel_config
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "the batch is run in parts (--enable-dbo, --ubatch-size)"
    if getattr(parallel, "use_sequence_parallel_moe", False):
        return "each rank has a part of the batch in its experts' layers (sequence-parallel experts)"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "late layers see some tokens only (--kv-sharing-fast-prefill)"
    return None


def is_compiled(config: Any) -> bool:
    """Whether vLLM may make graphs of the model, by torch.compile or as CUDA graphs."""
    return not config.model_config.enforce_eager


def rows_of_experts_are_not_the_batch(config: Any) -> str | None:
    """Why, inside of experts, a row need not be one of this engine's batch; None: it is."""
    if getattr(config.parallel_config, "data_parallel_size", 1) > 1:
        return "its experts may be given the rows of other engines, too (--data-parallel-size)"
    return None


def captures_experts(config: Any) -> bool:
    """Whether the operator had vLLM capture which experts are chosen: --enable-return-routed-experts."""
    places = (getattr(config, "aux_output_config", None), config.model_config)  # since 0.32, and before
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def language_model(runner: Any) -> Any:
    """The part of the model whose rows are tokens."""
    model = runner.get_model()
    part = getattr(model, "get_language_model", None)
    return part() if callable(part) else model


def rows_of_a_step(config: Any) -> int:
    return int(config.scheduler_config.max_num_batched_tokens)


def batch_order(runner: Any) -> Iterable[str]:
    """Engine ids of the batch that was just started, in the order of its rows."""
    state = getattr(runner, "execute_model_state", None)
    batch = getattr(state, "input_batch", None) or runner.input_batch  # model runner V2, or V1
    return list(batch.req_ids)


STRANGER = -1  # prompt_len of a request that was under way when counting began


class BatchReader:
    """Reads what a SchedulerOutput says of each request. Remembers prompt lengths: it says them once only."""

    def __init__(self, config: Any) -> None:
        # Under async scheduling a step is planned before it is known how many drafts of the last one were rejected.
        self._exact = config.speculative_config is None or not config.scheduler_config.async_scheduling
        self._prompt_len: dict[str, int] = {}

    def rows(self, scheduler_output: Any, order: Iterable[str]) -> list[Rows]:
        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            prompt = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
            self._prompt_len[new.req_id] = len(prompt)
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        return [
            Rows(
                engine_id,
                counts[engine_id],
                start=starts[engine_id],
                prompt_len=self._prompt_len.get(engine_id, STRANGER),
                drafts=len(drafts.get(engine_id, ())),
                exact=self._exact,
            )
            for engine_id in order
            if counts.get(engine_id)
        ]

    def finished(self, engine_ids: Iterable[str]) -> None:
        for engine_id in engine_ids:
            self._prompt_len.pop(engine_id, None)


def without(rows: list[Rows], skipped: Collection[str]) -> tuple[list[Rows], list[int] | None]:
    """What is left of a batch, and the numbers of the rows that are; None: all of them."""
    if not skipped:
        return rows, None
    kept: list[Rows] = []
    numbers: list[int] = []
    first = 0
    for each in rows:
        if each.engine_id not in skipped:
            kept.append(each)
            numbers += range(first, first + each.count)
        first += each.count
    return kept, numbers
