"""Which engines' logs there are, and whether one of them may still name a reply. Pure."""

import math
from collections.abc import Callable

from verifier.judge import serves
from verifier.logs import CLOCK_SKEW, Log
from verifier.packed import OpenCapture


class Witnesses:
    def __init__(self, logs: Callable[[], list[Log]], to_come: Callable[[], float]) -> None:
        """logs: the engines' logs that were opened so far. to_come: when the first begins that was not; inf: none."""
        self._logs, self._to_come = logs, to_come

    def engines_known(self) -> bool:
        """It is known whether there are engines' logs at all."""
        return bool(self._logs()) or self.none()

    def none(self) -> bool:
        return not self._logs() and self._to_come() == math.inf

    def obliged(self, capture: OpenCapture) -> bool:
        """May there be a log that would have to hold this reply's request? Once no, it stays no."""
        if not self.engines_known():
            return True
        if capture.begin is None or capture.end is None:
            return False
        begin, end = capture.life
        return self._to_come() <= begin or any(
            not log.damaged
            and not log.sampled
            and not log.silent
            and log.opening is not None
            and log.opening.ts <= begin
            and (log.engine is None or serves(log, capture.begin.model))
            and not log.lost_between(begin - CLOCK_SKEW, end + CLOCK_SKEW)
            for log in self._logs()
        )
