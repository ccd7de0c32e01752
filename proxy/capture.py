"""What one request and its reply say, as records. No socket, no clock, no asyncio: bytes and times in, records out.

It knows neither the server in front nor the HTTP library behind, so it can be mounted on any.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from proxy import headers as header_lists
from proxy.events import EventReader
from proxy.headers import HeaderList
from proxy.inflate import Bounds, CannotInflate, Inflater
from proxy.request import read_parameters
from proxy.secrets import Secrets
from proxy.tally import Tally
from sparseety.chunks import ReplyBody, Unreadable
from sparseety.dialects import DIALECTS
from sparseety.records import (
    AnyRecord,
    Endpoint,
    Gap,
    Outcome,
    RequestStart,
    Response,
    Stamps,
    StreamDone,
)

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a body is copied. What is forwarded has no limit."""

    body_bytes: int = 32 << 20  # of a request, or of a reply that is no event stream; inflated, if it is compressed
    event_bytes: int = 1 << 20  # of one event of a stream
    stream_bytes: int = 1 << 30  # that a compressed stream inflates to; one that is not compressed has no limit


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    path: str  # percent-decoded as the server behind does it to find its endpoint; without the query
    headers: HeaderList
    query: bytes = b""  # to know the credentials in it; never recorded

    @property
    def endpoint(self) -> Endpoint | None:
        return ENDPOINTS.get(self.path) if self.method == "POST" else None


