"""What one scheduler does, noticed in the engine's own thread, where as little as can be is done.

It copies what vLLM is about to change and queues the rest for the scribe, which makes records of it in another thread.
Whoever calls either catches what it raises.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from sampler_hook import adapters
from sampler_hook.scribe import FOR_WORKERS, Scribe, TakenStep
from sparseety.clock import Clock
from sparseety.metrics import OVERHEAD_SECONDS, observe
from sparseety.records import EngineEvent

EXTERNAL_ID = "_sparseety_external_id"  # put on vLLM's Request, which does not carry it itself
PENDING_ROWS = 8192  # queued before the engine's thread has to help: its queue is bounded, whatever the CPU does


class EngineCapture:
    """Follows one scheduler."""

    def __init__(
        self,
        scribe: Scribe,
        put: Callable[[EngineEvent], object],
        clock: Clock,
        *,
        wants: Callable[[str], str] = lambda external_id: "captured",
        strangers: Iterable[str] = (),
    ) -> None:
        """put: takes a record when its turn has come; wants: whether an external id is captured, forced or skipped.

        strangers: requests under way when recording began, of which nothing is recorded.
        """
        self.scribe, self._put, self._clock, self._wants = scribe, put, clock, wants
        self.for_workers: dict[str, Any] = {}  # what they are told with each step, besides its number
        self.wake: Callable[[], object] = lambda: None  # called when the queue is no longer empty
        self._live: dict[str, Any] = {}  # vLLM's requests, by engine id
        self._new: set[str] = set()  # of these, without output yet
        self._passed: set[str] = set(strangers)  # of these, not recorded
        self._scheduled = 0  # steps planned, where the workers are told their numbers
        self._step: TakenStep | None = None
        self._evicted: list[int] = []
        self._took_ns = 0
        self._events: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._rows_in = self._rows_out = 0
        self._draining = threading.Lock()

    def added(self, request: Any) -> None:
        """The scheduler has taken a request."""
        engine_id = request.request_id
        if request.sampling_params is None or engine_id in self._live:  # no text; a session's next turn
            return
        self._live[engine_id] = request
        self._new.add(engine_id)
        external_id, child = adapters.identity(engine_id, getattr(request, EXTERNAL_ID, None))
        decision = self._wants(external_id)  # here, because the workers have to know it before the first step
        if decision == "skipped":
            self._passed.add(engine_id)
        self._queue(self.scribe.added, (request, external_id, child, decision, self._clock()))

    def scheduled(self, output: Any) -> None:
        """A step is planned: the workers are told its number, and whom to leave out."""
        skip = [engine_id for engine_id in output.num_scheduled_tokens if engine_id in self._passed]
        setattr(output, FOR_WORKERS, {"step": self._scheduled, "skip": skip} | self.for_workers)
        self._scheduled += 1

    def before_step(self, scheduler_output: Any, model_output: Any) -> None:
        """The scheduler is about to take a step's result. It trims the rows of it in place, so they are copied."""
        began = time.perf_counter_ns()
        rows = model_output.sampled_token_ids
        copied = (
            [row[:] if row.__class__ is list else adapters.plain_ids(row) for row in rows] if rows is not None else []
        )
        self._step = TakenStep(scheduler_output, model_output.req_id_to_index if copied else {}, copied)
        self._took_ns = time.perf_counter_ns() - began

    def after_step(self, outputs: Any) -> None:
        """It has taken it. `outputs`: what it hands to the front ends, by client; that alone says what was accepted."""
        step, self._step = self._step, None
        if step is None:
            return
        began = time.perf_counter_ns()
        step.ts = self._clock()
        for group in (outputs or {}).values():
            each = group.outputs
            # Copied: front ends in the same process may cut them.
            step.taken += [
                (out.request_id, ids[:] if (ids := out.new_token_ids).__class__ is list else adapters.plain_ids(ids))
                for out in each
            ]
            step.ended += [out.request_id for out in each if out.finish_reason is not None]
            if self._new:
                for out in each:
                    if out.request_id in self._new:
                        self._new.discard(out.request_id)
                        step.firsts.append((out.request_id, adapters.external_tokens(out)))
        if step.ended:
            step.ended = self._gone(step.ended)
        if self._evicted:
            step.evicted, self._evicted = self._evicted, []
        self._rows_in += len(step.taken)
        self._queue(self._record_step, (step,))
        took = self._took_ns + time.perf_counter_ns() - began
        observe(self.scribe.counts.overhead, OVERHEAD_SECONDS, took / 1e9)
        if self._rows_in - self._rows_out > PENDING_ROWS and self._draining.acquire(blocking=False):
            self._draining.release()
            self.drain(2)

    def step_failed(self, error: BaseException) -> None:
        """vLLM itself failed in taking a step's result: what it accepted of it is not known."""
        step, self._step = self._step, None
        if step is not None:
            lost = [engine_id for engine_id, row in step.index.items() if step.rows[row]]
            self._queue(self.scribe.failed, (lost, type(error).__name__, self._clock()))

    def finished_outside(self, request_ids: Any) -> None:
        """Requests were ended otherwise than by a token: aborted, or failed. Within a step its tokens come first."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        elif not isinstance(request_ids, list | tuple | set | frozenset):  # None: all. An iterator is used up by now
            request_ids = list(self._live)
        if self._step is not None:
            self._step.ended += request_ids
        elif gone := self._gone(request_ids):
            self._queue(self.scribe.ended, (gone, self._clock()))

    def _gone(self, engine_ids: Iterable[str]) -> list[str]:
        """Those of them that have ended for good, each once: a session goes on after its turn's end."""
        gone = []
        for engine_id in engine_ids:
            request = self._live.get(engine_id)
            if request is not None and request.is_finished():
                del self._live[engine_id]
                self._new.discard(engine_id)
                self._passed.discard(engine_id)
                gone.append(engine_id)
        return gone

    def preempted(self, request: Any) -> None:
        self._queue(self.scribe.preempted, (request.request_id, self._clock()))

    def evicted(self, block: Any) -> None:
        """The cached content of a block was given up. Said with the step that the scheduler is planning."""
        self._evicted.append(block.block_id)

    def event(self, **fields: Any) -> None:
        """Something happened to the engine as a whole: fields of records.EngineEvent."""
        self._queue(self._put, (EngineEvent(ts=self._clock(), **fields),))

    def weights(self, version: str) -> None:
        self.event(kind="weight_version", weight_version=version)
        self._queue(self.scribe.new_weights, (version,))

    def _queue(self, handler: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        first = not self._events
        self._events.append((handler, arguments))
        if first:
            self.wake()

    # ---------------------------------------------------------------------------------------------- beside it

    def drain(self, most: int = 1 << 30) -> bool:
        """Have records made of up to `most` of what is queued; whether there was any. From any thread."""
        for count in range(most):
            with self._draining:
                try:
                    handler, arguments = self._events.popleft()
                except IndexError:
                    return count > 0
                handler(*arguments)
        return True

    def _record_step(self, step: TakenStep) -> None:
        self._rows_out += len(step.taken)
        self.scribe.took(step)
