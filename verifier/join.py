"""Bring both logs together: what a client got, beside what the engine did for it. Pure: records in, cases out.

The join key is the id the server put into the reply, which is the id the engine was given. spec: docs/architecture.md.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.records import (
    AnyRecord,
    Chunk,
    EngineEvent,
    EngineStart,
    Gap,
    LogClose,
    LogOpen,
    RequestAdded,
    RequestFinished,
    RequestStart,
    Response,
    Row,
    Step,
    StreamDone,
    Usage,
)

TEXT_KINDS = frozenset({"text", "reasoning", "tool_call"})


@dataclass(slots=True)
class Log:
    """One log file, and what it says about itself."""

    path: Path
    opening: LogOpen | None = None  # None: its first line is lost
    engine: EngineStart | None = None
    first_ts: float | None = None
    last_ts: float = 0.0
    closed: bool = False
    sampled: bool = False  # not every request was to be recorded, for some time at least
    damaged: bool = False  # a line of it was unusable: what is missing here may stand there
    open_gaps: list[Gap] = field(default_factory=list)  # gaps that do not say which requests they concern


@dataclass(slots=True)
class Delivered:
    """One choice as the client got it."""

    pieces: list[str] = field(default_factory=list)  # text-bearing deltas in wire order
    piece_lines: list[int] = field(default_factory=list)  # their lines in the log
    kinds: set[str] = field(default_factory=set)
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add_ids(self, ids: list[int] | None) -> None:
        if ids is not None:
            self.token_ids = (self.token_ids or []) + ids


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
    events_seen: int = 0  # highest wire_index
    chunks_seen: int = 0  # text-bearing records

    @property
    def response_id(self) -> str | None:
        return self.response_ids[0] if self.response_ids else None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.response is not None

    @property
    def usage(self) -> Usage | None:
        ending = self.done or self.response
        return ending.usage if ending else None


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
    discarded: int = 0
    contradiction: str | None = None  # why the ids cannot be trusted
    gaps: list[Gap] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Every id is here: the engine said how many there were, and no row is missing."""
        return self.finished is not None and self.contradiction is None and self.finished.total_ids == len(self.ids)


@dataclass(slots=True)
class Logs:
    """Everything that was read, by request. `add` takes the records of each file in file order."""

    files: list[Log] = field(default_factory=list)
    captures: dict[tuple[int, int], Capture] = field(default_factory=dict)
    engine: dict[tuple[int, int], EngineRequest] = field(default_factory=dict)

    def add_file(self, path: Path, records: Iterable[tuple[int, AnyRecord]]) -> Log:
        log = Log(path)
        index = len(self.files)
        self.files.append(log)
        for line, record in records:
            log.first_ts = record.ts if log.first_ts is None else log.first_ts
            log.last_ts = record.ts
            self._add(log, index, line, record)
        return log

    def _add(self, log: Log, index: int, line: int, record: AnyRecord) -> None:
        match record:
            case Chunk():
                _add_chunk(self._capture(log, index, line, record.capture), line, record)
            case Step():
                for row in record.rows:
                    _add_row(self._engine(log, index, line, row.request), line, row)
            case RequestStart():
                self._capture(log, index, line, record.capture).start = record
            case StreamDone():
                self._capture(log, index, line, record.capture).done = record
            case Response():
                _add_response(self._capture(log, index, line, record.capture), line, record)
            case RequestAdded():
                self._engine(log, index, line, record.request).added = record
            case RequestFinished():
                self._engine(log, index, line, record.request).finished = record
            case Gap():
                for number in record.captures:
                    self._capture(log, index, line, number).gaps.append(record)
                for number in record.requests:
                    self._engine(log, index, line, number).gaps.append(record)
                if not record.captures and not record.requests:
                    log.open_gaps.append(record)
            case LogOpen():
                log.opening = record
                log.sampled |= record.scope.sample < 1
            case EngineEvent():
                log.sampled |= record.sample is not None and record.sample < 1
            case LogClose():
                log.closed = True
            case EngineStart():
                log.engine = record

    def _capture(self, log: Log, index: int, line: int, number: int) -> Capture:
        capture = self.captures.get((index, number))
        if capture is None:
            capture = self.captures[index, number] = Capture(log, number, line)
        return capture

    def _engine(self, log: Log, index: int, line: int, number: int) -> EngineRequest:
        request = self.engine.get((index, number))
        if request is None:
            request = self.engine[index, number] = EngineRequest(log, number, line)
        return request


def _add_chunk(capture: Capture, line: int, chunk: Chunk) -> None:
    capture.events_seen = max(capture.events_seen, chunk.wire_index)
    if chunk.response_id is not None and chunk.response_id not in capture.response_ids:
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
        choice.pieces.append(chunk.delta_text)
        choice.piece_lines.append(line)
        choice.kinds.add(chunk.kind)
    choice.add_ids(chunk.token_ids)
    if chunk.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason


def _add_response(capture: Capture, line: int, response: Response) -> None:
    capture.response = response
    if response.response_id is not None:
        capture.response_ids.append(response.response_id)
    for reply in response.choices:
        choice = capture.choices.setdefault(reply.choice, Delivered())
        for kind, text in (("reasoning", reply.reasoning), ("text", reply.text)):
            if text:
                choice.pieces.append(text)
                choice.piece_lines.append(line)
                choice.kinds.add(kind)
        if reply.tool_calls:
            choice.kinds.add("tool_call")
        choice.add_ids(reply.token_ids)
        choice.finish_reason, choice.stop_reason = reply.finish_reason, reply.stop_reason


def _add_row(request: EngineRequest, line: int, row: Row) -> None:
    request.discarded += len(row.discarded)
    if not row.ids:
        return
    if row.first_index != len(request.ids) and request.contradiction is None:
        what = "are missing" if row.first_index > len(request.ids) else "stand twice"
        request.contradiction = f"ids {what}: index {len(request.ids)} was due at line {line}, found {row.first_index}"
    request.row_starts.append(len(request.ids))
    request.row_lines.append(line)
    request.ids += row.ids


# --------------------------------------------------------------------------------------------------- the join


class EngineIndex:
    """Finds the engine's requests behind a reply."""

    def __init__(self, requests: Iterable[EngineRequest]) -> None:
        self._by_id: dict[str, list[EngineRequest]] = defaultdict(list)
        self._taken: set[int] = set()
        for request in requests:
            if request.added is not None:
                self._by_id[request.added.external_id].append(request)

    def choices(self, capture: Capture) -> dict[int, list[EngineRequest]]:
        """Engine requests of each choice of this reply: none, one, or several that claim to be it.

        Chat: the reply's id is the engine's. Completions: the engine adds `-<prompt>`, and choice = prompt * n + child.
        """
        response_id, start = capture.response_id, capture.start
        if response_id is None:
            return {}
        parameters = start.parameters if start else None
        n = parameters.n if parameters else 1
        if start is not None and start.endpoint == "completions":
            ids = [f"{response_id}-{prompt}" for prompt in range(parameters.prompts if parameters else 1)]
        else:
            ids = [response_id]
        found: dict[int, list[EngineRequest]] = defaultdict(list)
        for prompt, external_id in enumerate(ids):
            for request in self._by_id.get(external_id, ()):
                assert request.added is not None
                found[prompt * n + request.added.child].append(request)
                self._taken.add(id(request))
        return found

    def untaken(self) -> Iterator[EngineRequest]:
        """Engine requests that no reply has asked for so far."""
        for requests in self._by_id.values():
            yield from (request for request in requests if id(request) not in self._taken)
