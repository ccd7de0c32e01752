"""Keep a client's credentials out of what is recorded. Pure.

Headers and queries are never recorded. But a server may quote a key in what it answers ("Incorrect API key provided"),
and an error of the transport may quote an address: so whatever is kept in raw form is cleaned of this request's own.
"""

import re
from urllib.parse import unquote_to_bytes

from proxy.headers import HeaderList

_HEADERS = re.compile(rb"authorization|cookie|api-?key|token|secret|password", re.IGNORECASE)
_QUERY = re.compile(rb"key|token|secret|password|signature", re.IGNORECASE)
_SHORTEST = 6  # bytes: what is shorter is no key, and would be found in any text
MASK = b"[credential]"


class Secrets:
    """The credentials of one request; found only when there is something to clean."""

    def __init__(self, headers: HeaderList, query: bytes) -> None:
        self._headers, self._query = headers, query
        self._pattern: re.Pattern[bytes] | None = None
        self._searched = False

    def clean(self, data: bytes) -> bytes:
        if not self._searched:
            self._searched = True
            found = sorted(_in_headers(self._headers) | _in_query(self._query), key=len, reverse=True)
            self._pattern = re.compile(b"|".join(map(re.escape, found))) if found else None
        return self._pattern.sub(MASK, data) if self._pattern else data

    def clean_text(self, text: str | None) -> str | None:
        return None if text is None else self.clean(text.encode("utf-8", "replace")).decode("utf-8", "replace")


def _in_headers(headers: HeaderList) -> set[bytes]:
    """Each word of them: of `Bearer KEY` the key, of cookies their values."""
    words: set[bytes] = set()
    for name, value in headers:
        if _HEADERS.search(name):
            words.update(word.partition(b"=")[2] or word for word in re.split(rb"[\s;,]+", value))
            words.update(re.split(rb"[\s;,]+", value))
    return _long(words)


def _in_query(query: bytes) -> set[bytes]:
    words: set[bytes] = set()
    for name, separator, value in (pair.partition(b"=") for pair in query.split(b"&")):
        if separator and _QUERY.search(name):
            words |= {value, unquote_to_bytes(value)}
    return _long(words)


def _long(words: set[bytes]) -> set[bytes]:
    return {word for word in words if len(word) >= _SHORTEST and word.lower() != b"bearer"}
