"""Unix time that never jumps."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns Unix seconds, in steps of a microsecond."""


def monotonic_clock() -> Clock:
    """A clock anchored to the wall clock once, now, and advanced by the monotonic clock: later steps of the wall clock
    (NTP, an operator) change no duration and no order in a log."""
    anchor = time.time_ns() - time.monotonic_ns()
    return lambda: (anchor + time.monotonic_ns()) // 1000 / 1e6
