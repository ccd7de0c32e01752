"""Counting one model's sparsity, whatever runs it: where, by which hooks, over which steps, into which records."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from sampler_hook import counters, sites
from sampler_hook.choices import Tap
from sampler_hook.counters import Counters
from sampler_hook.ledger import Ledger, Rows, Slot
from sampler_hook.sparsity_settings import EXPERTS, KINDS, SPARSITY
from sparseety.clock import Clock
from sparseety.errors import SparseetyError
from sparseety.records import AnyRecord, Gap, ParameterZeros, SparsityStart, Weights

log = logging.getLogger("vllm.sparseety")

Put = Callable[[AnyRecord], object]

_numbers = itertools.count()
_AT_ONCE = 1 << 24  # elements of a weight that are looked at at once: it takes a byte each


class Counting:
    """The counters on one loaded model. `start` lacks the sites and routers: those are found here."""

    def __init__(
        self,
        model: Any,
        start: SparsityStart,
        *,
        put: Put,
        clock: Clock,
        rows: int,
        device: Any,
        config: Any = None,
        kinds: Collection[str] = KINDS,
        mixed: str | None = None,
        captured: bool = False,
        compiled: bool = False,
    ) -> None:
        """mixed, captured: as sites.find has them. compiled: graphs are made of the model with the hooks in them; their
        code finds its buffers by way of the hooks, and fails the request where those are gone: so they stay."""
        self._put, self._clock, self._device = put, clock, device
        self._batch, self._compiled = mixed is None, compiled
        rank = start.tensor_parallel_rank
        self.found = sites.find(model, config=config, rank=rank, mixed=mixed, captured=captured)
        if SPARSITY not in kinds:
            self.found.sites.clear()
        if EXPERTS not in kinds:
            self.found.routers.clear()
        self._wanted = {SPARSITY, EXPERTS} & set(kinds)
        self._paused = False  # by the operator: then no hook is expected to be there
        self._number = next(_numbers)
        self.start = replace(
            start,
            sites=[site for site, _ in self.found.sites],
            routers=[router for router, _ in self.found.routers],
            not_observed=self.found.not_observed,
        )
        self._counters = Counters(self.start.sites, self.start.routers, rows, device, clock, start.per_token)
        self._ledger = Ledger()
        self._handles: list[Any] = []
        self._taps: list[Tap] = []
        self._silent_reported = False

    def attach(self) -> None:
        """Put the hooks on, and write what is counted. Again, after they were taken off."""
        counters.live[self._number] = self.start.threshold
        if not (self._handles or self._taps):
            self._register()
        self.tap()
        self._put(self.start)
        if not (self._handles or self._taps) and self._wanted and not self.start.tensor_parallel_rank:
            reasons = "; ".join(dict.fromkeys(self.found.not_observed.values()))
            raise SparseetyError(f"nothing of this model can be counted: {reasons}")

    def _register(self) -> None:
        operators = counters.operators()
        site_buffers, router_buffers = self._counters.buffers
        for (_, module), buffer in zip(self.found.sites, site_buffers, strict=True):
            hook = _before_projection(operators.count_activations, self._number, buffer)
            self._handles.append(module.register_forward_pre_hook(hook))
        for (router, module), buffer in zip(self.found.routers, router_buffers, strict=True):
            if router.by_callback:
                note = _choices(operators.note_choices, self._number, buffer)
                self._taps.append(Tap(module, note, batch=self._batch))
            else:
                hook = _after_router(operators.note_experts, self._number, buffer)
                self._handles.append(module.register_forward_hook(hook))

    def tap(self) -> None:
        """Put our callbacks on the routers, above those that vLLM has put there meanwhile."""
        for tap in self._taps:
            tap.put_on()

    def detach(self) -> None:
        """Take the hooks off, or have those in graphs count for no one from here on."""
        counters.live.pop(self._number, None)
        if self._compiled:
            return
        for handle in self._handles:
            handle.remove()
        for tap in self._taps:
            tap.take_off()
        self._handles, self._taps = [], []

    def pause(self) -> int:
        """Write what there is, and take the hooks off. Returns how many requests were under way."""
        requests = self._ledger.requests
        self._paused = True
        self.close()
        self.detach()
        return requests

    def resume(self) -> None:
        """Put them on again."""
        self._paused = False
        self.start = replace(self.start, ts=self._clock())
        self.attach()

    def set_threshold(self, threshold: float) -> None:
        """Count near zeros by another threshold from the next step on. What was counted so far is written down first,
        and the new `sparsity_start` says what the numbers behind it are of. Not on a GPU, where a captured CUDA graph
        would go on with the number that it has in it."""
        if threshold == self.start.threshold or self._device.type != "cpu":
            return
        self._counters.take(self._ledger.due(at_least=1))
        self._write(wait=True)
        self.start = replace(self.start, ts=self._clock(), threshold=threshold)
        counters.live[self._number] = threshold
        self._put(self.start)

    def before_step(self, rows: int) -> None:
        self._counters.before_step(rows)

    def computed(self, rows: Iterable[Rows], step: int | None, kept: list[int] | None = None) -> None:
        """A step has been started on the device. `rows`: in batch order. `kept`: which of the batch they are, if not
        the first ones."""
        if fault := counters.take_fault():
            raise fault
        segments = self._ledger.segments(rows)
        if self.start.per_token:
            slots = [Slot(-1, segment.engine_id, segment.phase) for segment in segments]
            for slot, segment in zip(slots, segments, strict=True):
                slot.add(segment, step)
            self._counters.take_tokens(slots, kept)
        else:
            self._counters.add(self._ledger.place(segments, step), self._ledger.capacity, kept)
            self._counters.take(self._ledger.due())
        self._write()

    def finished(self, engine_ids: Iterable[str] | None = None) -> None:
        """Requests have ended (None: all of them)."""
        self._counters.take(self._ledger.finished(engine_ids))
        self._write()

    def close(self) -> None:
        self.finished()
        self._write(wait=True)

    def _write(self, *, wait: bool = False) -> None:
        any_written = False
        for record in self._counters.ready(wait=wait):
            self._put(record)
            any_written = True
        if any_written and not self._silent_reported:
            self._silent_reported = True
            self._report_silent()

    def _report_silent(self) -> None:
        """Modules that were to be counted and have not run by the time of the first records: said, and never a 0."""
        silent = list(self.silent())
        if not silent:
            return
        if len(silent) == len(self.start.sites) + len(self.start.routers):
            what = "nothing: no counter ran (a compiled graph from a cache, made without them?)"
        else:
            what = f"not at {', '.join(silent)}: these modules are not called"
        log.error("sparseety: sparsity was asked for and is observed %s", what)
        self._put(Gap(ts=self._clock(), reason=f"sparsity observed {what}", count=len(silent)))

    def hooks(self) -> dict[str, dict[str, int]]:
        """How many modules are to be counted, have our hook, and were seen written: by kind, where it is asked for."""
        on = self._number in counters.live
        plain = sum(not router.by_callback for router in self.start.routers)
        sites, routers = len(self.start.sites), len(self.start.routers)
        tapped = sum(tap.on for tap in self._taps)
        states = {
            SPARSITY: ("ffn_act", sites, sites, len(self._counters.written_sites)),
            EXPERTS: ("router", routers, plain + tapped, len(self._counters.written_routers)),
        }
        return {
            site: {"expected": 0 if self._paused else expected, "attached": attached if on else 0, "fired": fired}
            for kind, (site, expected, attached, fired) in states.items()
            if kind in self._wanted
        }

    def silent(self) -> Iterator[str]:
        """Names of sites and routers that have not been seen written."""
        for number, site in enumerate(self.start.sites):
            if number not in self._counters.written_sites:
                yield site.name
        for number, router in enumerate(self.start.routers):
            if number not in self._counters.written_routers:
                yield router.name


# ----------------------------------------------------------------------------------------------------- the hooks
# torch.compile traces through these: nothing but what it can trace, and no exception that it would have to catch.


def _before_projection(count: Any, number: int, buffer: Any) -> Callable[..., None]:
    import torch

    def hook(module: Any, args: Any) -> None:
        values = first_tensor(args, torch.Tensor)
        if values is not None and values.is_floating_point():
            count(values, number, buffer)

    return hook


def _after_router(note: Any, number: int, buffer: Any) -> Callable[..., None]:
    import torch

    def hook(module: Any, args: Any, output: Any) -> None:
        logits = first_tensor(output, torch.Tensor)
        if logits is not None and logits.is_floating_point():
            note(logits, number, buffer)

    return hook


def _choices(note: Any, number: int, buffer: Any) -> Callable[[Any], None]:
    def noted(experts: Any) -> None:
        note(experts, number, buffer)

    return noted


def first_tensor(value: Any, tensor: type) -> Any:
    """A module's value, or the first of a tuple of them; None where it is neither (fused modules return None)."""
    if isinstance(value, tuple | list) and len(value) > 0:
        value = value[0]
    return value if isinstance(value, tensor) else None


# --------------------------------------------------------------------------------------------------- the weights


def weights(model: Any, ts: float) -> Weights:
    """The zeros of all weights of two dimensions or more. Waits for the device."""
    import torch

    counted, not_read = [], []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            if not parameter.is_floating_point() or parameter.element_size() < 2 or not parameter.numel():
                not_read.append(name)
                continue
            flat = parameter.detach().reshape(-1)
            present = sum(int(part.bool().sum()) for part in flat.split(_AT_ONCE))
            counted.append(ParameterZeros(name=name, zeros=flat.numel() - present, elements=flat.numel()))
    return Weights(ts=ts, parameters=counted, not_read=not_read)
