"""What one scheduler does, told to a recorder: the tokens it accepted and the ones it threw away.

It only reads vLLM's objects, and only in the engine's own thread. Whoever calls it catches what it raises.
"""

from dataclasses import dataclass, field
from typing import Any

from sampler_hook import adapters
from sampler_hook.recorder import EngineRecorder, Put, Sampled
from sparseety.clock import Clock
from sparseety.records import Gap

EXTERNAL_ID = "_sparseety_external_id"  # put on vLLM's Request, which does not carry it itself


@dataclass(slots=True)
class _Open:
    request: Any  # vLLM's Request, which knows how it ended when it has
    cached_tokens: int | None = None


@dataclass(slots=True)
class _Step:
    """A step whose result the scheduler is looking at."""

    scheduler_output: Any
    sampled: dict[str, list[int]]  # rows with ids, by engine id, in the order scheduled
    finished_within: bool = False
    ids: dict[str, list[int]] = field(default_factory=dict)  # of these, accepted


class EngineCapture:
    """Follows one scheduler."""

    def __init__(
        self, put: Put, clock: Clock, *, generation_eos: frozenset[int] = frozenset(), starts_exact: bool = True
    ) -> None:
        self._put, self._clock = put, clock
        self._generation_eos, self._starts_exact = generation_eos, starts_exact
        self._recorder = EngineRecorder(put, clock)
        self._open: dict[str, _Open] = {}
        self._step: _Step | None = None

    def added(self, request: Any) -> None:
        """The scheduler has taken a request."""
        engine_id, params = request.request_id, request.sampling_params
        if params is None or engine_id in self._open:  # pooling has no text; a session's next turn is no new request
            return
        external_id, child = adapters.identity(engine_id, getattr(request, EXTERNAL_ID, None))
        stop_token_ids = list(params.stop_token_ids or [])
        eos_ids: list[int] = []
        if not params.ignore_eos:
            if (eos := adapters.eos_id(request)) is not None:
                eos_ids.append(eos)
            eos_ids += [id_ for id_ in stop_token_ids if id_ in self._generation_eos and id_ not in eos_ids]
        self._recorder.added(
            engine_id,
            external_id=external_id,
            prompt_len=request.num_prompt_tokens,
            prompt_tail=adapters.plain_ids((request.prompt_token_ids or [])[-16:]),
            child=child,
            stop=[params.stop] if isinstance(params.stop, str) else list(params.stop or []),
            stop_token_ids=[id_ for id_ in stop_token_ids if id_ not in eos_ids],
            eos_ids=eos_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            detokenize=params.detokenize,
            max_tokens=request.max_tokens,
            min_tokens=params.min_tokens,
        )
        self._open[engine_id] = _Open(request)

    def before_step(self, scheduler_output: Any, model_output: Any) -> None:
        """The scheduler is about to take a step's result. It trims the rows of it in place, so they are copied."""
        sampled: dict[str, list[int]] = {}
        rows = model_output.sampled_token_ids
        if rows is not None and len(rows):
            index = model_output.req_id_to_index
            for engine_id in scheduler_output.num_scheduled_tokens:
                row = index.get(engine_id)
                if row is not None and len(rows[row]):
                    sampled[engine_id] = adapters.plain_ids(rows[row])
        self._step = _Step(scheduler_output, sampled)

    def after_step(self, outputs: Any) -> None:
        """It has taken it. `outputs`: what it hands to the front ends, by client; that alone says what was accepted."""
        step, self._step = self._step, None
        if step is None:
            return
        ended = []
        for group in (outputs or {}).values():
            for output in group.outputs:
                engine_id = output.request_id
                if len(output.new_token_ids):
                    step.ids.setdefault(engine_id, []).extend(adapters.plain_ids(output.new_token_ids))
                open_ = self._open.get(engine_id)
                if open_ is None:
                    continue
                if open_.cached_tokens is None:
                    open_.cached_tokens = adapters.cached_tokens(output)
                if output.finish_reason is not None:
                    ended.append(engine_id)
        self._recorder.step(self._rows(step))
        for engine_id in list(self._open) if step.finished_within else ended:
            self._ended(engine_id)

    def _rows(self, step: _Step) -> list[Sampled]:
        output = step.scheduler_output
        starts = adapters.starts(output) if self._starts_exact and step.sampled else {}
        drafts = output.scheduled_spec_decode_tokens
        invalid = getattr(output, "num_invalid_spec_tokens", None) or {}  # drafts that a grammar ruled out beforehand
        rows = []
        for engine_id, sampled in step.sampled.items():
            ids = step.ids.pop(engine_id, [])
            proposed = len(drafts.get(engine_id, ()))
            rows.append(
                Sampled(
                    engine_id,
                    ids,
                    start=starts.get(engine_id),
                    drafts=proposed - invalid.get(engine_id, 0),
                    # The step's last id is the model's own; those before it are drafts that it agreed with.
                    accepted=min(proposed, len(sampled) - 1),
                    discarded=sampled[len(ids) :] if sampled[: len(ids)] == ids else sampled,
                )
            )
        rows += [Sampled(engine_id, ids) for engine_id, ids in step.ids.items()]  # accepted, though not sampled here
        return rows

    def step_failed(self, error: BaseException) -> None:
        """vLLM itself failed in taking a step's result: what it accepted of it is not known."""
        step, self._step = self._step, None
        if step is not None and (requests := self._recorder.numbers(step.sampled)):
            reason = f"the scheduler failed on a step: {type(error).__name__}"
            self._put(Gap(ts=self._clock(), reason=reason, count=len(requests), requests=requests))

    def finished_outside(self) -> None:
        """Requests were ended otherwise than by a token: aborted, or failed."""
        if self._step is not None:  # within a step: its tokens come first
            self._step.finished_within = True
            return
        # What finish_requests returns has changed twice; that a request knows whether it has finished has not.
        for engine_id in list(self._open):
            self._ended(engine_id)

    def _ended(self, engine_id: str) -> None:
        open_ = self._open.get(engine_id)
        if open_ is None or not open_.request.is_finished():  # a session goes on after its turn's end
            return
        del self._open[engine_id]
        request = open_.request
        reason = request.get_finished_reason()
        self._recorder.finished(
            engine_id,
            finish_reason=None if reason is None else str(reason),
            stop_reason=request.stop_reason,
            cached_tokens=open_.cached_tokens,
            preemptions=request.num_preemptions,
        )
