"""Count one request: what the client waited for, and what it got. Pure: times, bytes and parts in, counters up.

Fed with each part that the capture reads, so what is done for each of them is a few list entries and no more.
"""

from bisect import bisect_left
from typing import Literal

import msgspec

from proxy.catalogue import (
    CACHED_TOKENS,
    CHARACTERS,
    CHUNK_TOKENS,
    CHUNKS,
    COUNT_SOURCES,
    DURATION,
    FINISH_REASONS,
    FINISHED,
    FIRST_CHUNK,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    INTER_CHUNK,
    OTHER,
    OVERHEAD,
    PER_TOKEN,
    PROMPT_TOKENS,
    REQUEST_GENERATION,
    REQUEST_PROMPT,
    REQUESTS,
    RESPONSE_START,
    SAMPLED,
    SOURCE,
    UNCOUNTED,
)
from proxy.counters import Counters, ModelNames
from sparseety.chunks import Part, ReplyBody
from sparseety.metrics import Cell, Metric, observe
from sparseety.records import Endpoint, Outcome, RequestParameters, Usage

Decision = Literal["captured", "skipped", "paused", "failed"]

MOST_TOKENS = 1 << 40  # that a server can state of one request; else the sums would be its plaything
MOST_KEPT = 1 << 16  # code points of a reply, where its text is to be kept
TRIES = 3  # events that are searched for the model's name

# At hand, for they are asked for again and again.
_gap_bounds, _token_bounds = INTER_CHUNK.bounds, CHUNK_TOKENS.bounds
_duration_bounds, _overhead_bounds, _start_bounds = DURATION.bounds, OVERHEAD.bounds, RESPONSE_START.bounds
_length_bounds, _character_bounds = REQUEST_GENERATION.bounds, CHARACTERS.bounds

# What /v1/responses and /v1/messages say, in the words of chat.
_REASONS = {
    "completed": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "refusal": "content_filter",
    "cancelled": "abort",
    "failed": "error",
} | {reason: reason for reason in FINISH_REASONS}


class _Named(msgspec.Struct):
    model: str | None = None
    response: "_Named | None" = None  # /v1/responses, in its first event
    message: "_Named | str | None" = None  # /v1/messages, in its first event


_named = msgspec.json.Decoder(_Named)


def model_of(data: bytes) -> str | None:
    """The model that a reply, or a stream's event, says it is of."""
    try:
        found = _named.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inner = found.response or found.message
    return found.model or (inner.model if isinstance(inner, _Named) else None)


class Book:
    """What all tallies of a worker count into; and, by what a request may be, the cells that it adds to."""

    def __init__(self, counters: Counters, names: ModelNames) -> None:
        self.counters, self.names = counters, names
        self.endings: dict[tuple[str, str, bool, str, str], tuple[Cell, ...]] = {}
        self.replies: dict[tuple[str, str, str], tuple[Cell, ...]] = {}

    def ending(self, model: str, endpoint: str, streams: bool, outcome: str, decision: str) -> tuple[Cell, ...]:
        cell = self.counters.cell
        found = self.endings[model, endpoint, streams, outcome, decision] = (
            cell(REQUESTS, model, endpoint, "true" if streams else "false", outcome),
            cell(SAMPLED, SOURCE, decision),
            cell(DURATION, model, endpoint, outcome),
            cell(OVERHEAD, "request"),
            cell(RESPONSE_START, model, endpoint),
        )
        return found

    def reply(self, model: str, endpoint: str, source: str) -> tuple[Cell, ...]:
        """source: of the number of output tokens, or why there is none."""
        cell = self.counters.cell
        counted = source in COUNT_SOURCES
        found = self.replies[model, endpoint, source] = (
            [] if counted else cell(UNCOUNTED, model, endpoint, source),
            cell(GENERATION_TOKENS, model, endpoint, source) if counted else [],
            cell(REQUEST_GENERATION, model, endpoint),
            cell(PROMPT_TOKENS, model, endpoint, "usage"),
            cell(REQUEST_PROMPT, model, endpoint),
            cell(CACHED_TOKENS, model, endpoint),
            cell(CHARACTERS, model, endpoint),
        )
        return found


