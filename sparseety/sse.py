"""Cut a byte stream into SSE events. No socket, no clock, no asyncio."""

import re
from dataclasses import dataclass

# CRLF, CR and LF are SSE's only line ends (U+2028 is payload, so no str.splitlines()). Atomic groups keep
# one CRLF from counting as two ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    raw: bytes  # exactly the bytes received, blank line included
    complete: bool = True  # False: the stream ended inside this event
    first: bool = False  # the stream's first event, which alone may begin with a byte order mark


class EventTooLarge(Exception):
    """An event passed the limit; `size` bytes of it were held. The splitter is of no further use."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"an SSE event of more than {limit} bytes ({size} held, no blank line yet)")
        self.size = size


class SseSplitter:
    """Joining .raw over all events gives the input back, however it was sliced. Source: WHATWG HTML, event streams."""

    def __init__(self, max_event_bytes: int = 1 << 20) -> None:
        self._buffer, self._max_event_bytes = bytearray(), max_event_bytes
        self._searched = 0  # no blank line starts before this offset, so long events stay O(n)
        self._first = True

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events that `data` completes. Raises EventTooLarge.

        A final CR that may be the first half of CRLF ends its event only when the next byte, or `close`, decides.
        """
        buffer = self._buffer
        buffer += data
        events: list[SseEvent] = []
        start, search = 0, self._searched
        while blank := _BLANK_LINE.search(buffer, search):
            end = blank.end()
            if end == len(buffer) and buffer.endswith(b"\r"):
                break
            events.append(self._event(bytes(buffer[start:end])))
            start = search = end
        del buffer[:start]
        self._searched = max(0, len(buffer) - 3)
        if len(buffer) > self._max_event_bytes:
            raise EventTooLarge(len(buffer), self._max_event_bytes)
        return events

    def close(self) -> list[SseEvent]:
        """Return what is left: nothing, or one event that is incomplete unless only its CR was in doubt."""
        if not self._buffer:
            return []
        raw = bytes(self._buffer)
        self._buffer.clear()
        return [self._event(raw, complete=_BLANK_LINE.search(raw) is not None)]

    def _event(self, raw: bytes, complete: bool = True) -> SseEvent:
        event = SseEvent(raw, complete, self._first)
        self._first = False
        return event


@dataclass(frozen=True, slots=True)
class SseFields:
    """An event's meaning. `data` is None where the event has no data line; then no client sees an event at all."""

    data: bytes | None
    name: bytes = b""  # of the `event:` field
    comments: int = 0


def read_fields(event: SseEvent) -> SseFields:
    """Fields of one event: data lines joined by LF, one space after the colon dropped. `id` and `retry` are ignored."""
    raw = event.raw
    if event.first and raw.startswith(_BOM):
        raw = raw[len(_BOM) :]
    data: list[bytes] = []
    name, comments = b"", 0
    for line in _LINE_END.split(raw):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif line and not field:
            comments += 1
    return SseFields(b"\n".join(data) if data else None, name, comments)
