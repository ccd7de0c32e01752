"""Sparsity inside vLLM's workers: counters on the model after it was loaded, read out after each step.

vLLM's objects are Any, as in adapters.py. One class method is wrapped, WorkerWrapperBase.init_device, which every kind
of worker goes through; the rest sits on the one worker it made. A fault takes all of it off again: the tokens' capture
and the serving go on. So does the control file, between two steps, until it says otherwise.
"""

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, MutableMapping
from multiprocessing import util as multiprocessing_util
from typing import Any

from sampler_hook import worker_adapters as adapters
from sampler_hook.adapters import data_parallel_rank, text_config
from sampler_hook.control import ControlFile
from sampler_hook.counting import Counting, weights
from sampler_hook.settings import HookSettings
from sampler_hook.sparsity_settings import WEIGHTS, SparsitySettings
from sampler_hook.worker_metrics import WorkerMetrics, metrics_of
from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Gap, Scope, SparsityStart, Weights

log = logging.getLogger("vllm.sparseety")

_OURS = "__sparseety__"
_LOOK_SECONDS = 1.0  # between looks at the control file

Method = Callable[..., Any]


def install(hook: HookSettings, settings: SparsitySettings, environ: MutableMapping[str, str]) -> None:
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
        WorkerWrapperBase.init_device = _wrap_init_device(own, hook, settings)


def _wrap_init_device(own: Method, hook: HookSettings, settings: SparsitySettings) -> Method:
    @functools.wraps(own)
    def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(wrapper, *args, **kwargs)
        try:
            WorkerPart(wrapper.worker, hook, settings).attach()
        except Exception:
            log.exception("sparseety: sparsity is not counted: the worker could not be followed")
        return result

    setattr(init_device, _OURS, True)
    return init_device


