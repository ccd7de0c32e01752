"""Turn the bytes of an event stream into `chunk` records. No socket, no clock, no asyncio."""

from typing import Any

from sparseety.chunks import DONE, Part, Unreadable, read_chunk
from sparseety.records import Chunk, Kind, Usage
from sparseety.sse import SseEvent, SseSplitter, read_fields


class EventReader:
    """Reads one stream and keeps its sums. Nothing that the events hold makes it raise."""

    def __init__(self, capture: int, *, parse: bool, max_event_bytes: int) -> None:
        """parse=False: events are counted, not read; there are no records."""
        self._capture, self._parse = capture, parse
        self._splitter = SseSplitter(max_event_bytes)
        self._counts: dict[int, tuple[int, int]] = {}  # choice -> (text-bearing records, code points)
        self._response_id: str | None = None
        self._read_number, self._read_at = 0, 0.0
        self.events = 0
        self.chunk_count = 0
        self.total_text_len = 0
        self.end_marker = False
        self.usage: Usage | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def feed(self, data: bytes, read: int, ts: float) -> list[Chunk]:
        """The records of the events that this read completes; read: its number, from 1.

        Raises EventTooLarge; then no more can be read.
        """
        self._read_number, self._read_at = read, ts
        return self._records(self._splitter.feed(data))

    def close(self) -> list[Chunk]:
        """The stream has ended: the record of the event it was cut off in, if any."""
        return self._records(self._splitter.close())

    def _records(self, events: list[SseEvent]) -> list[Chunk]:
        if self._parse:
            return [chunk for event in events for chunk in self._read(event)]
        self.events += len(events)
        return []

    def _read(self, event: SseEvent) -> list[Chunk]:
        self.events += 1
        if not event.complete:
            return [self._chunk("unparsed", **_raw(event))]
        fields = read_fields(event)
        if fields.data is None:
            return [self._chunk("comment" if fields.comments else "control", **_raw(event))]
        # An event's name and a comment inside it have no field of their own.
        raw = _raw(event) if fields.name or fields.comments else {}
        if fields.data == DONE:
            self.end_marker = True
            return [self._chunk("done", **raw)]
        try:
            body = read_chunk(fields.data)
        except Unreadable:
            return [self._chunk("unparsed", **_raw(event))]
        if not raw and any(part.lossy for part in body.parts):
            raw = _raw(event)
        if body.usage is not None:
            self.usage = body.usage
        records = []
        last = len(body.parts) - 1
        for index, part in enumerate(body.parts):
            extra: dict[str, Any] = self._text(part) if part.text else {}
            if index == 0:
                extra.update(raw)  # once an event, for it holds the whole of it
                if body.response_id != self._response_id and body.response_id is not None:
                    self._response_id = extra["response_id"] = body.response_id
            records.append(
                self._chunk(
                    part.kind,
                    choice=part.choice,
                    delta_text=part.text,
                    tool_calls=part.calls,
                    token_ids=part.token_ids,
                    logprob_count=part.logprob_count,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    usage=body.usage if index == last else None,
                    **extra,
                )
            )
        return records

    def _text(self, part: Part) -> dict[str, Any]:
        if self.first_token is None:
            self.first_token = self._read_at
        self.last_token = self._read_at
        size = len(part.text)
        index, accumulated = self._counts.get(part.choice, (0, 0))
        self._counts[part.choice] = (index + 1, accumulated + size)
        self.chunk_count += 1
        self.total_text_len += size
        return {"chunk_index": index + 1, "accumulated_len": accumulated + size}

    def _chunk(self, kind: Kind, **fields: Any) -> Chunk:
        return Chunk(
            ts=self._read_at,
            capture=self._capture,
            wire_index=self.events,
            read=self._read_number if self._read_number != self.events else None,
            kind=kind,
            **fields,
        )


def _raw(event: SseEvent) -> dict[str, Any]:
    try:
        return {"raw": event.raw.decode()}
    except UnicodeDecodeError:
        return {"raw_base64": event.raw}
