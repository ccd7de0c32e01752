"""Sparsity inside vLLM's workers: counters on the model after it was loaded, read out after each step.

vLLM's objects are Any, as in adapters.py. One class method is wrapped, WorkerWrapperBase.init_device, which every kind
of worker goes through; the rest sits on the one worker it made. A fault takes all of it off again: the tokens' capture
and the serving go on.
"""

import atexit
import functools
import logging
import os
from collections.abc import Callable, MutableMapping
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any

from sampler_hook import worker_adapters as adapters
from sampler_hook.adapters import data_parallel_rank, text_config
from sampler_hook.counting import Counting, weights
from sampler_hook.sparsity_settings import KINDS, WEIGHTS, SparsitySettings
from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import Gap, Scope, SparsityStart, Weights

log = logging.getLogger("vllm.sparseety")

_OURS = "__sparseety__"
PART = "sparseety_part"  # on a worker's execute_model: its WorkerPart

Method = Callable[..., Any]


def install(folder: Path, settings: SparsitySettings, environ: MutableMapping[str, str]) -> None:
    """Have the workers of this process, and of processes it starts, count. Raises SparseetyError."""
    if settings.kinds - {WEIGHTS}:
        adapters.keep_out_of_the_compile_cache(environ)
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase
    except ImportError as error:
        raise SparseetyError(f"this vLLM has no worker where sparsity is counted from ({error})") from None
    own = vars(WorkerWrapperBase).get("init_device")
    if own is None:
        raise SparseetyError("this vLLM has no WorkerWrapperBase.init_device, where sparsity is counted from")
    if not hasattr(own, _OURS):
        WorkerWrapperBase.init_device = _wrap_init_device(own, folder, settings)


def _wrap_init_device(own: Method, folder: Path, settings: SparsitySettings) -> Method:
    @functools.wraps(own)
    def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(wrapper, *args, **kwargs)
        try:
            WorkerPart(wrapper.worker, folder, settings).attach()
        except Exception:
            log.exception("sparseety: sparsity is not counted: the worker could not be followed")
        return result

    setattr(init_device, _OURS, True)
    return init_device


