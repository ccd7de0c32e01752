"""Turn what an engine did into records. No vLLM, no clock of its own, no file: the demo backend uses it too."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sparseety.clock import Clock
from sparseety.records import AnyRecord, Gap, Phase, RequestAdded, RequestFinished, Role, Row, Step

PROMPT_TAIL = 16  # ids: enough to prime a detokenizer, too few to be a copy of the prompt
ATTEMPTS = 16384  # external ids whose coming again is noticed
REMEMBERED = 4096  # ended requests whose late rows can still be named: steps in flight when they ended, a few at most

Put = Callable[[AnyRecord], object]


@dataclass(slots=True)
class Sampled:
    """What one engine step did for one request. Fields as in records.Row."""

    engine_id: str
    ids: list[int]
    start: int | None = None
    phase: Phase = "decode"
    drafts: int = 0
    accepted: int = 0
    discarded: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Entry:
    """A request in the log."""

    request: int
    prompt_len: int
    total_ids: int = 0

    def row(self, ids: list[int], *, start: int | None = None, **fields: Any) -> Row:
        """What a step did for it. start: left out where it can be told, as in most rows; fields: as in records.Row."""
        first, self.total_ids = self.total_ids, self.total_ids + len(ids)
        if start == self.prompt_len + first - 1:
            start = None
        return Row(request=self.request, first_index=first, ids=ids, start=start, **fields)


class EngineRecorder:
    """Numbers requests, steps and token positions, so that the records of one log fit together."""

    def __init__(self, put: Put, clock: Clock) -> None:
        self._put, self._clock = put, clock
        self._open: dict[str, Entry] = {}  # by the engine's own name for the request
        self._ended: dict[str, Entry] = {}  # the latest of them, oldest first
        self._attempts: dict[tuple[str, int], int] = {}  # by external id and child, the latest last
        self._requests = 0
        self._unplaced = 0  # accepted rows of requests that are not known, in this step
        self.steps = 0  # so far

    def added(
        self,
        engine_id: str,
        *,
        external_id: str,
        prompt_len: int,
        prompt_tail: list[int],
        prompt_head: list[int] | None = None,
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
        role: Role | None = None,
        lora: str | None = None,
        ts: float | None = None,
    ) -> Entry:
        """A request has entered the scheduler. `prompt_tail` may be longer than what is kept of it."""
        self._requests += 1
        self._ended.pop(engine_id, None)
        entry = self._open[engine_id] = Entry(self._requests, prompt_len)
        self._put(
            RequestAdded(
                ts=self._clock() if ts is None else ts,
                request=self._requests,
                external_id=external_id,
                engine_id=engine_id,
                prompt_len=prompt_len,
                child=child,
                prompt_head=prompt_head or [],
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
                attempt=self._attempt(external_id, child),
                role=role,
                lora=lora,
            )
        )
        return entry

    def _attempt(self, external_id: str, child: int) -> int:
        count = self._attempts.pop((external_id, child), 0) + 1
        self._attempts[external_id, child] = count
        if len(self._attempts) > ATTEMPTS:
            del self._attempts[next(iter(self._attempts))]
        return count

    def step(self, sampled: Iterable[Sampled]) -> int:
        """One engine step; returns its number."""
        rows = (
            self.late(each.engine_id, each.ids, each.discarded)
            if (entry := self._open.get(each.engine_id)) is None
            else entry.row(
                each.ids,
                start=each.start,
                phase=each.phase,
                drafts=each.drafts,
                accepted=each.accepted,
                discarded=each.discarded,
            )
            for each in sampled
            if each.ids or each.discarded
        )
        return self.write_step([row for row in rows if row is not None])

    def late(self, engine_id: str, ids: list[int], discarded: list[int]) -> Row | None:
        """A row of a request that is not open.

        It has ended: a step was on its way when the abort came. Or it was never added: then accepted ids cannot be
        placed, and a gap says so.
        """
        if (entry := self._ended.get(engine_id)) is not None:
            return entry.row(ids, discarded=discarded)
        self._unplaced += bool(ids)
        return None

    def write_step(
        self, rows: list[Row], *, number: int | None = None, ts: float | None = None, weight_version: str | None = None
    ) -> int:
        """The rows of a step are made; returns its number, which is the next one unless it is given."""
        number = self.steps if number is None else number
        self.steps = number + 1
        ts = self._clock() if ts is None else ts
        if rows:
            self._put(Step(ts=ts, step=number, weight_version=weight_version, rows=rows))
        if self._unplaced:
            self._put(Gap(ts=ts, reason="ids of a request that was never added", count=self._unplaced))
            self._unplaced = 0
        return number

    def finished(
        self,
        engine_id: str,
        *,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
        ts: float | None = None,
        **accounts: Any,
    ) -> None:
        """A request has left the scheduler. Said twice, or of a request that is not open, it does nothing.

        accounts: more fields of records.RequestFinished.
        """
        request = self._open.pop(engine_id, None)
        if request is None:
            return
        self._ended[engine_id] = request
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._put(
            RequestFinished(
                ts=self._clock() if ts is None else ts,
                request=request.request,
                total_ids=request.total_ids,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                **accounts,
            )
        )

    def all_open(self) -> list[int]:
        """The numbers of the requests that are open."""
        return [request.request for request in self._open.values()]

    def numbers(self, engine_ids: Iterable[str]) -> list[int]:
        """The request numbers of those among `engine_ids` that are open."""
        return [self._open[engine_id].request for engine_id in engine_ids if engine_id in self._open]
