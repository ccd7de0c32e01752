"""Turn the bytes of an event stream into `chunk` records. No socket, no clock, no asyncio."""

from collections.abc import Callable

from proxy.tally import Tally
from sparseety.chunks import ChunkBody, Part, Unreadable
from sparseety.dialects import DONE, Dialect
from sparseety.records import Chunk, Gap, Kind, Usage
from sparseety.sse import SseEvent, SseSplitter, read_fields


class EventReader:
    """Reads one stream and keeps its sums. Nothing that the events hold makes it raise."""

    def __init__(
        self,
        capture: int,
        dialect: Dialect | None,
        max_event_bytes: int,
        clean: Callable[[bytes], bytes] = bytes,
        tally: Tally | None = None,
    ) -> None:
        """dialect=None: events are counted, not read; there are no records. clean: frees raw forms of credentials."""
        self._capture, self._dialect, self._tally = capture, dialect, tally
        self._max_event_bytes, self._clean = max_event_bytes, clean
        self._splitter = SseSplitter(max_event_bytes)
        self._counts: dict[int, tuple[int, int]] = {}  # choice -> (text-bearing records, code points)
        self._content_len = 0  # code points of kind text
        self._response_id: str | None = None
        self._read_number, self._read_at = 0, 0.0
        self.events = 0
        self.chunk_count = 0
        self.total_text_len = 0
        self.end_marker = False
        self.usage: Usage | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def feed(self, data: bytes, read: int, ts: float) -> list[Chunk | Gap]:
        """The records of the events that this read completes; read: its number, from 1."""
        self._read_number, self._read_at = read, ts
        return self._records(self._splitter.feed(data))

    def close(self) -> list[Chunk | Gap]:
        """The stream has ended: the record of the event it was cut off in, if any."""
        return self._records(self._splitter.close())

    def _records(self, events: list[SseEvent]) -> list[Chunk | Gap]:
        records: list[Chunk | Gap] = []
        if self._dialect is None:
            self.events += len(events)
            return records
        for event in events:
            self.events += 1
            self._read(event, self._dialect, records)
        return records

    def _read(self, event: SseEvent, dialect: Dialect, records: list[Chunk | Gap]) -> None:
        if event.dropped:
            reason = f"an event of more than {self._max_event_bytes} bytes ({event.dropped})"
            records.append(Gap(ts=self._read_at, reason=reason, count=1, captures=[self._capture]))
            if self._tally:
                self._tally.unread = True
            return
        if not event.complete:
            records.append(self._raw("unparsed", event))
            return
        fields = read_fields(event)
        data = fields.data
        if data is None:
            records.append(self._raw("error" if fields.error else "comment" if fields.comments else "control", event))
            return
        if data == DONE:
            self.end_marker |= dialect.done
            records.append(self._raw("done", event) if fields.name or fields.comments else self._chunk(Part("done")))
            return
        try:
            body = dialect.read_chunk(data)
        except Unreadable:
            records.append(self._raw("error" if fields.name == b"error" else "unparsed", event))
            return
        if self._tally and self._tally.tries:
            self._tally.learn(data)
        if body.plain and event.line is not None and body.response_id == self._response_id:
            records.append(self._plain(body.parts[0]))
            return
        self.end_marker |= body.end
        if body.usage is not None:
            self.usage = body.usage
            if self._tally:
                self._tally.state(body.usage, final=body.parts[-1].kind != "role")
        # A name that the body does not imply and a comment inside the event have no field of their own.
        lossy = fields.comments > 0 or (fields.name and fields.name != body.name.encode())
        self._parts(body, event if lossy else None, event, records)

    def _plain(self, part: Part) -> Chunk:
        """As `_chunk`, for less: it names no field that holds its default."""
        number, wire_index = self._read_number, self.events
        index, accumulated = self._count(part)
        return Chunk(
            ts=self._read_at,
            capture=self._capture,
            wire_index=wire_index,
            read=number if number != wire_index else None,
            choice=part.choice,
            chunk_index=index,
            delta_text=part.text,
            accumulated_len=accumulated,
        )

    def _parts(self, body: ChunkBody, raw: SseEvent | None, event: SseEvent, records: list[Chunk | Gap]) -> None:
        """One record for each part; what belongs to the event stands in one of them: raw and id first, usage last."""
        parts = body.parts
        if raw is None and (any(part.lossy for part in parts) or body.said not in (None, self._content_len)):
            raw = event
        response_id = body.response_id
        if response_id == self._response_id:
            response_id = None
        elif response_id is not None:
            self._response_id = response_id
            if self._tally:
                self._tally.response_id = response_id
        for part in parts[:-1]:
            records.append(self._chunk(part, None, response_id, raw))
            response_id = raw = None
        records.append(self._chunk(parts[-1], body.usage, response_id, raw))

    def _raw(self, kind: Kind, event: SseEvent) -> Chunk:
        return self._chunk(Part(kind), raw=event)

    def _chunk(
        self, part: Part, usage: Usage | None = None, response_id: str | None = None, raw: SseEvent | None = None
    ) -> Chunk:
        number, wire_index = self._read_number, self.events
        index, accumulated = self._count(part)
        as_text, as_bytes = self._kept(raw) if raw is not None else (None, None)
        return Chunk(
            ts=self._read_at,
            capture=self._capture,
            wire_index=wire_index,
            read=number if number != wire_index else None,
            kind=part.kind,
            choice=part.choice,
            block=part.block,
            chunk_index=index,
            delta_text=part.text,
            accumulated_len=accumulated,
            tool_calls=part.calls,
            token_ids=part.token_ids,
            logprob_count=part.logprob_count,
            usage=usage,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            response_id=response_id,
            raw=as_text,
            raw_base64=as_bytes,
        )

    def _count(self, part: Part) -> tuple[int | None, int | None]:
        """Add it to the sums; returns chunk_index and accumulated_len of its record."""
        text, choice, at = part.text, part.choice, self._read_at
        if self._tally:
            self._tally.part(part, self.events, at)
        if not text:
            return None, None
        index, accumulated = self._counts.get(choice, (0, 0))
        counts = self._counts[choice] = (index + 1, accumulated + len(text))
        self.chunk_count += 1
        self.total_text_len += len(text)
        if part.kind == "text":
            self._content_len += len(text)
        if self.first_token is None:
            self.first_token = at
        self.last_token = at
        return counts

    def _kept(self, event: SseEvent) -> tuple[str | None, bytes | None]:
        """The event as received, as text or else as bytes.

        How the network sliced it must not show, so a complete one goes without the line ends behind it: the last LF may
        have come too late to be part of it.
        """
        raw = self._clean(event.raw.rstrip(b"\r\n") if event.complete else event.raw)
        try:
            return raw.decode(), None
        except UnicodeDecodeError:
            return None, raw
