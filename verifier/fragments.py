"""What a block of log lines says, sorted by request and packed, so that it can be kept, handed on and put together.

Decoding is most of the verifier's work, so it is done block by block, in whatever process. The process that keeps the
open requests needs to know when each begins and ends and what it is called (CapturePart, ServedPart); the rest stays
packed until the request is judged. Pure.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sparseety.logreader import Block, LogProblem, block_records, refused
from sparseety.records import (
    AnyRecord,
    Chunk,
    Endpoint,
    EngineEvent,
    EngineStart,
    Gap,
    Kind,
    LogClose,
    LogOpen,
    RequestAdded,
    RequestFinished,
    RequestParameters,
    RequestStart,
    Response,
    Step,
    StreamDone,
)

_OF_THE_LOG = frozenset({LogOpen, LogClose, Gap, EngineStart, EngineEvent})
_RUN_KINDS = ("text", "reasoning")

Packed = bytes
"""A pickled list of (line, record) and Run, or a Rows. Pickle, because it is twice as fast here as anything typed."""


class Begin(NamedTuple):
    """What is asked about an open request's beginning."""

    ts: float
    uuid: str
    endpoint: Endpoint | None
    x_request_id: str | None
    n: int  # choices for each prompt, 1 at least
    choices: int | None  # how many were asked for in all; None: not known, or no sensible number
    model: str | None


class End(NamedTuple):
    """What is asked about an open request's ending."""

    ts: float
    outcome: str
    status: int | None
    streamed: bool  # by a stream_done, which counts where a log holds both


class CapturePart(NamedTuple):
    """What a block holds of a proxy's request."""

    number: int
    line: int  # of its first record here, in the file
    begin: Begin | None
    end: End | None
    ids: tuple[str, ...]  # that the reply bears, in order
    packed: Packed


class ServedPart(NamedTuple):
    """What a block holds of an engine's request."""

    number: int
    line: int
    added: RequestAdded | None
    finished: RequestFinished | None
    packed: Packed | None  # Rows


class Run(NamedTuple):
    """Chunks of one choice and kind that follow each other; in the place of as many records."""

    wire_index: int  # of the first; the others follow it
    choice: int
    kind: Kind
    chunk_index: int  # of the first that bears text; the others follow it
    length: int  # code points of the choice before it
    pieces: list[str | None]  # None: this one bears no text
    lines: list[int]
    times: list[float]
    token_ids: list[list[int] | None] | None
    logprob_counts: list[int | None] | None

    def chunks(self, capture: int) -> Iterator[tuple[int, Chunk]]:
        """The records again, with their lines."""
        length, chunk_index = self.length, self.chunk_index
        for index, piece in enumerate(self.pieces):
            length += len(piece or "")
            chunk = Chunk(
                ts=self.times[index],
                capture=capture,
                wire_index=self.wire_index + index,
                kind=self.kind,
                choice=self.choice,
                chunk_index=None if piece is None else chunk_index,
                delta_text=piece or "",
                accumulated_len=None if piece is None else length,
                token_ids=self.token_ids[index] if self.token_ids else None,
                logprob_count=self.logprob_counts[index] if self.logprob_counts else None,
            )
            chunk_index += piece is not None
            yield self.lines[index], chunk


class Rows(NamedTuple):
    """Rows with ids of one engine request."""

    lines: list[int]
    first_indexes: list[int]
    counts: list[int]  # of ids
    ids: list[int]  # of all rows, one after the other

    def each(self) -> Iterator[tuple[int, int, list[int]]]:
        """(line, first index, ids) of each row."""
        end = 0
        for line, first, count in zip(self.lines, self.first_indexes, self.counts, strict=True):
            begin, end = end, end + count
            yield line, first, self.ids[begin:end]


class Section(NamedTuple):
    """Records between two that concern the log as a whole."""

    line: int  # of the first
    last_line: int
    records: int
    first_ts: float
    last_ts: float
    captures: list[CapturePart]
    served: list[ServedPart]


class Single(NamedTuple):
    """A record that concerns the log as a whole."""

    line: int
    record: LogOpen | LogClose | Gap | EngineStart | EngineEvent


class Parsed(NamedTuple):
    """A block, read."""

    parts: list[Section | Single]
    problems: list[LogProblem]
    refused: bool  # of an unknown format: nothing behind this is read

    def last_ts(self, default: float) -> float:
        """When its last record happened."""
        if not self.parts:
            return default
        last = self.parts[-1]
        return last.last_ts if isinstance(last, Section) else last.record.ts


def parse(path: Path, block: Block) -> Parsed:
    """Read a block of a log file. What is no use is a problem, never an error."""
    problems: list[LogProblem] = []
    return assort(path, block_records(path, block, problems.append), problems)


def assort(path: Path, records: Iterable[tuple[int, AnyRecord]], problems: list[LogProblem]) -> Parsed:
    """Sort records with their lines by request. problems: what reading them runs into."""
    parts: list[Section | Single] = []
    section: list[tuple[int, Any]] = []
    for item in records:
        line, record = item
        if record.__class__ in _OF_THE_LOG:
            if refusal := refused(path, line, record):
                return Parsed([*parts, *_section(section)], [*problems, refusal], refused=True)
            parts += [*_section(section), Single(line, record)]
            section = []
        else:
            section.append(item)
    return Parsed([*parts, *_section(section)], problems, refused=False)


