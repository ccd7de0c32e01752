"""vLLM's own callback for the experts that a router has chosen, which its --enable-return-routed-experts stands on.

Exact for every kind of router: grouped, bias-corrected and hashed ones, too. Where vLLM has put a callback of its own
there, that is called first, and what it has captured is read: it knows which rows are this engine's.
"""

from collections.abc import Callable
from typing import Any

Callback = Callable[[Any], object]

_OURS = "__sparseety__"


def place(experts: Any) -> Any:
    """What holds the callback of these experts. None: nothing does, or a kernel that both routes and computes would
    never call it."""
    if getattr(getattr(experts, "_quant_method", None), "is_monolithic", False):
        # Such a kernel tells its choices only where vLLM captures them.
        return getattr(getattr(experts, "routed_experts", None), "routing_sink", None)
    router = getattr(experts, "router", None)
    return router if hasattr(router, "capture_fn") else None


def captured_by_vllm(callback: Any) -> Any:
    """[rows, k]: where vLLM's own callback keeps this layer's choices of the step. None: it is another's."""
    if keywords := getattr(callback, "__defaults__", None):  # a function with its layer and capturer as defaults
        layer, capturer = (*keywords, None, None)[:2]
    else:  # a partial of the capturer's method with its layer
        layer, capturer = (*getattr(callback, "args", ()), None)[0], getattr(callback, "func", None)
        capturer = getattr(capturer, "__self__", None)
    buffer = getattr(capturer, "device_buffer", None)
    return None if buffer is None or not isinstance(layer, int) else buffer[:, layer]


class Tap:
    """One router's callback, ours."""

    def __init__(self, experts: Any, note: Callable[[Any], object], *, batch: bool) -> None:
        """note: takes choices, a row for each token. batch: rows are the batch's; if not, vLLM's own are read alone."""
        self._experts, self._note, self._batch = experts, note, batch
        self._place: Any = None
        self._own: Any = None

    def put_on(self) -> None:
        """Have the choices noted from here on. Again, after vLLM may have put on its own."""
        place_now = place(self._experts)
        own = getattr(place_now, "capture_fn", None)
        if place_now is None or hasattr(own, _OURS):
            return
        kept = None if own is None else captured_by_vllm(own)
        if kept is None and not self._batch:
            return
        self._place, self._own = place_now, own
        place_now.capture_fn = _callback(own, kept, self._note)

    @property
    def on(self) -> bool:
        return self._place is not None

    def take_off(self) -> None:
        if self._place is not None and hasattr(self._place.capture_fn, _OURS):
            self._place.capture_fn = self._own
        self._place = self._own = None


def _callback(own: Callback | None, kept: Any, note: Callable[[Any], object]) -> Callback:
    # torch.compile traces through these on a CPU: nothing but what it can trace.
    if own is None:

        def capture(experts: Any) -> None:
            note(experts)

    elif kept is None:

        def capture(experts: Any) -> None:
            own(experts)
            note(experts)

    else:

        def capture(experts: Any) -> None:
            own(experts)
            note(kept)

    setattr(capture, _OURS, True)
    return capture
