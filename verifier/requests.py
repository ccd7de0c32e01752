"""One request as each side saw it, put together record by record. Pure.

A log proves a good deal about itself: its events, chunks and characters are counted. Where those counts contradict each
other, lines were lost or changed, and nothing that this could explain may be blamed on a server.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress, groupby

from sparseety.records import (
    Chunk,
    Gap,
    RequestAdded,
    RequestFinished,
    RequestStart,
    Response,
    StreamDone,
    ToolCall,
    Usage,
)
from verifier.fragments import Rows, Run
from verifier.logs import Log

TEXT_KINDS = frozenset({"text", "reasoning", "tool_call"})


@dataclass(slots=True)
class Delivered:
    """One choice as the client got it."""

    pieces: list[str] = field(default_factory=list)  # text-bearing deltas in wire order
    piece_lines: list[int] = field(default_factory=list)  # their lines in the log
    piece_kinds: list[str] = field(default_factory=list)  # text, reasoning or tool_call, for each piece
    piece_times: list[float] = field(default_factory=list)  # when the proxy had each, Unix seconds
    length: int = 0  # code points of the pieces
    kinds: set[str] = field(default_factory=set)
    calls: dict[int, ToolCall] = field(default_factory=dict)  # tool calls by index, their parts joined
    token_ids: list[int] | None = None
    logprobs: int | None = None  # entries, one a token; None: there were none
    held: list[int] = field(default_factory=list)  # pieces that came right after an event without text
    running: list[tuple[int, int]] = field(default_factory=list)  # (piece, tokens so far as its event states them)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    empty: bool = False  # the last event had no text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def runs(self) -> list[str]:
        """The text of each channel, pieces that follow each other joined; tool calls left out."""
        found = groupby(zip(self.piece_kinds, self.pieces, strict=True), key=lambda pair: pair[0])
        return ["".join(text for _, text in pairs) for kind, pairs in found if kind != "tool_call"]

    def add_piece(self, kind: str, text: str, line: int, ts: float) -> None:
        if self.empty:
            self.held.append(len(self.pieces))
            self.empty = False
        self.pieces.append(text)
        self.piece_times.append(ts)
        self.piece_kinds.append(kind)
        self.piece_lines.append(line)
        self.kinds.add(kind)
        self.length += len(text)

    def hold(self, kind: str, pieces: list[str | None]) -> None:
        """Keep which pieces come right after an event without text; None: such an event. To be called before they are
        added."""
        if not self.empty and None not in pieces:
            return
        index = len(self.pieces)
        for piece in pieces:
            if piece is None:
                self.empty |= kind == "text"
                continue
            if self.empty:
                self.held.append(index)
                self.empty = False
            index += 1

    def add_calls(self, calls: list[ToolCall]) -> None:
        for part in calls:
            self.kinds.add("tool_call")
            known = self.calls.get(part.index, ToolCall(index=part.index))
            name = part.name if known.name is None else known.name + (part.name or "")
            self.calls[part.index] = ToolCall(index=part.index, name=name, arguments=known.arguments + part.arguments)

    def add_ids(self, ids: list[int] | None, logprobs: int | None) -> None:
        if ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += ids
        if logprobs is not None:
            self.logprobs = (self.logprobs or 0) + logprobs

    def state(self, usage: Usage | None) -> None:
        """The last piece's event states how many tokens there are so far."""
        if usage is not None and usage.completion_tokens is not None:
            self.running.append((len(self.pieces) - 1, usage.completion_tokens))

    def end(self, finish_reason: str | None, stop_reason: int | str | None) -> None:
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason


