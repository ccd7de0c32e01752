"""Raw header lists: (name, value) pairs of bytes, order and duplicates kept, names in lower case as in ASGI. Pure."""

from collections.abc import Sequence

HeaderList = Sequence[tuple[bytes, bytes]]

# RFC 9110 7.6.1: these speak about one connection, not about the message. `trailer` is among them because it announces
# fields that ASGI cannot carry on.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)

# A `Connection: content-length` would take away the framing of the body, or the name of the host: RFC 9110 forbids to
# send such an option, so one that arrives is a mistake or an attack.
_NEVER_DROPPED = frozenset({b"content-length", b"host"})


def get(headers: HeaderList, name: bytes) -> bytes | None:
    """The first value of a header."""
    for key, value in headers:
        if key == name:
            return value
    return None


def end_to_end(headers: HeaderList) -> list[tuple[bytes, bytes]]:
    """The headers that belong to the message, in the order they came, less what `Connection` names."""
    kept = [field for field in headers if field[0] not in HOP_BY_HOP]
    if len(kept) == len(headers):
        return kept  # so there was no Connection either
    named = {option.strip().lower() for value in _values(headers, b"connection") for option in value.split(b",")}
    dropped = named - _NEVER_DROPPED
    return [field for field in kept if field[0] not in dropped]


def for_upstream(headers: HeaderList, authority: bytes) -> list[tuple[bytes, bytes]]:
    """The client's headers as they go upstream. Only what the framing of that connection needs is put in.

    A chunked body has no length to announce, so it stays chunked; a request of HTTP/1.0 may have no Host, which
    HTTP/1.1 demands.
    """
    kept = end_to_end(headers)
    if get(headers, b"transfer-encoding") is not None:
        # RFC 9112 6.3: with a transfer coding the length does not count, and both together are how smuggling starts.
        kept = [field for field in kept if field[0] != b"content-length"]
        kept.append((b"transfer-encoding", b"chunked"))
    if get(kept, b"host") is None:
        kept.insert(0, (b"host", authority))
    return kept


def is_event_stream(headers: HeaderList) -> bool:
    value = get(headers, b"content-type") or b""
    return value.partition(b";")[0].strip().lower() == b"text/event-stream"


def content_coding(headers: HeaderList) -> str | None:
    """What the body is compressed with; None: it is not."""
    values = _values(headers, b"content-encoding")
    if not values:
        return None
    codings = [value.strip().lower() for value in values]
    codings = [coding for coding in codings if coding not in (b"", b"identity")]
    return b", ".join(codings).decode("latin-1") if codings else None


def _values(headers: HeaderList, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]
