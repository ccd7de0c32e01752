"""How far a run is, on stderr, where a person looks on."""

import sys
import time
from typing import TextIO

_EVERY = 0.2  # seconds


class Progress:
    """Rewrites one line. Silent where stderr is no terminal."""

    def __init__(self, stream: TextIO | None = None, *, wanted: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._wanted = wanted and self._stream.isatty()
        self._shown, self._width = 0.0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """E.g. ("reading", 3, 12): 3 of 12 are read."""
        now = time.monotonic()
        if not self._wanted or (now - self._shown < _EVERY and done < total):
            return
        self._shown = now
        line = f"{what} {done}/{total}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
