"""The same counts and records on a Hugging Face causal LM, without vLLM: a context manager around generate or forward.

    with observe(model, records.append) as observation:
        model.generate(**inputs)

Each row of a batch is a request; a call without a cache begins new ones.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sampler_hook.counting import Counting, Put, weights
from sampler_hook.ledger import Rows
from sampler_hook.sparsity_settings import NEAR_ZERO
from sparseety.clock import Clock, monotonic_clock
from sparseety.records import Gap, SparsityStart

log = logging.getLogger("sparseety")

MAX_ROWS = 1 << 16  # tokens of one forward call, batch times length; the rest would not be observed


@dataclass(slots=True)
class Observation:
    """What is being counted. `name` gives the request of a batch row its name, from the number of requests before."""

    counting: Counting
    name: Callable[[int], str] = "request-{}".format
    requests: int = 0  # begun so far
    _open: list[Rows] = field(default_factory=list)  # the last call's rows, one for each request
    _kept: list[int] | None = None
    _steps: int = 0

    @property
    def not_observed(self) -> dict[str, str]:
        """Modules that are not counted, and why; those whose hook has not run so far are among them."""
        silent = dict.fromkeys(self.counting.silent(), "it has not been called, or not with a tensor")
        return self.counting.start.not_observed | silent

    def begin(self, past: int, real: list[list[bool]]) -> None:
        """A forward call begins. `real`: for each row of the batch and each position, whether it is no padding."""
        if past == 0 or len(real) != len(self._open):
            self.counting.finished()
            self._open = [
                Rows(self.name(self.requests + number), 0, start=0, prompt_len=sum(row))
                for number, row in enumerate(real)
            ]
            self.requests += len(real)
        self._open = [
            Rows(each.engine_id, sum(row), start=each.start + each.count, prompt_len=each.prompt_len)
            for each, row in zip(self._open, real, strict=True)
        ]
        flat = [position for row in real for position in row]
        self._kept = None if all(flat) else [number for number, is_real in enumerate(flat) if is_real]
        self.counting.before_step(len(flat))

    def end(self) -> None:
        """It has ended."""
        self.counting.computed(self._open, self._steps, self._kept)
        self._steps += 1


@contextmanager
def observe(
    model: Any,
    put: Put,
    *,
    threshold: float = NEAR_ZERO,
    per_token: bool = False,
    max_rows: int = MAX_ROWS,
    clock: Clock | None = None,
) -> Iterator[Observation]:
    """Count while the block runs; `put` gets the records. Raises SparseetyError where nothing can be counted.

    A fault of ours ends the counting, with a gap in the records, and not the model's work.
    """
    import transformers

    clock = clock or monotonic_clock()
    start = SparsityStart(
        ts=clock(),
        runtime=f"transformers {transformers.__version__}",
        model=str(model.config._name_or_path),
        threshold=threshold,
        sites=[],
        per_token=per_token,
    )
    counting = Counting(model, start, put=put, clock=clock, rows=max_rows, device=model.device, config=model.config)
    observation = Observation(counting)

    off = False

    def safely(action: Callable[..., object], *args: Any) -> None:
        nonlocal off
        if off:
            return
        try:
            action(*args)
        except Exception as error:
            off = True
            log.exception("sparseety: counting sparsity failed and switched itself off")
            put(Gap(ts=clock(), reason=f"counting sparsity switched itself off: {type(error).__name__}", count=1))
            remove()

    def remove() -> None:
        counting.detach()
        for handle in handles:
            handle.remove()

    handles: list[Any] = []
    try:
        counting.attach()
        put(weights(model, clock()))
        handles.append(
            model.register_forward_pre_hook(
                lambda _, args, kwargs: safely(lambda: observation.begin(*_call(args, kwargs))), with_kwargs=True
            )
        )
        handles.append(model.register_forward_hook(lambda *_: safely(observation.end)))
        yield observation
        safely(counting.close)
    finally:
        remove()


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[list[bool]]]:
    """(positions in the cache, which positions of the input are no padding) of a forward call."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        ids = kwargs["inputs_embeds"][..., 0]
    batch, length = ids.shape
    cache = kwargs.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or mask.shape[1] < length:
        return past, [[True] * length for _ in range(batch)]
    return past, mask[:, -length:].bool().tolist()
