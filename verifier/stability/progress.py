"""How far a run is, on stderr: a bar for each stage where a person looks on, else a plain line now and then."""

import sys
import time
from typing import TextIO

_EVERY, _EVERY_PLAIN = 0.2, 15.0  # seconds
_WIDTH = 20


class StageProgress:
    def __init__(self, stream: TextIO | None = None, *, wanted: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._wanted, self._terminal = wanted, self._stream.isatty()
        self._name, self._began, self._shown = "", 0.0, 0.0

    def __call__(self, name: str, done: int, total: int, failed: int) -> None:
        """E.g. ("a1 at 8, cold", 3, 120, 0): 3 of 120 requests are done, none of them failed."""
        now = time.monotonic()
        if name != self._name:
            self._name, self._began, self._shown = name, now, now if done < total else 0.0
            if self._terminal:
                self._shown = 0.0
        last = done >= total
        if not self._wanted or (not last and now - self._shown < (_EVERY if self._terminal else _EVERY_PLAIN)):
            return
        self._shown = now
        told = f"{done}/{total}   {failed} errors"
        if done and not last:
            told += f"   {(now - self._began) / done * (total - done):.0f} s left"
        if self._terminal:
            full = _WIDTH * done // total if total else _WIDTH
            self._stream.write(f"\r  {name:<24} {'█' * full}{'░' * (_WIDTH - full)} {told}\x1b[K")
            self._stream.write("\n" if last else "")
        else:
            self._stream.write(f"{name}: {told}\n")
        self._stream.flush()