class _Copy:
    """A copy of a body, inflated where it is compressed, and given up where that fails or it passes its limit."""

    def __init__(self, limit: int, coding: str | None) -> None:
        self._parts: list[bytes] = []
        self._limit, self._size = limit, 0
        self._inflater: Inflater | None = None
        self.given_up: str | None = None  # why there is no copy
        if coding is not None:
            try:
                self._inflater = Inflater(coding, Bounds(limit))
            except CannotInflate as error:
                self.given_up = str(error)

    def add(self, data: bytes) -> None:
        if self.given_up:
            return
        if self._inflater:
            try:
                data = self._inflater.feed(data)
            except CannotInflate as error:
                self._give_up(str(error))
        self._size += len(data)
        if self._size > self._limit:
            self._give_up(f"body of more than {self._limit} bytes")
        if not self.given_up:
            self._parts.append(data)

    def _give_up(self, reason: str) -> None:
        self.given_up = self.given_up or reason
        self._parts.clear()

    def take(self) -> bytes | None:
        """The whole body; None: there is no copy, and `given_up` says why."""
        if self._inflater and not self._inflater.over:
            self._give_up("the compressed body is cut off")
        if self.given_up:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class RequestCapture:
    """One request, from its head to its end. Each method returns the records that are due; the caller writes them."""

    def __init__(
        self, number: int, uuid: str, head: RequestHead, arrived: float, limits: Limits, tally: Tally | None = None
    ) -> None:
        """number: the log writer's own request number. arrived: when the head was there. tally: told what is read."""
        self._tally = tally
        self._number, self._uuid, self._head, self._arrived, self._limits = number, uuid, head, arrived, limits
        self._endpoint = head.endpoint
        self._secrets = Secrets(head.headers, head.query)
        coding = header_lists.content_coding(head.headers)
        self._request: _Copy | None = _Copy(limits.body_bytes, coding) if self._endpoint else None
        self.started = False  # request_start has been returned
        self._sent: float | None = None
        self._headers_at: float | None = None
        self._first_chunk: float | None = None
        self._status: int | None = None
        self._inflater: Inflater | None = None  # of an event stream; None: it is not compressed
        self._stream: EventReader | None = None  # None: the reply is no event stream
        self._readable = True  # False: an event stream that is forwarded and not read (any more); a gap has said why
        self._reply: _Copy | None = None  # None: the reply is an event stream, or no endpoint's
        self._reads, self._bytes, self._hash = 0, 0, hashlib.sha256()

    # ---------------------------------------------------------------------------------------------- the request

    def request_body(self, data: bytes, ts: float) -> list[AnyRecord]:
        """A part of the request's body has been forwarded."""
        if self._request is None:
            return []
        self._request.add(data)
        if not self._request.given_up:
            return []
        return self._start(ts)

    def request_ended(self, ts: float) -> list[AnyRecord]:
        """The request's last byte has been handed to the upstream connection."""
        self._sent = ts
        return self._start(ts, complete=True)

    def _start(self, ts: float, *, complete: bool = False) -> list[AnyRecord]:
        """What was sent is known as far as it ever will be; complete: the body has come to its end."""
        if self.started:
            return []
        self.started = True
        copy, self._request = self._request, None
        body = copy.take() if copy and complete else None
        headers = self._head.headers
        parameters = read_parameters(body, self._endpoint) if body and self._endpoint else None
        if self._tally:
            self._tally.parameters = parameters
        records: list[AnyRecord] = [
            RequestStart(
                ts=self._arrived,
                capture=self._number,
                uuid=self._uuid,
                method=self._head.method,
                path=self._head.path,
                endpoint=self._endpoint,
                x_request_id=_text(header_lists.get(headers, b"x-request-id")),
                session=_text(header_lists.get(headers, b"x-session-id")),
                parameters=parameters,
            )
        ]
        if copy and copy.given_up:
            records.append(self._gap(ts, f"request: {copy.given_up}"))
        return records

    # ------------------------------------------------------------------------------------------------ the reply

    def reply_head(self, status: int, headers: HeaderList, ts: float) -> list[AnyRecord]:
        records = self._start(ts)  # the server may answer before it has read the whole request
        self._status, self._headers_at = status, ts
        coding = header_lists.content_coding(headers)
        if not header_lists.is_event_stream(headers):
            self._reply = _Copy(self._limits.body_bytes, coding) if self._endpoint else None
            return records
        dialect = DIALECTS[self._endpoint] if self._endpoint else None
        self._stream = EventReader(self._number, dialect, self._limits.event_bytes, self._secrets.clean, self._tally)
        if coding:
            try:
                self._inflater = Inflater(coding, Bounds(self._limits.stream_bytes))
            except CannotInflate as error:
                records.extend(self._unreadable(error, ts))
        return records

    def reply_body(self, data: bytes, ts: float) -> Sequence[AnyRecord]:
        """One read of the reply's body has been forwarded; ts: when it was received."""
        if self._first_chunk is None:
            self._first_chunk = ts
        self._reads += 1
        self._bytes += len(data)
        stream = self._stream
        if stream is None:
            if self._reply:
                self._hash.update(data)
                self._reply.add(data)
            return []
        self._hash.update(data)
        if not self._readable:
            return []
        if self._inflater:
            try:
                data = self._inflater.feed(data)
            except CannotInflate as error:
                return self._unreadable(error, ts)
        return stream.feed(data, self._reads, ts)

    def _unreadable(self, error: CannotInflate, ts: float) -> list[AnyRecord]:
        """The rest of this stream is forwarded, counted and hashed, but not read."""
        self._readable = False
        if self._tally:
            self._tally.unread = True
        return [self._gap(ts, f"event stream: {error}")] if self._endpoint else []

    def ended(self, outcome: Outcome, ts: float, error: str | None = None) -> list[AnyRecord]:
        """The request is over, in whatever way. To be called once, last."""
        records = self._start(ts)
        error = self._secrets.clean_text(error)
        if self._stream is None or self._status is None:
            return [*records, self._response(outcome, ts, error)]
        if self._readable:
            records.extend(self._stream.close())
        if self._tally:
            self._tally.characters = self._stream.total_text_len
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
        if self._tally and unread:
            self._tally.unread = True
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
        if self._endpoint is None or self._status is None or self._reply is None:
            return nothing, None
        if not 200 <= self._status < 300:
            return nothing, f"status {self._status}"
        if outcome != "complete":
            return nothing, "cut off"
        body = self._reply.take()
        if body is None:
            return nothing, self._reply.given_up
        try:
            reply = DIALECTS[self._endpoint].read_reply(body)
        except Unreadable as error:
            return nothing, str(error)
        if self._tally:
            self._tally.reply(reply, body)
        return reply, None

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
