"""What one request and its reply say, as records. No socket, no clock, no asyncio: bytes and times in, records out.

It knows neither the server in front nor the HTTP library behind, so it can be mounted on any.
"""

import hashlib
from dataclasses import dataclass

from proxy import headers as header_lists
from proxy.events import EventReader
from proxy.headers import HeaderList
from proxy.request import read_parameters
from sparseety.chunks import ReplyBody, Unreadable, read_reply
from sparseety.records import AnyRecord, Endpoint, Gap, Outcome, RequestStart, Response, Stamps, StreamDone
from sparseety.sse import EventTooLarge

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a body is copied. What is forwarded has no limit."""

    body_bytes: int = 32 << 20  # of a request, or of a reply that is no event stream
    event_bytes: int = 1 << 20  # of one event of a stream


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    path: str  # percent-decoded as the server behind does it to find its endpoint; without the query
    headers: HeaderList

    @property
    def endpoint(self) -> Endpoint | None:
        return ENDPOINTS.get(self.path) if self.method == "POST" else None


class _Copy:
    """A copy of a body, given up where it passes its limit."""

    def __init__(self, limit: int) -> None:
        self._parts: list[bytes] = []
        self._limit, self._size = limit, 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self.complete:
            self._parts.append(data)
        else:
            self._parts.clear()

    @property
    def complete(self) -> bool:
        return self._size <= self._limit

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class RequestCapture:
    """One request, from its head to its end. Each method returns the records that are due; the caller writes them."""

    def __init__(self, number: int, uuid: str, head: RequestHead, arrived: float, limits: Limits) -> None:
        """number: the log writer's own request number. arrived: when the head was there."""
        self._number, self._uuid, self._head, self._arrived, self._limits = number, uuid, head, arrived, limits
        self._endpoint = head.endpoint
        self._request: _Copy | None = _Copy(limits.body_bytes) if self._endpoint else None
        self._started = False  # request_start has been returned
        self._sent: float | None = None
        self._headers_at: float | None = None
        self._first_chunk: float | None = None
        self._status: int | None = None
        self._coding: str | None = None
        self._stream: EventReader | None = None  # None: the reply is no event stream
        self._readable = True  # False: an event stream that is forwarded and not read (any more); a gap has said why
        self._reply = _Copy(limits.body_bytes)
        self._reads, self._bytes, self._hash = 0, 0, hashlib.sha256()

    # ---------------------------------------------------------------------------------------------- the request

    def request_body(self, data: bytes, ts: float) -> list[AnyRecord]:
        """A part of the request's body has been forwarded."""
        if self._request is None:
            return []
        self._request.add(data)
        if self._request.complete:
            return []
        self._request = None
        return [*self._start(), self._gap(ts, f"request body of more than {self._limits.body_bytes} bytes")]

    def request_ended(self, ts: float) -> list[AnyRecord]:
        """The request's last byte has been handed to the upstream connection."""
        self._sent = ts
        return self._start(complete=True)

    def _start(self, *, complete: bool = False) -> list[AnyRecord]:
        if self._started:
            return []
        self._started = True
        copy, self._request = self._request, None
        headers = self._head.headers
        return [
            RequestStart(
                ts=self._arrived,
                capture=self._number,
                uuid=self._uuid,
                method=self._head.method,
                path=self._head.path,
                endpoint=self._endpoint,
                x_request_id=_text(header_lists.get(headers, b"x-request-id")),
                session=_text(header_lists.get(headers, b"x-session-id")),
                parameters=read_parameters(copy.take(), self._endpoint)
                if copy and complete and self._endpoint
                else None,
            )
        ]

    # ------------------------------------------------------------------------------------------------ the reply

    def reply_head(self, status: int, headers: HeaderList, ts: float) -> list[AnyRecord]:
        records = self._start()  # the server may answer before it has read the whole request
        self._status, self._headers_at = status, ts
        self._coding = header_lists.content_coding(headers)
        if header_lists.is_event_stream(headers):
            parse = self._endpoint is not None
            self._stream = EventReader(self._number, parse=parse, max_event_bytes=self._limits.event_bytes)
            if self._coding:
                self._readable = False
                records.append(self._gap(ts, f"event stream in content coding {self._coding}"))
        return records

    def reply_body(self, data: bytes, ts: float) -> list[AnyRecord]:
        """One read of the reply's body has been forwarded; ts: when it was received."""
        if self._first_chunk is None:
            self._first_chunk = ts
        self._reads += 1
        self._bytes += len(data)
        if self._stream is None:
            if self._endpoint:
                self._hash.update(data)
                self._reply.add(data)
            return []
        self._hash.update(data)
        if not self._readable:
            return []
        try:
            return list(self._stream.feed(data, self._reads, ts))
        except EventTooLarge as error:
            self._readable = False
            return [self._gap(ts, str(error))]

    def ended(self, outcome: Outcome, ts: float, error: str | None = None) -> list[AnyRecord]:
        """The request is over, in whatever way. To be called once, last."""
        records = self._start()
        if self._stream is None or self._status is None:
            return [*records, self._response(outcome, ts, error)]
        if self._readable:
            records.extend(self._stream.close())
        records.append(
            StreamDone(
                ts=ts,
                capture=self._number,
                outcome=outcome,
                status=self._status,
                chunk_count=self._stream.chunk_count,
                total_text_len=self._stream.total_text_len,
                events=self._stream.events,
                reads=self._reads,
                bytes=self._bytes,
                sha256=self._hash.hexdigest(),
                end_marker=self._stream.end_marker,
                stamps=self._stamps(ts),
                usage=self._stream.usage,
                error=error,
            )
        )
        return records

    def _response(self, outcome: Outcome, ts: float, error: str | None) -> Response:
        reply, unread = self._read_reply(outcome)
        return Response(
            ts=ts,
            capture=self._number,
            outcome=outcome,
            stamps=self._stamps(ts),
            status=self._status,
            bytes=self._bytes,
            sha256=self._hash.hexdigest() if self._endpoint and self._status is not None else None,
            response_id=reply.response_id,
            choices=reply.choices,
            usage=reply.usage,
            unread=unread,
            error=error,
        )

    def _read_reply(self, outcome: Outcome) -> tuple[ReplyBody, str | None]:
        """The reply as far as it could be read, and why not if not."""
        nothing = ReplyBody()
        if self._endpoint is None or self._status is None:
            return nothing, None
        if not 200 <= self._status < 300:
            return nothing, f"status {self._status}"
        if outcome != "complete":
            return nothing, "cut off"
        if self._coding:
            return nothing, f"content coding {self._coding}"
        if not self._reply.complete:
            return nothing, f"body of more than {self._limits.body_bytes} bytes"
        try:
            return read_reply(self._reply.take()), None
        except Unreadable as error:
            return nothing, str(error)

    def _stamps(self, end: float) -> Stamps:
        return Stamps(
            sent=self._sent,
            headers=self._headers_at,
            first_chunk=self._first_chunk,
            first_token=self._stream.first_token if self._stream else None,
            last_token=self._stream.last_token if self._stream else None,
            end=end,
        )

    def _gap(self, ts: float, reason: str) -> Gap:
        return Gap(ts=ts, reason=reason, count=1, captures=[self._number])


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