class WorkerPart:
    """What follows one worker."""

    def __init__(self, worker: Any, hook: HookSettings, settings: SparsitySettings) -> None:
        self._worker, self._hook, self._settings = worker, hook, settings
        self._control = ControlFile(hook)
        self._clock = monotonic_clock()
        self._writer: LogWriter | None = None
        self._writers: list[LogWriter] = []  # all so far: what they counted goes on
        self._pid = os.getpid()
        self._counting: Counting | None = None  # whether or not it counts now
        self._counts = False
        self._wanted = True  # by the operator
        self._weights: Weights | None = None
        self._put_on: set[str] = set()  # instance attributes that are ours
        self._off = False  # for good
        self._faults = 0
        self._metrics: WorkerMetrics | None = None
        self._switching = threading.Lock()
        self._publishing = threading.Lock()
        self._closing = threading.Event()
        self._ended = threading.Event()

    def attach(self) -> None:
        for name in ("load_model", "compile_or_warm_up_model", "execute_model", "shutdown"):
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        wrappers = {
            "load_model": self._wrap_load_model,
            "compile_or_warm_up_model": self._wrap_warm_up,
            "execute_model": self._wrap_execute_model,
            "shutdown": self._wrap_shutdown,
        }
        if name not in self._put_on:
            self._put_on.add(name)
            setattr(self._worker, name, wrappers[name](getattr(self._worker, name)))

    def _unwrap(self, name: str) -> None:
        """Give the worker its own method back."""
        vars(self._worker).pop(name, None)
        self._put_on.discard(name)

    def detach(self) -> None:
        """Give the worker its own methods back, and take the hooks off the model."""
        self._off = True
        self._closing.set()
        for name in list(self._put_on):
            self._unwrap(name)
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
        self._faults += 1
        if isinstance(error, SparseetyError):
            log.error("sparseety: sparsity is not counted: %s", error)
        else:
            log.error("sparseety: counting sparsity failed and switched itself off; the rest goes on", exc_info=error)
        try:
            self.detach()
            if self._writer is not None:
                reason = f"counting sparsity switched itself off: {type(error).__name__}"
                self._put(Gap(ts=self._clock(), reason=reason, count=1))
        except Exception:
            log.exception("sparseety: and could not be taken off")
        self._counting, self._counts = None, False

    # ----------------------------------------------------------------------------------------------- the wrappers

    def _wrap_load_model(self, own: Method) -> Method:
        @functools.wraps(own)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            with adapters.before_weights_are_packed(lambda model: self._safely(self._count_weights, model)):
                result = own(*args, **kwargs)
            self._safely(self._loaded)
            return result

        return load_model

    def _wrap_warm_up(self, own: Method) -> Method:
        @functools.wraps(own)
        def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
            # vLLM has put its own callbacks on the routers by now, and records its CUDA graphs in here.
            if counting := self._counting:
                self._safely(counting.tap)
            return own(*args, **kwargs)

        return compile_or_warm_up_model

    def _wrap_execute_model(self, own: Method) -> Method:
        @functools.wraps(own)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._counts is not self._wanted:
                self._safely(self._switch)
            if self._counts and (counting := self._counting):
                self._safely(counting.before_step, scheduler_output.total_num_scheduled_tokens)
            result = own(scheduler_output, *args, **kwargs)
            if self._counts:
                self._safely(self._computed, scheduler_output)
            return result

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
        self._open_log()
        atexit.register(self.close)
        multiprocessing_util.Finalize(None, self.close, exitpriority=0)  # vLLM's children end without atexit
        counting = Counting(
            adapters.language_model(runner),
            _start(self._worker, self._settings, self._clock()),
            put=self._put,
            clock=self._clock,
            rows=adapters.rows_of_a_step(config),
            device=runner.device,
            config=text_config(config.model_config),
            kinds=self._settings.kinds,
            mixed=adapters.rows_of_experts_are_not_the_batch(config),
            captured=adapters.captures_experts(config),
            compiled=adapters.is_compiled(config),
        )
        self._publish_from_here(counting)
        if WEIGHTS in self._settings.kinds:
            self._put(self._weights or weights(adapters.language_model(runner), self._clock()))
        self._counting, self._batches = counting, adapters.BatchReader(config)
        counting.attach()
        self._counts = True
        start = counting.start
        log.info(
            "sparseety: sparsity is counted at %d modules and %d routers; near zero is %g and below",
            *(len(start.sites), len(start.routers), start.threshold),
        )
        if self._hook.control is not None:
            self._look_at_control()
        if self._hook.control is not None or self._metrics is not None:
            threading.Thread(target=self._attend, name="sparseety-attendant", daemon=True).start()

    def _open_log(self) -> None:
        self._writer = LogWriter(self._hook.folder, "worker", Scope(), clock=self._clock)
        self._writers.append(self._writer)

    def _put(self, record: AnyRecord) -> bool:
        if self._metrics is not None:
            self._metrics.note(record)
        return self._writer is not None and self._writer.put(record)

    def _publish_from_here(self, counting: Counting) -> None:
        try:
            self._metrics = metrics_of(self._hook, os.environ, self._worker.vllm_config, counting)
        except Exception:
            log.exception("sparseety: the metrics of sparsity cannot be published; it is counted")

    def _computed(self, scheduler_output: Any) -> None:
        counting = self._counting
        if counting is None:
            return
        counting.finished(scheduler_output.finished_req_ids)
        self._batches.finished(scheduler_output.finished_req_ids)
        if not scheduler_output.total_num_scheduled_tokens:
            return
        rows = self._batches.rows(scheduler_output, adapters.batch_order(self._worker.model_runner))
        # Step, requests to skip, what holds now. Without it nobody knows whom to leave out: so nobody is counted.
        told = getattr(scheduler_output, adapters.FROM_ENGINE, None)
        if told is None or not self._settings.kinds & set(told["capture"]):
            return
        strangers = {each.engine_id for each in rows if each.prompt_len == adapters.STRANGER}
        rows, kept = adapters.without(rows, strangers | set(told["skip"]))
        if rows:
            counting.computed(rows, told["step"], kept)
        counting.set_threshold(told["near_zero"])

    # ------------------------------------------------------------------------------------------------- the switch

    def _attend(self) -> None:
        """Look at the control file, and publish. Where the worker is on another machine than the engine and has no such
        file, the engine's word alone holds, and stops the counts but not the counters."""
        looking = self._hook.control is not None
        while not self._ended.wait(_LOOK_SECONDS):
            if looking:
                try:
                    self._look_at_control()
                except Exception:
                    looking = False
                    log.exception("sparseety: the control file is not looked at any more in this worker")
            self._publish()

    def _publish(self) -> None:
        with self._publishing:
            if self._metrics is None or self._pid != os.getpid():
                return
            try:
                self._metrics.publish(self._writers, self._faults)
            except Exception:
                self._metrics = None  # which takes no more records, then
                log.exception("sparseety: the metrics of sparsity are not published any more; it is counted")

    def _look_at_control(self) -> None:
        with contextlib.suppress(SparseetyError):  # the engine says it
            if self._control.changed():
                now = self._control.now
                with self._switching:
                    self._wanted = now.on and bool(now.capture & self._settings.kinds)
                    if self._wanted and not self._closing.is_set():
                        self._wrap("execute_model")

    def _switch(self) -> None:
        """Between two steps, in the worker's own thread: begin to count, or give vLLM its own methods back."""
        counting = self._counting
        if counting is None:
            return
        with self._switching:
            self._counts = self._wanted
            if not self._counts:
                for name in ("load_model", "compile_or_warm_up_model", "execute_model"):
                    self._unwrap(name)
        if self._counts:
            self._batches = adapters.BatchReader(self._worker.vllm_config)
            self._open_log()
            counting.resume()
            log.info("sparseety: sparsity is counted again")
            return
        requests, writer = counting.pause(), self._writer
        if writer is not None:
            if requests:
                reason = "counting was switched off by the operator"
                self._put(Gap(ts=self._clock(), reason=reason, count=requests))
            # Closing waits for the disk.
            threading.Thread(target=writer.close, name="sparseety-log-closing").start()
        log.info("sparseety: sparsity is not counted any more; the workers have vLLM's own methods back")

    def close(self) -> None:
        if self._writer is None or self._pid != os.getpid():
            return
        self._closing.set()
        counting, self._counting = self._counting, None
        if counting is not None and self._counts:
            counting.close()
        self._counts = False
        self._writer.close()
        self._ended.set()
        self._publish()
        with self._publishing:
            metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()


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
