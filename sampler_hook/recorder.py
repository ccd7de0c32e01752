"""Turn what an engine did into records. No vLLM, no clock of its own, no file: the demo backend uses it too."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sparseety.clock import Clock
from sparseety.records import AnyRecord, Gap, RequestAdded, RequestFinished, Row, Step

PROMPT_TAIL = 16  # ids: enough to prime a detokenizer, too few to be a copy of the prompt
REMEMBERED = 4096  # ended requests whose late rows can still be named: steps in flight when they ended, a few at most

Put = Callable[[AnyRecord], object]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one engine step did for one request. Fields as in records.Row."""

    engine_id: str
    ids: list[int]
    start: int | None = None
    drafts: int = 0
    accepted: int = 0
    discarded: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    request: int
    total_ids: int = 0


class EngineRecorder:
    """Numbers requests, steps and token positions, so that the records of one log fit together."""

    def __init__(self, put: Put, clock: Clock) -> None:
        self._put, self._clock = put, clock
        self._open: dict[str, _Open] = {}  # by the engine's own name for the request
        self._ended: dict[str, _Open] = {}  # the latest of them, oldest first
        self._requests = 0
        self._steps = 0

    def added(
        self,
        engine_id: str,
        *,
        external_id: str,
        prompt_len: int,
        prompt_tail: list[int],
        child: int = 0,
        stop: list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        eos_ids: list[int] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        detokenize: bool = True,
        max_tokens: int | None = None,
        min_tokens: int = 0,
    ) -> None:
        """A request has entered the scheduler. `prompt_tail` may be longer than what is kept of it."""
        self._requests += 1
        self._ended.pop(engine_id, None)
        self._open[engine_id] = _Open(self._requests)
        self._put(
            RequestAdded(
                ts=self._clock(),
                request=self._requests,
                external_id=external_id,
                engine_id=engine_id,
                prompt_len=prompt_len,
                child=child,
                prompt_tail=prompt_tail[-PROMPT_TAIL:],
                stop=stop or [],
                stop_token_ids=stop_token_ids or [],
                eos_ids=eos_ids or [],
                include_stop_str_in_output=include_stop_str_in_output,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                detokenize=detokenize,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
            )
        )

    def step(self, sampled: Iterable[Sampled]) -> int:
        """One engine step; returns its number.

        A request that has ended can still have a row: a step was on its way when the abort came. It is written, with
        what was sampled as `discarded`. Accepted ids of a request that was never added cannot be placed: a gap says so.
        """
        rows = []
        unplaced = 0
        for row in sampled:
            request = self._open.get(row.engine_id) or self._ended.get(row.engine_id)
            if request is None:
                unplaced += bool(row.ids)
                continue
            if not (row.ids or row.discarded):
                continue
            rows.append(
                Row(
                    request=request.request,
                    first_index=request.total_ids,
                    ids=row.ids,
                    start=row.start,
                    drafts=row.drafts,
                    accepted=row.accepted,
                    discarded=row.discarded,
                )
            )
            request.total_ids += len(row.ids)
        number = self._steps
        self._steps += 1
        if rows:
            self._put(Step(ts=self._clock(), step=number, rows=rows))
        if unplaced:
            self._put(Gap(ts=self._clock(), reason="ids of a request that was never added", count=unplaced))
        return number

    def finished(
        self,
        engine_id: str,
        *,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
        cached_tokens: int | None = None,
        preemptions: int = 0,
    ) -> None:
        """A request has left the scheduler. Said twice, or of a request that is not open, it does nothing."""
        request = self._open.pop(engine_id, None)
        if request is None:
            return
        self._ended[engine_id] = request
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._put(
            RequestFinished(
                ts=self._clock(),
                request=request.request,
                total_ids=request.total_ids,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                cached_tokens=cached_tokens,
                preemptions=preemptions,
            )
        )

    def numbers(self, engine_ids: Iterable[str]) -> list[int]:
        """The request numbers of those among `engine_ids` that are open."""
        return [self._open[engine_id].request for engine_id in engine_ids if engine_id in self._open]
