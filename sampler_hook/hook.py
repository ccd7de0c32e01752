"""The switch: wraps vLLM's methods, opens the log in the process that has a scheduler, and gets out at the first fault.

A wrapper always calls vLLM's own method, with the arguments it got. What we do besides happens in `_safely`: anything
it raises takes the wrappers off again, is logged once and stands as a gap in the log; generation goes on.
"""

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any

from sampler_hook import adapters, identity
from sampler_hook.engine import EXTERNAL_ID, EngineCapture
from sampler_hook.settings import HookSettings
from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError
from sparseety.logwriter import LogWriter
from sparseety.records import Gap, Scope

# vLLM gives handlers to the "vllm" logger alone; only below that name do our lines appear where its own do.
log = logging.getLogger("vllm.sparseety")

_CAPTURE = "_sparseety_capture"  # on a Scheduler: its EngineCapture, None once its log is closed
_LOG = "_sparseety_log"
_OURS = "__sparseety__"  # on a wrapper

# vLLM's default is to kill its engine at once after asking it to end; what is not written by then is lost.
_FLUSH_SECONDS = 0.01

Method = Callable[..., Any]


def install(settings: HookSettings) -> None:
    """Wrap the methods of this process's vLLM. Raises SparseetyError; then nothing is wrapped."""
    vllm = adapters.probe(untested=settings.untested)
    if any(hasattr(getattr(target.owner, target.name), _OURS) for target in vllm.targets):
        return  # by another copy of this module
    Hook(settings.folder, vllm).attach()


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    writer: LogWriter
    pid: int  # whose it is: a fork's copy must not write a second ending into the file

    def close(self) -> None:
        if self.pid == os.getpid():
            self.writer.close()