def _section(items: list[tuple[int, Any]]) -> Iterable[Section]:
    """These records by request; nothing where there are none."""
    if not items:
        return
    captures: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    rows: dict[int, Rows] = {}
    served: dict[int, tuple[int, RequestAdded | None, RequestFinished | None]] = {}
    for item in items:
        line, record = item
        kind = record.__class__
        if kind is Chunk or kind is RequestStart or kind is StreamDone or kind is Response:
            captures[record.capture].append(item)
        elif kind is Step:
            for row in record.rows:
                try:
                    lines, first_indexes, counts, ids = rows[row.request]
                except KeyError:
                    lines, first_indexes, counts, ids = rows[row.request] = Rows([], [], [], [])
                    served.setdefault(row.request, (line, None, None))
                if row.ids:
                    lines.append(line)
                    first_indexes.append(row.first_index)
                    counts.append(len(row.ids))
                    ids += row.ids
        elif kind is RequestAdded:
            first, _, finished = served.get(record.request, (line, None, None))
            served[record.request] = first, record, finished
        elif kind is RequestFinished:
            first, added, _ = served.get(record.request, (line, None, None))
            served[record.request] = first, added, record
    (first_line, first), (last_line, last) = items[0], items[-1]
    capture_parts = [_capture_part(number, records) for number, records in captures.items()]
    served_parts = [
        ServedPart(number, *known, pickle.dumps(rows[number], pickle.HIGHEST_PROTOCOL) if number in rows else None)
        for number, known in served.items()
    ]
    yield Section(first_line, last_line, len(items), first.ts, last.ts, capture_parts, served_parts)


def _capture_part(number: int, records: list[tuple[int, Any]]) -> CapturePart:
    begin: Begin | None = None
    end: End | None = None
    ids: dict[str, None] = {}
    for _, record in records:
        if record.__class__ is Chunk:
            if record.response_id:
                ids[record.response_id] = None
        elif isinstance(record, RequestStart):
            begin = _begin(record)
        else:
            streamed = isinstance(record, StreamDone)
            if streamed or end is None or not end.streamed:
                end = End(record.ts, record.outcome, record.status, streamed)
            if not streamed and record.response_id:
                ids[record.response_id] = None
    packed = pickle.dumps(_with_runs(records), pickle.HIGHEST_PROTOCOL)
    return CapturePart(number, records[0][0], begin, end, tuple(ids), packed)


def _with_runs(records: list[tuple[int, Any]]) -> list[tuple[int, AnyRecord] | Run]:
    """The same, with plain chunks that follow each other taken together: those are most of a log."""
    kept: list[tuple[int, AnyRecord] | Run] = []
    run: list[tuple[int, Chunk]] = []
    wire = length = 0  # due next in the run
    chunk_index: int | None = None
    for item in records:
        record = item[1]
        if not _plain(record):
            kept += _run(run)
            kept.append(item)
            run, chunk_index = [], None
            continue
        index = record.chunk_index
        goes_on = (
            run
            and record.wire_index == wire
            and record.kind == run[0][1].kind
            and record.choice == run[0][1].choice
            and (
                index is None
                or chunk_index is None
                or (index == chunk_index and record.accumulated_len == length + len(record.delta_text))
            )
        )
        if not goes_on:
            kept += _run(run)
            run, chunk_index = [], None
        run.append(item)
        wire = record.wire_index + 1
        if index is not None:
            chunk_index, length = index + 1, record.accumulated_len
    kept += _run(run)
    return kept


def _plain(record: Any) -> bool:
    """Can it be told from a Run?"""
    return (
        record.__class__ is Chunk
        and record.response_id is None
        and record.finish_reason is None
        and record.tool_calls is None
        and record.delta_len is None
        and record.stop_reason is None
        and record.usage is None
        and record.kind in _RUN_KINDS
        and (record.chunk_index is None) == (record.accumulated_len is None)
    )


def _run(chunks: list[tuple[int, Chunk]]) -> Iterable[tuple[int, AnyRecord] | Run]:
    first = next((chunk for _, chunk in chunks if chunk.chunk_index is not None), None)
    if first is None or len(chunks) < 2:
        return chunks
    assert first.chunk_index is not None  # so it was chosen
    assert first.accumulated_len is not None  # _plain saw to it
    ids = [chunk.token_ids for _, chunk in chunks]
    logprobs = [chunk.logprob_count for _, chunk in chunks]
    run = Run(
        chunks[0][1].wire_index,
        first.choice,
        first.kind,
        first.chunk_index,
        first.accumulated_len - len(first.delta_text),
        [chunk.delta_text if chunk.chunk_index is not None else None for _, chunk in chunks],
        [line for line, _ in chunks],
        [chunk.ts for _, chunk in chunks],
        ids if any(one is not None for one in ids) else None,
        logprobs if any(one is not None for one in logprobs) else None,
    )
    return [run]


def asked_choices(wanted: RequestParameters | None) -> int | None:
    """How many choices a request asks for; None where that is not known, or no sensible number."""
    if wanted is None or wanted.n < 1 or wanted.prompts < 1:
        return None
    return wanted.n * wanted.prompts


def _begin(start: RequestStart) -> Begin:
    wanted = start.parameters
    model = wanted.model if wanted is not None else None
    n = max(1, wanted.n) if wanted is not None else 1
    return Begin(start.ts, start.uuid, start.endpoint, start.x_request_id, n, asked_choices(wanted), model)