@dataclass(slots=True)
class Capture:
    """One request as the proxy saw it."""

    log: Log
    number: int
    line: int  # of its first record
    start: RequestStart | None = None
    done: StreamDone | None = None
    response: Response | None = None
    response_ids: list[str] = field(default_factory=list)  # distinct ids; more than one is a fault of the stream
    choices: dict[int, Delivered] = field(default_factory=dict)
    error_events: int = 0
    unparsed_events: int = 0
    gaps: list[Gap] = field(default_factory=list)
    contradiction: str | None = None  # what in its records cannot be true of a log that is whole
    events_seen: int = 0  # highest wire_index
    chunks_seen: int = 0  # text-bearing records

    def contradicts(self, what: str) -> None:
        self.contradiction = self.contradiction or what

    @property
    def response_id(self) -> str | None:
        return self.response_ids[0] if self.response_ids else None

    @property
    def ending(self) -> StreamDone | Response | None:
        return self.done or self.response

    @property
    def place(self) -> str:
        return self.log.place(self.line)

    @property
    def life(self) -> tuple[float, float]:
        """From when to when the proxy had it, as far as that is known."""
        return self.start.ts if self.start else -math.inf, self.ending.ts if self.ending else math.inf

    @property
    def losses(self) -> list[Gap]:
        """What this log lost of the request, for certain or perhaps."""
        return [*self.gaps, *self.log.unnamed_between(*self.life)]

    @property
    def usage(self) -> Usage | None:
        return self.ending.usage if self.ending else None


@dataclass(slots=True)
class EngineRequest:
    """One request as the engine saw it: one choice of one prompt."""

    log: Log
    number: int
    line: int
    added: RequestAdded | None = None
    finished: RequestFinished | None = None
    ids: list[int] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=list)  # index of each row's first id
    row_lines: list[int] = field(default_factory=list)
    contradiction: str | None = None  # why the ids cannot be trusted
    gaps: list[Gap] = field(default_factory=list)

    @property
    def place(self) -> str:
        return self.log.place(self.line)

    @property
    def life(self) -> tuple[float, float]:
        """From when to when the engine had it, as far as that is known."""
        return self.added.ts if self.added else -math.inf, self.finished.ts if self.finished else math.inf

    @property
    def losses(self) -> list[Gap]:
        """What this log lost of the request, for certain or perhaps."""
        return [*self.gaps, *self.log.unnamed_between(*self.life)]

    @property
    def complete(self) -> bool:
        """Every id is here: the engine said how many there were, and no row is missing."""
        return self.finished is not None and self.contradiction is None and self.finished.total_ids == len(self.ids)


@dataclass(frozen=True, slots=True)
class Join:
    """What the engines' logs have for one reply."""

    choices: dict[int, list[EngineRequest]] = field(default_factory=dict)  # claimants of each choice
    claims: int = 1  # captures that bear this id and could mean the same engine requests


def add_chunk(capture: Capture, line: int, chunk: Chunk) -> None:
    if chunk.wire_index not in (capture.events_seen, capture.events_seen + 1):
        capture.contradicts(f"event {capture.events_seen + 1} was due, event {chunk.wire_index} stands there")
    capture.events_seen = max(capture.events_seen, chunk.wire_index)
    if chunk.response_id and chunk.response_id not in capture.response_ids:  # some servers begin with an empty one
        capture.response_ids.append(chunk.response_id)
    if chunk.kind == "error":
        capture.error_events += 1
        return
    if chunk.kind == "unparsed":
        capture.unparsed_events += 1
        return
    if chunk.kind not in TEXT_KINDS and chunk.kind not in ("role", "finish"):
        return
    choice = capture.choices.setdefault(chunk.choice, Delivered())
    if chunk.chunk_index is not None:
        capture.chunks_seen += 1
        choice.add_piece(chunk.kind, chunk.delta_text, line, chunk.ts)
        choice.state(chunk.usage)
        if chunk.delta_len not in (None, len(chunk.delta_text)):
            capture.contradicts("the text of a chunk was not recorded")
        elif (chunk.chunk_index, chunk.accumulated_len) != (len(choice.pieces), choice.length):
            capture.contradicts(f"chunk {len(choice.pieces)} of choice {chunk.choice} does not follow the one before")
    elif chunk.kind == "text":
        choice.empty = True
    choice.add_calls(chunk.tool_calls or [])
    choice.add_ids(chunk.token_ids, chunk.logprob_count)
    choice.end(chunk.finish_reason, chunk.stop_reason)


