"""Cut a byte stream into SSE events. No socket, no clock, no asyncio."""

import re

import msgspec

# CRLF, CR and LF are SSE's only line ends (U+2028 is payload, so no str.splitlines()). Atomic groups keep
# one CRLF from counting as two ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
_LF = 0x0A


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    raw: bytes  # as received, blank line included; empty where it was too long to be kept
    complete: bool = True  # False: the stream ended inside this event
    first: bool = False  # the stream's first event, which alone may begin with a byte order mark
    dropped: int = 0  # bytes of an event that was too long to be kept
    line: bytes | None = None  # its data, where it is one line of data and a blank one; None: not looked for


class SseSplitter:
    """Cuts the same events out of a stream however it was sliced. Source: WHATWG HTML, event streams.

    Joining .raw over all events gives the input back, less events that were dropped, and less an LF that came in a
    later read than the CR before it: a CR ends its line at once, for whoever waits for its LF is one event late with
    a server that sends none.
    """

    def __init__(self, max_event_bytes: int = 1 << 20) -> None:
        """Events of more than max_event_bytes are dropped, and no more than that is held of one."""
        self._buffer, self._max_event_bytes = bytearray(), max_event_bytes
        self._searched = 0  # no blank line starts before this offset, so long events stay O(n)
        self._dropped = 0  # bytes of the event at hand that were thrown away
        self._after_cr = False  # the last event ended in a CR: an LF that comes now belongs to it
        self._first = True

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events that `data` completes."""
        if self._after_cr and data:
            self._after_cr = False
            if data[0] == _LF:
                data = data[1:]
        if not self._buffer and not self._dropped and data.endswith(b"\n\n") and b"\r" not in data:
            size = len(data)
            if size <= self._max_event_bytes and data.startswith(b"data: ") and data.find(b"\n") == size - 2:
                self._first = False
                return [SseEvent(data, line=data[6:-2])]  # nearly every read of a stream
            *events, rest = data.split(b"\n\n")
            self._buffer += rest  # one LF, where there were three at the end
            return [self._event(raw + b"\n\n") for raw in events]
        self._buffer += data
        return self._cut()

    def close(self) -> list[SseEvent]:
        """Return what is left: nothing, or the event that the stream ended in."""
        raw, dropped = bytes(self._buffer), self._dropped
        self._buffer.clear()
        self._dropped = 0
        return [self._event(raw, dropped, complete=False)] if raw or dropped else []

    def _cut(self) -> list[SseEvent]:
        buffer = self._buffer
        events: list[SseEvent] = []
        start, search = 0, self._searched
        while blank := _BLANK_LINE.search(buffer, search):
            end = blank.end()
            self._after_cr = end == len(buffer) and buffer.endswith(b"\r")
            events.append(self._event(bytes(buffer[start:end]), self._dropped))
            self._dropped = 0
            start = search = end
        del buffer[:start]
        keep = 3  # a blank line of four bytes may have begun
        if len(buffer) > self._max_event_bytes:
            self._dropped += len(buffer) - keep
            del buffer[:-keep]
        self._searched = max(0, len(buffer) - keep)
        return events

    def _event(self, raw: bytes, dropped: int = 0, *, complete: bool = True) -> SseEvent:
        first, self._first = self._first, False
        size = dropped + len(raw)
        if size > self._max_event_bytes:
            return SseEvent(b"", complete, first, size)
        return SseEvent(raw, complete, first)


class SseFields(msgspec.Struct, frozen=True, gc=False):
    """An event's meaning. `data` is None where the event has no data line; then no client sees an event at all."""

    data: bytes | None
    name: bytes = b""  # of the `event:` field
    comments: int = 0
    error: bool = False  # it has a field `error`, which the standard does not know and some servers send


def read_fields(event: SseEvent) -> SseFields:
    """Fields of one event: data lines joined by LF, one space after the colon dropped. `id` and `retry` are ignored."""
    if event.line is not None:
        return SseFields(event.line)
    raw = event.raw
    if event.first and raw.startswith(_BOM):
        raw = raw[len(_BOM) :]
    data: list[bytes] = []
    name, comments, error = b"", 0, False
    for line in _LINE_END.split(raw):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif field == b"error":
            error = True
        elif line and not field:
            comments += 1
    return SseFields(b"\n".join(data) if data else None, name, comments, error)
