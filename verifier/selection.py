"""Which requests of the logs are wanted: by when they began, by name. Pure."""

import math
import re
from dataclasses import dataclass
from datetime import datetime

from verifier.findings import RequestVerdict

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # what a server puts before the client's X-Request-Id


@dataclass(frozen=True, slots=True)
class Selection:
    """Empty: all of them. Times are Unix seconds."""

    since: float | None = None
    until: float | None = None
    names: frozenset[str] = frozenset()

    def takes(self, verdict: RequestVerdict) -> bool:
        """A request whose beginning is lost may have been of that time, so it is taken."""
        if self.names and self.names.isdisjoint(names_of(verdict)):
            return False
        if verdict.ts is None:
            return True
        return (self.since is None or verdict.ts >= self.since) and (self.until is None or verdict.ts < self.until)


def names_of(verdict: RequestVerdict) -> set[str]:
    """Every name that somebody may know it by."""
    names = {verdict.request_id, verdict.uuid or verdict.request_id, verdict.x_request_id or verdict.request_id}
    return names | {name.removeprefix(prefix) for name in names for prefix in _PREFIXES}


def point_in_time(text: str, now: float) -> float:
    """Unix seconds of `2h` (ago), or of an ISO 8601 time; without a zone, of this machine's. Raises ValueError."""
    if (ago := _AGO.fullmatch(text.strip())) and math.isfinite(float(ago[1])):
        return now - float(ago[1]) * _SECONDS[ago[2]]
    return datetime.fromisoformat(text.strip()).timestamp()