class WorkerPart:
    """The counters of one worker."""

    def __init__(self, worker: Any, folder: Path, settings: SparsitySettings) -> None:
        self._worker, self._folder, self._settings = worker, folder, settings
        self._clock = monotonic_clock()
        self._writer: LogWriter | None = None
        self._pid = os.getpid()
        self._counting: Counting | None = None
        self._weights: Weights | None = None
        self._put_on: list[str] = []  # instance attributes that are ours
        self._off = False

    def attach(self) -> None:
        for name, wrap in (
            ("load_model", self._wrap_load_model),
            ("execute_model", self._wrap_execute_model),
            ("shutdown", self._wrap_shutdown),
        ):
            setattr(self._worker, name, wrap(getattr(self._worker, name)))
            self._put_on.append(name)

    def detach(self) -> None:
        """Give the worker its own methods back, and take the hooks off the model."""
        self._off = True
        for name in self._put_on:
            vars(self._worker).pop(name, None)
        self._put_on = []
        if self._counting is not None:
            self._counting.detach()

    def _safely(self, action: Callable[..., object], *args: Any) -> None:
        if self._off:
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 -- whatever we did wrong, the request being served must not notice
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        if isinstance(error, SparseetyError):
            log.error("sparseety: sparsity is not counted: %s", error)
        else:
            log.error("sparseety: counting sparsity failed and switched itself off; the rest goes on", exc_info=error)
        try:
            self.detach()
            if self._writer is not None:
                reason = f"counting sparsity switched itself off: {type(error).__name__}"
                self._writer.put(Gap(ts=self._clock(), reason=reason, count=1))
        except Exception:
            log.exception("sparseety: and could not be taken off")
        self._counting = None

    # ----------------------------------------------------------------------------------------------- the wrappers

    def _wrap_load_model(self, own: Method) -> Method:
        @functools.wraps(own)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            with adapters.before_weights_are_packed(lambda model: self._safely(self._count_weights, model)):
                result = own(*args, **kwargs)
            self._safely(self._loaded)
            return result

        return load_model

    def _wrap_execute_model(self, own: Method) -> Method:
        @functools.wraps(own)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if counting := self._counting:
                self._safely(lambda: counting.before_step(scheduler_output.total_num_scheduled_tokens))
            result = own(scheduler_output, *args, **kwargs)
            if self._counting:
                self._safely(self._computed, scheduler_output)
            return result

        setattr(execute_model, PART, self)
        return execute_model

    def _wrap_shutdown(self, own: Method) -> Method:
        @functools.wraps(own)
        def shutdown(*args: Any, **kwargs: Any) -> Any:
            self._safely(self.close)
            return own(*args, **kwargs)

        return shutdown

    # ------------------------------------------------------------------------------------------------ what they do

    def _count_weights(self, model: Any) -> None:
        # Only the first: a draft model is loaded after the model that it drafts for.
        if self._weights is None and WEIGHTS in self._settings.kinds:
            self._weights = weights(model, self._clock())

    def _loaded(self) -> None:
        if self._counting is not None:
            return  # loaded again: the modules are the same
        runner, config = self._worker.model_runner, self._worker.vllm_config
        if reason := adapters.rows_are_not_the_batch(config):
            raise SparseetyError(f"a request's rows cannot be told from others': {reason}")
        self._writer = LogWriter(self._folder, "worker", Scope(), clock=self._clock)
        atexit.register(self.close)
        multiprocessing_util.Finalize(None, self.close, exitpriority=0)  # vLLM's children end without atexit
        counting = Counting(
            adapters.language_model(runner),
            _start(self._worker, self._settings, self._clock()),
            put=self._writer.put,
            clock=self._clock,
            rows=adapters.rows_of_a_step(config),
            device=runner.device,
            config=text_config(config.model_config),
            kinds=self._settings.kinds,
        )
        if WEIGHTS in self._settings.kinds:
            self._writer.put(self._weights or weights(adapters.language_model(runner), self._clock()))
        self._counting, self._batches = counting, adapters.BatchReader(config)
        counting.attach()
        start = counting.start
        log.info(
            "sparseety: sparsity is counted at %d modules and %d routers; near zero is %g and below",
            *(len(start.sites), len(start.routers), start.threshold),
        )

    def _computed(self, scheduler_output: Any) -> None:
        counting = self._counting
        if counting is None:
            return
        counting.finished(scheduler_output.finished_req_ids)
        self._batches.finished(scheduler_output.finished_req_ids)
        if scheduler_output.total_num_scheduled_tokens:
            told = getattr(scheduler_output, adapters.FROM_ENGINE, None) or {}  # step, requests to skip, what holds now
            order = adapters.batch_order(self._worker.model_runner)
            rows, kept = adapters.without(self._batches.rows(scheduler_output, order), told.get("skip", ()))
            if rows and self._settings.kinds & set(told.get("capture", KINDS)):
                counting.computed(rows, told.get("step"), kept)
            counting.set_threshold(told.get("near_zero", counting.start.threshold))

    def close(self) -> None:
        if self._writer is None or self._pid != os.getpid():
            return
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.close()
        self._writer.close()


def _start(worker: Any, settings: SparsitySettings, ts: float) -> SparsityStart:
    import vllm

    config = worker.vllm_config
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return SparsityStart(
        ts=ts,
        runtime=f"vllm {vllm.__version__}",
        model=str(config.model_config.model),
        threshold=settings.threshold,
        sites=[],
        per_token=settings.per_token,
        tensor_parallel_rank=worker.rank % tensor,
        tensor_parallel_size=tensor,
        pipeline_parallel_rank=worker.rank // tensor % pipeline,
        data_parallel_rank=data_parallel_rank(config),
    )