def add_run(capture: Capture, offset: int, run: Run) -> None:
    """The same for chunks that follow each other, at once if they follow what is here."""
    choice = capture.choices.get(run.choice) or Delivered()
    due = capture.events_seen, capture.events_seen + 1
    if run.wire_index not in due or (run.chunk_index, run.length) != (len(choice.pieces) + 1, choice.length):
        for line, chunk in run.chunks(capture.number):
            add_chunk(capture, offset + line, chunk)
        return
    capture.choices[run.choice] = choice
    capture.events_seen = run.wire_index + len(run.pieces) - 1
    pieces = [piece for piece in run.pieces if piece is not None]
    lines: Iterable[int] = run.lines
    times: Iterable[float] = run.times
    if len(pieces) < len(run.pieces):
        bears_text = [piece is not None for piece in run.pieces]
        lines, times = compress(lines, bears_text), compress(times, bears_text)
    capture.chunks_seen += len(pieces)
    choice.hold(run.kind, run.pieces)
    choice.pieces += pieces
    choice.piece_lines += [offset + line for line in lines]
    choice.piece_kinds += [run.kind] * len(pieces)
    choice.piece_times += times
    choice.kinds.add(run.kind)
    choice.length += sum(map(len, pieces))
    if run.token_ids or run.logprob_counts:
        nothing = [None] * len(run.pieces)
        for ids, logprobs in zip(run.token_ids or nothing, run.logprob_counts or nothing, strict=True):
            choice.add_ids(ids, logprobs)


def add_done(capture: Capture, done: StreamDone) -> None:
    if capture.ending:
        capture.contradicts("it ends twice")
    capture.done = done
    length = sum(choice.length for choice in capture.choices.values())
    if capture.events_seen < done.events and capture.events_seen:
        capture.contradicts(f"it had {done.events} events, the last one here is {capture.events_seen}")
    elif (capture.chunks_seen, length) != (done.chunk_count, done.total_text_len):
        capture.contradicts(
            f"it had {done.chunk_count} chunks of {done.total_text_len} characters, "
            f"{capture.chunks_seen} of {length} are here"
        )


def add_response(capture: Capture, line: int, response: Response) -> None:
    if capture.ending:
        capture.contradicts("it ends twice")
    capture.response = response
    if response.response_id:
        capture.response_ids.append(response.response_id)
    for reply in response.choices:
        choice = capture.choices.setdefault(reply.choice, Delivered())
        for kind, text in (("reasoning", reply.reasoning), ("text", reply.text)):
            if text:
                choice.add_piece(kind, text, line, response.ts)
        for call in reply.calls:
            choice.add_piece("tool_call", call.arguments, line, response.ts)
        choice.add_calls(reply.calls)
        choice.add_ids(reply.token_ids, reply.logprob_count)
        choice.end(reply.finish_reason, reply.stop_reason)


def add_rows(request: EngineRequest, offset: int, rows: Rows) -> None:
    """Rows with ids, in the log's order."""
    known = len(request.ids)
    if rows.first_indexes == list(range(known, known + len(rows.ids))):  # one id a row, none missing
        request.row_starts += rows.first_indexes
        request.row_lines += [offset + line for line in rows.lines]
        request.ids += rows.ids
        return
    for line, first_index, ids in rows.each():
        _add_row(request, offset + line, first_index, ids)


def _add_row(request: EngineRequest, line: int, first_index: int, ids: list[int]) -> None:
    if first_index != len(request.ids) and request.contradiction is None:
        what = "are missing" if first_index > len(request.ids) else "stand twice"
        here = request.log.place(line)
        request.contradiction = f"ids {what}: index {len(request.ids)} was due at {here}, found {first_index}"
    request.row_starts.append(len(request.ids))
    request.row_lines.append(line)
    request.ids += ids
