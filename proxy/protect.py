"""Pause the capture while its own cost delays the relay. The state machine is pure; `watch` is its shell.

A pause is the last resort: what is not captured cannot be verified. So it takes a cost that lasts, and it is the cost
of the capture that counts: a loop that is late for other reasons would be late without the capture too.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger("sparseety.proxy")

Reason = Literal["latency", "disk"]

LOOK_SECONDS = 0.1
CALM_SECONDS = 1.0  # so long without a delay ends a bad time: shorter lulls belong to it, as in a 99th percentile
LONGEST_HOLD = 600.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    lag: float = 0.02  # seconds by which the capture delays the event loop
    fill: float = 0.9  # share of the log's queue in use
    after: float = 30.0  # seconds that either may last


class Guard:
    """Decides whether to capture. It has no clock: each `look` says how much time has passed."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.paused: Reason | None = None
        self.spent = 0.0  # seconds of capture work since the last look; whoever does the work adds to it
        self._troubles: dict[Reason, _Trouble] = {"latency": _Trouble(), "disk": _Trouble()}
        self._well = 0.0  # while paused: seconds without trouble
        self._captured: float | None = None  # seconds since the last pause ended; None: there was none
        self._hold = thresholds.after  # seconds that things must be well before the capture resumes

    def look(self, elapsed: float, lag: float, fill: float) -> bool:
        """True: it has changed its mind.

        elapsed: seconds since the last look; lag: how late the event loop was in them; fill: share of the queue in use.
        """
        own, self.spent = min(lag, self.spent), 0.0
        if self.paused:
            return self._look_paused(elapsed, lag, fill)
        if self._captured is not None:
            self._captured += elapsed
        self._troubles["latency"].look(elapsed, own > self._thresholds.lag)
        self._troubles["disk"].look(elapsed, fill > self._thresholds.fill)
        for reason, trouble in self._troubles.items():
            if trouble.seconds > self._thresholds.after:
                self._pause(reason)
                return True
        return False

    def _pause(self, reason: Reason) -> None:
        # Where it comes back soon after a pause, the next one is longer; or it would go on and off for ever.
        again = self._captured is not None and self._captured < 10 * self._hold
        self._hold = min(LONGEST_HOLD, 2 * self._hold) if again else self._thresholds.after
        self.paused, self._well = reason, 0.0

    def _look_paused(self, elapsed: float, lag: float, fill: float) -> bool:
        """Without the capture its cost cannot be seen, so the whole loop must be well, by half the thresholds."""
        well = lag < self._thresholds.lag / 2 and fill < self._thresholds.fill / 2
        self._well = self._well + elapsed if well else 0.0
        if self._well <= self._hold:
            return False
        self.paused, self._captured = None, 0.0
        self._troubles = {"latency": _Trouble(), "disk": _Trouble()}
        return True


@dataclass(slots=True)
class _Trouble:
    """How long one kind of trouble has lasted."""

    seconds: float = 0.0
    calm: float = CALM_SECONDS  # since it was last seen

    def look(self, elapsed: float, seen: bool) -> None:
        self.calm = 0.0 if seen else self.calm + elapsed
        self.seconds = self.seconds + elapsed if self.calm < CALM_SECONDS else 0.0


async def watch(guard: Guard, fill: Callable[[], float], on_pause: Callable[[Reason], None]) -> None:
    """Look again and again, say what changes. Runs until it is cancelled."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        elapsed, last = now - last, now
        if not guard.look(elapsed, max(0.0, elapsed - LOOK_SECONDS), fill()):
            continue
        if guard.paused:
            on_pause(guard.paused)
            log.warning("capture paused, serving goes on: %s", _WHY[guard.paused])
        else:
            log.warning("capture resumed")


_WHY: dict[Reason, str] = {
    "latency": "its own work delays the relay (--protect-lag, --protect-after)",
    "disk": "the log's disk does not keep up and its queue stays full",
}