class Tally:
    """One request's. `began` and what follows it are set by whoever sees them happen."""

    __slots__ = (
        "_book",
        "_chunk_tokens",
        "_endpoint",
        "_gaps",
        "_ids",
        "_kept",
        "_kinds",
        "_label",
        "_last_event",
        "_logprobs",
        "began",
        "characters",
        "decision",
        "finished",
        "first_chunk",
        "first_token",
        "headers",
        "last_token",
        "model",
        "parameters",
        "response_id",
        "sent",
        "status",
        "streams",
        "texts",
        "tries",
        "unread",
        "usage",
    )

    def __init__(self, book: Book, endpoint: Endpoint | None, arrived: float) -> None:
        self._book, self._endpoint = book, endpoint
        self.began = arrived  # when its body had come, or else its head
        self.sent: float | None = None  # its last byte went to the upstream connection
        self.headers: float | None = None  # the reply's head came
        self.status: int | None = None
        self.streams = False  # the reply is an event stream
        self.parameters: RequestParameters | None = None  # what the client asked for
        self.model: str | None = None  # as the reply does
        self.tries = TRIES  # left, to learn it
        self.unread = False  # not all of the reply was read, so what was counted in it is too little
        self.usage: Usage | None = None  # of the whole request, as far as the server stated it
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finished: dict[int, str | None] = {}  # choice -> why; None: it has begun
        self.characters: int | None = None  # None: nothing was read
        self.first_chunk: float | None = None
        self.response_id: str | None = None
        self.decision: Decision = "captured"
        self.texts: dict[int, list[str]] | None = None  # choice -> its text, where it is to be kept
        self._kept = 0  # code points of it
        self._ids: int | None = None
        self._logprobs: int | None = None
        self._label = OTHER
        self._kinds: dict[str, Cell] = {}
        self._gaps: Cell = []  # there from the first token on
        self._chunk_tokens: Cell | None = None
        self._last_event = 0

    @property
    def asked(self) -> str | None:
        """The model, as the client names it."""
        return self.parameters.model if self.parameters else None

    @property
    def label(self) -> str:
        """The value of model_name."""
        return self._label if self.model else self._book.names.known(self.asked)

    # ------------------------------------------------------------------------------------------ while it is read

    def learn(self, data: bytes) -> None:
        """An event, or a whole reply, that may say which model it is of."""
        self.tries -= 1
        if self.status is None or not 200 <= self.status < 300 or not (model := model_of(data)):
            return
        self.tries, self.model, self._label = 0, model, self._book.names.learn(model)
        self._kinds.clear()
        self._chunk_tokens = None
        if self._gaps:
            self._gaps = self._cell(INTER_CHUNK)

    def part(self, part: Part, event: int, at: float) -> None:
        """A chunk of a stream: part of its event of this number, which was complete at this time.

        Called for each chunk, hence in line what could be calls, and lists that are at hand.
        """
        try:
            self._kinds[part.kind][0] += 1
        except KeyError:
            self._first_of_kind(part.kind, at)
        ids = part.token_ids
        if ids is not None or part.logprob_count is not None:
            self._count_tokens(ids, part.logprob_count)
        if part.text or ids or part.calls:
            if (last := self.last_token) is None:
                self._first_token(at)
            elif event != self._last_event:
                gap, gaps = at - last, self._gaps
                gaps[bisect_left(_gap_bounds, gap)] += 1
                gaps[-1] += gap
            self.last_token, self._last_event = at, event
            if part.choice not in self.finished:
                self.finished[part.choice] = None
            if self.texts is not None and part.kind == "text":
                self._keep(self.texts, part.choice, part.text)
        if part.finish_reason:
            self.finished[part.choice] = part.finish_reason

    def _first_of_kind(self, kind: str, at: float) -> None:
        if self.first_chunk is None:
            self.first_chunk = at
            self._observe(at - self.began, FIRST_CHUNK)
        self._kinds[kind] = self._cell(CHUNKS, kind)
        self._kinds[kind][0] += 1

    def _first_token(self, at: float) -> None:
        self.first_token = at
        self._observe(at - self.began, FIRST_TOKEN)
        self._gaps = self._cell(INTER_CHUNK)

    def _count_tokens(self, ids: list[int] | None, logprobs: int | None) -> None:
        if self._chunk_tokens is None:
            self._chunk_tokens = self._cell(CHUNK_TOKENS)
        if ids is not None:
            self._ids = (self._ids or 0) + len(ids)
        if logprobs is not None:
            self._logprobs = (self._logprobs or 0) + logprobs
        observe(self._chunk_tokens, _token_bounds, logprobs or 0 if ids is None else len(ids))

    def _keep(self, texts: dict[int, list[str]], choice: int, text: str) -> None:
        if self._kept < MOST_KEPT:
            kept = text[: MOST_KEPT - self._kept]
            self._kept += len(kept)
            texts.setdefault(choice, []).append(kept)

    def state(self, usage: Usage, *, final: bool = True) -> None:
        """The server states token counts. final: those of the output are more than a placeholder at the beginning."""
        before = self.usage or Usage()
        self.usage = Usage(
            prompt_tokens=_newer(usage.prompt_tokens, before.prompt_tokens),
            completion_tokens=_newer(usage.completion_tokens if final else None, before.completion_tokens),
            cached_tokens=_newer(usage.cached_tokens, before.cached_tokens),
        )

    def reply(self, reply: ReplyBody, data: bytes) -> None:
        """A whole reply of a known endpoint, read."""
        self.learn(data)
        self.characters, self.response_id = 0, reply.response_id
        for choice in reply.choices:
            self.characters += len(choice.text) + len(choice.reasoning)
            self.characters += sum(len(call.arguments) for call in choice.calls)
            self.finished[choice.choice] = choice.finish_reason
            if self.texts is not None:
                self._keep(self.texts, choice.choice, choice.text)
            if choice.token_ids is not None:
                self._ids = (self._ids or 0) + len(choice.token_ids)
            if choice.logprob_count is not None:
                self._logprobs = (self._logprobs or 0) + choice.logprob_count
        if reply.usage:
            self.state(reply.usage)

    # ------------------------------------------------------------------------------------------- when it is over

    def output(self) -> tuple[int, str] | None:
        """Output tokens, and the source of that number; None: nobody says."""
        stated = self.usage.completion_tokens if self.usage else None
        if stated is not None:
            return stated, "usage"
        if self._ids is not None and not self.unread:
            return self._ids, "token_ids"
        if self._logprobs is not None and not self.unread:
            return self._logprobs, "logprobs"
        return None

    def per_token(self) -> float | None:
        """Seconds between output tokens; None: there is no such number, see the metric."""
        output = self.output()
        if output is None or output[0] < 2 or len(self.finished) != 1:
            return None
        if self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (output[0] - 1)

    def ended(self, outcome: Outcome, at: float, decision: Decision) -> None:
        """To be called once, last."""
        self.decision = decision
        key = (self.label, self._endpoint or OTHER, self.streams, outcome, decision)
        requests, sampled, duration, before, start = self._book.endings.get(key) or self._book.ending(*key)
        requests[0] += 1
        sampled[0] += 1
        observe(duration, _duration_bounds, at - self.began)
        if self.sent is not None:
            observe(before, _overhead_bounds, self.sent - self.began)
            if self.headers is not None and self.headers >= self.sent:
                observe(start, _start_bounds, self.headers - self.sent)
        if self._endpoint and self.status is not None and 200 <= self.status < 300:
            self._count_reply(self._endpoint, decision)

    def _count_reply(self, endpoint: Endpoint, decision: Decision) -> None:
        output = self.output() if decision == "captured" else None
        key = (self.label, endpoint, output[1] if output else self._why_uncounted(decision))
        found = self._book.replies.get(key) or self._book.reply(*key)
        uncounted, generation, of_generation, prompt, of_prompt, cached, characters = found
        if output is None:
            uncounted[0] += 1
        else:
            generation[0] += output[0]
            observe(of_generation, _length_bounds, output[0])
            if (seconds := self.per_token()) is not None:
                self._observe(seconds, PER_TOKEN)
        if self.usage and self.usage.prompt_tokens is not None:
            prompt[0] += self.usage.prompt_tokens
            observe(of_prompt, _length_bounds, self.usage.prompt_tokens)
        if self.usage and self.usage.cached_tokens is not None:
            cached[0] += self.usage.cached_tokens
        if self.characters is not None:
            observe(characters, _character_bounds, self.characters)
        for reason in self.finished.values():
            self._cell(FINISHED, "none" if reason is None else _REASONS.get(reason, OTHER))[0] += 1

    def _why_uncounted(self, decision: Decision) -> str:
        if decision != "captured":
            return "capture_off" if decision == "skipped" else decision
        return "unread" if self.unread else "no_count"

    def _cell(self, metric: Metric, *labels: str) -> Cell:
        """Of a metric of the known endpoints."""
        return self._book.counters.cell(metric, self.label, self._endpoint or OTHER, *labels)

    def _observe(self, value: float, metric: Metric, *labels: str) -> None:
        observe(self._cell(metric, *labels), metric.bounds, value)


def _newer(stated: int | None, before: int | None) -> int | None:
    return before if stated is None or not 0 <= stated <= MOST_TOKENS else stated
