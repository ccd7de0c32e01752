"""What is done around each of vLLM's methods. Sites that are not listed in adapters.POINTS are never asked for."""

from typing import Any

from sampler_hook.adapters import Target
from sampler_hook.engine import EXTERNAL_ID, EngineCapture
from sampler_hook.wrapping import Tap, argument

CAPTURE = "_sparseety_capture"  # on a Scheduler and its BlockPool: the EngineCapture, None once its log is closed

_WEIGHT_METHODS = ("weight", "load_model")  # in the name of a collective_rpc that changes the weights


def _capture(instance: Any) -> EngineCapture | None:
    return getattr(instance, CAPTURE, None)


def _core_capture(engine_core: Any) -> EngineCapture | None:
    # Not yet there while the core is being made: it resets caches then.
    return getattr(getattr(engine_core, "scheduler", None), CAPTURE, None)


def _keep_external_id(_: Any, request: Any, args: Any, kwargs: Any) -> None:
    external_id = getattr(argument(args, kwargs, 0, "request"), "external_req_id", None)
    if external_id is not None:
        setattr(request, EXTERNAL_ID, external_id)


def _sleep(capture: EngineCapture, args: Any, kwargs: Any) -> None:
    capture.event(kind="sleep", detail=f"level {argument(args, kwargs, 0, 'level', 1)}")


def _wake(capture: EngineCapture, _: Any, args: Any, kwargs: Any) -> None:
    tags = argument(args, kwargs, 0, "tags")
    capture.event(kind="wake", detail=", ".join(map(str, tags)) if tags else None)


def _collective(capture: EngineCapture, args: Any, kwargs: Any) -> None:
    method = argument(args, kwargs, 0, "method")
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if any(part in name for part in _WEIGHT_METHODS) and "checksum" not in name:
        capture.event(kind="weight_update", detail=name)


def _cache_reset(cache: str) -> Tap:
    def after(capture: EngineCapture, result: Any, args: Any, kwargs: Any) -> None:
        capture.event(kind="cache_reset", detail=cache, done=result if isinstance(result, bool) else None)

    return Tap(_core_capture, after=after)


def tap(target: Target) -> Tap | None:
    """None: hook.py has it, for it opens or closes a log."""
    return _TAPS.get(target.name)


_TAPS = {
    "from_engine_core_request": Tap(lambda cls: cls, after=_keep_external_id),
    "add_request": Tap(
        _capture, after=lambda capture, _, args, kwargs: capture.added(argument(args, kwargs, 0, "request"))
    ),
    "update_from_output": Tap(
        _capture,
        before=lambda capture, args, kwargs: capture.before_step(
            argument(args, kwargs, 0, "scheduler_output"), argument(args, kwargs, 1, "model_runner_output")
        ),
        after=lambda capture, outputs, args, kwargs: capture.after_step(outputs),
        failed=lambda capture, error: capture.step_failed(error),
    ),
    "finish_requests": Tap(
        _capture,
        after=lambda capture, _, args, kwargs: capture.finished_outside(argument(args, kwargs, 0, "request_ids")),
    ),
    "_preempt_request": Tap(
        _capture, before=lambda capture, args, kwargs: capture.preempted(argument(args, kwargs, 0, "request"))
    ),
    "schedule": Tap(_capture, after=lambda capture, output, args, kwargs: capture.scheduled(output)),
    "_maybe_evict_cached_block": Tap(
        _capture,
        after=lambda capture, evicted, args, kwargs: (
            capture.evicted(argument(args, kwargs, 0, "block")) if evicted else None
        ),
    ),
    "sleep": Tap(_core_capture, before=_sleep),
    "wake_up": Tap(_core_capture, after=_wake),
    "collective_rpc": Tap(_core_capture, before=_collective),
    "set_weight_version": Tap(
        _core_capture,
        after=lambda capture, _, args, kwargs: capture.weights(str(argument(args, kwargs, 0, "weight_version"))),
    ),
    "reset_prefix_cache": _cache_reset("prefix"),
    "reset_mm_cache": _cache_reset("multi-modal"),
    "reset_encoder_cache": _cache_reset("encoder"),
}