class Hook:
    """The wrappers of one process, and the logs of its schedulers (one, as a rule)."""

    def __init__(self, folder: Path, vllm: adapters.Vllm) -> None:
        self._folder, self._vllm = folder, vllm
        self._clock = monotonic_clock()
        self._put_on: list[tuple[adapters.Target, Any, Any]] = []  # target, vLLM's own attribute, ours
        self._logs: list[_Log] = []  # open ones
        self._ending_registered = False
        self._off = False
        self._switching = threading.Lock()

    # ------------------------------------------------------------------------------------- putting on, taking off

    def attach(self) -> None:
        wrap: dict[str, Callable[[Method], Method]] = {
            "__init__": self._wrap_init,
            "add_request": self._wrap_add_request,
            "update_from_output": self._wrap_update_from_output,
            "finish_requests": self._wrap_finish_requests,
            "shutdown": self._wrap_shutdown,
            "from_engine_core_request": self._wrap_from_engine_core_request,
        }
        for target in self._vllm.targets:
            self._put(target, wrap[target.name])

    def _put(self, target: adapters.Target, wrap: Callable[[Method], Method]) -> None:
        own = vars(target.owner)[target.name]
        is_class_method = isinstance(own, classmethod)
        wrapper: Any = wrap(own.__func__ if is_class_method else own)
        setattr(wrapper, _OURS, True)
        ours = classmethod(wrapper) if is_class_method else wrapper
        setattr(target.owner, target.name, ours)
        self._put_on.append((target, own, ours))

    def detach(self) -> None:
        """Give vLLM its own methods back. One that someone else has wrapped since stays; ours under it does nothing."""
        self._off = True
        for target, own, ours in self._put_on:
            if vars(target.owner).get(target.name) is ours:
                setattr(target.owner, target.name, own)
        self._put_on = []

    def _safely(self, action: Callable[..., object], *args: Any) -> None:
        if self._off:
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 -- whatever we did wrong, the request being served must not notice
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        with self._switching:
            if self._off:
                return
            self.detach()
        log.error("sparseety: capture failed and switched itself off; vLLM serves on, uncaptured", exc_info=error)
        logs, self._logs = self._logs, []
        reason = f"capture switched itself off: {type(error).__name__}"
        for each in logs:
            each.writer.put(Gap(ts=self._clock(), reason=reason, count=1))
        # Closed, the log says that nothing after this was going to be recorded. Closing waits for the disk: not here.
        threading.Thread(target=_close, args=(logs,), name="sparseety-log-closing").start()

    def _capture(self, scheduler: Any) -> EngineCapture | None:
        return None if self._off else getattr(scheduler, _CAPTURE, None)

    # --------------------------------------------------------------------------------------------------- the logs

    def _open_log(self, scheduler: Any) -> None:
        if getattr(scheduler, _CAPTURE, None) is not None:  # its class calls __init__ twice
            return
        config = scheduler.vllm_config
        try:
            writer = LogWriter(self._folder, "engine", Scope(), clock=self._clock, flush_seconds=_FLUSH_SECONDS)
        except SparseetyError as error:
            self.detach()
            log.error("sparseety: %s; vLLM serves, nothing is captured", error)
            return
        opened = _Log(writer, os.getpid())
        self._logs.append(opened)
        self._register_ending()
        attached = [str(target) for target, _, _ in self._put_on]
        writer.put(identity.engine_start(config, version=self._vllm.version, attached=attached, clock=self._clock))
        capture = EngineCapture(
            writer.put,
            self._clock,
            generation_eos=identity.generation_eos(config.model_config),
            starts_exact=adapters.starts_are_exact(config),
        )
        setattr(scheduler, _LOG, opened)
        setattr(scheduler, _CAPTURE, capture)
        log.info("sparseety: capturing sampled tokens, which are content, into %s", writer.path)

    def _register_ending(self) -> None:
        """See that the log is closed when this process ends: shut down in order, or as a program that just ends."""
        if not self._ending_registered:
            self._ending_registered = True
            if target := adapters.engine_core_shutdown():
                self._put(target, self._wrap_engine_core_shutdown)
            atexit.register(self.close)
            multiprocessing_util.Finalize(None, self.close, exitpriority=0)  # its children end without atexit

    def _close_log(self, scheduler: Any) -> None:
        ending = getattr(scheduler, _LOG, None)
        if ending in self._logs:
            self._logs.remove(ending)
            setattr(scheduler, _CAPTURE, None)
            ending.close()

    def close(self) -> None:
        logs, self._logs = self._logs, []
        _close(logs)

    # ----------------------------------------------------------------------------------------------- the wrappers

    def _wrap_init(self, own: Method) -> Method:
        @functools.wraps(own)
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            own(scheduler, *args, **kwargs)
            self._safely(self._open_log, scheduler)

        return __init__

    def _wrap_from_engine_core_request(self, own: Method) -> Method:
        @functools.wraps(own)
        def from_engine_core_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
            request = own(cls, *args, **kwargs)
            self._safely(_keep_external_id, request, args, kwargs)
            return request

        return from_engine_core_request

    def _wrap_add_request(self, own: Method) -> Method:
        @functools.wraps(own)
        def add_request(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(scheduler, *args, **kwargs)
            if capture := self._capture(scheduler):
                self._safely(lambda: capture.added(_argument(args, kwargs, 0, "request")))
            return result

        return add_request

    def _wrap_update_from_output(self, own: Method) -> Method:
        @functools.wraps(own)
        def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            capture = self._capture(scheduler)
            if capture is None:
                return own(scheduler, *args, **kwargs)
            self._safely(
                lambda: capture.before_step(
                    _argument(args, kwargs, 0, "scheduler_output"), _argument(args, kwargs, 1, "model_runner_output")
                )
            )
            try:
                outputs = own(scheduler, *args, **kwargs)
            except BaseException as error:
                self._safely(capture.step_failed, error)
                raise
            self._safely(capture.after_step, outputs)
            return outputs

        return update_from_output

    def _wrap_finish_requests(self, own: Method) -> Method:
        @functools.wraps(own)
        def finish_requests(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(scheduler, *args, **kwargs)
            if capture := self._capture(scheduler):
                self._safely(capture.finished_outside)
            return result

        return finish_requests

    def _wrap_shutdown(self, own: Method) -> Method:
        @functools.wraps(own)
        def shutdown(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self._safely(self._close_log, scheduler)  # first: nothing is sampled from here on, and vLLM's own may hang
            return own(scheduler, *args, **kwargs)

        return shutdown

    def _wrap_engine_core_shutdown(self, own: Method) -> Method:
        @functools.wraps(own)
        def shutdown(engine_core: Any, *args: Any, **kwargs: Any) -> Any:
            self._safely(lambda: self._close_log(engine_core.scheduler))
            return own(engine_core, *args, **kwargs)

        return shutdown


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs[name]


def _keep_external_id(request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    external_id = getattr(_argument(args, kwargs, 0, "request"), "external_req_id", None)
    if external_id is not None:
        setattr(request, EXTERNAL_ID, external_id)


def _close(logs: list[_Log]) -> None:
    for each in logs:
        each.close()
