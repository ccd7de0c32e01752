"""Inflate a copy of a compressed body, read by read, within bounds. No socket, no clock, no asyncio.

What is forwarded stays as it came. gzip and deflate come with Python; br and zstd are read where the packages brotli
and zstandard are installed.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

_SLACK = 1 << 20  # bytes that any body may inflate to, whatever the ratio
_ZSTD_SLICE = 256  # coded bytes at a time: zstandard bounds no output, and four bytes may stand for 128 KiB
_ZSTD_WINDOW = 8 << 20  # RFC 9659: no more is needed to read what is sent over HTTP
_STEP = 1 << 20  # bytes of one output from brotli


class CannotInflate(Exception):
    """The message says why, without content. The inflater is of no further use."""


@dataclass(frozen=True, slots=True)
class Bounds:
    total: int  # bytes that one body may inflate to
    ratio: int = 200  # inflated bytes for each coded one, beyond the first MiB


class _Decoder(Protocol):
    @property
    def over(self) -> bool:
        """The coded data has come to its own end."""

    def decode(self, data: bytes, limit: int) -> Iterator[bytes]:
        """What `data` inflates to, in pieces. One that knows how makes no more than `limit` bytes in all."""


class Inflater:
    """One body."""

    def __init__(self, coding: str, bounds: Bounds) -> None:
        """coding: as Content-Encoding has it, in lower case. Raises CannotInflate: not one that can be read here."""
        make = _DECODERS.get(coding)
        if make is None:
            raise CannotInflate(f"content coding {coding} is not known")
        try:
            self._decoder = make()
        except ImportError as error:
            raise CannotInflate(f"content coding {coding} needs the package {error.name}") from None
        self._coding, self._bounds = coding, bounds
        self._taken, self._given = 0, 0

    @property
    def over(self) -> bool:
        """The body is whole. False after its last byte: it was cut off."""
        return self._decoder.over or not self._taken

    def feed(self, data: bytes) -> bytes:
        """What this read inflates to, perhaps nothing. Raises CannotInflate."""
        self._taken += len(data)
        allowed = min(self._bounds.total, _SLACK + self._bounds.ratio * self._taken)
        parts = []
        try:
            for part in self._decoder.decode(data, allowed - self._given + 1):
                self._given += len(part)
                if self._given > allowed:
                    raise CannotInflate(f"{self._coding} inflates to more than {allowed} bytes")
                parts.append(part)
        except CannotInflate:
            raise
        except Exception as error:  # noqa: BLE001 -- each library has errors of its own, all of them about the data
            raise CannotInflate(f"not {self._coding}: {type(error).__name__}") from None
        return b"".join(parts)


class _Zlib:
    """gzip (also several members, one after another) and deflate (as the RFC says, or without its header)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._object: Any = None
        self._head = b""  # the first byte of a deflate body, which alone does not tell its form

    @property
    def over(self) -> bool:
        return self._object is not None and bool(self._object.eof)

    def decode(self, data: bytes, limit: int) -> Iterator[bytes]:
        if self._object is None:
            data, self._head = self._head + data, b""
            if len(data) < 2:
                self._head = data
                return
            self._object = zlib.decompressobj(self._window_of(data))
        while data:
            if self._object.eof:
                if self._window != _GZIP or not data.strip(b"\0"):  # padding is allowed behind a member
                    return
                self._object = zlib.decompressobj(_GZIP)
            part = self._object.decompress(data, limit)
            limit = max(1, limit - len(part))
            data = self._object.unconsumed_tail or self._object.unused_data
            yield part

    def _window_of(self, head: bytes) -> int:
        if self._window == _GZIP:
            return _GZIP
        has_header = head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0
        return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


_GZIP = zlib.MAX_WBITS | 16


class _Brotli:
    def __init__(self) -> None:
        import brotli

        if not hasattr(brotli.Decompressor, "can_accept_more_data"):  # before 1.2 its output has no bound
            raise ImportError(name="brotli>=1.2")
        self._object = brotli.Decompressor()

    @property
    def over(self) -> bool:
        return bool(self._object.is_finished())

    def decode(self, data: bytes, limit: int) -> Iterator[bytes]:
        yield self._object.process(data, output_buffer_limit=_STEP)
        while not self._object.can_accept_more_data():
            yield self._object.process(b"", output_buffer_limit=_STEP)


class _Zstd:
    def __init__(self) -> None:
        import zstandard

        self._make: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj
        self._object = self._make()

    @property
    def over(self) -> bool:
        return bool(self._object.eof)

    def decode(self, data: bytes, limit: int) -> Iterator[bytes]:
        while data:
            if self._object.eof:
                self._object = self._make()  # another frame
            part, data = data[:_ZSTD_SLICE], data[_ZSTD_SLICE:]
            yield self._object.decompress(part)
            data = self._object.unused_data + data if self._object.eof else data


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gzip": lambda: _Zlib(_GZIP),
    "x-gzip": lambda: _Zlib(_GZIP),
    "deflate": lambda: _Zlib(zlib.MAX_WBITS),
    "br": _Brotli,
    "zstd": _Zstd,
}
