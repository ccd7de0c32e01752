"""The proxy's counters: plain integers that relay and recording add to. Without a metrics library, so that the capture
can be mounted where there is none."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (endpoint, outcome), ended ones
    chunks: int = 0  # records of stream events
    open_streams: int = 0
    capture_failures: int = 0  # requests whose capture was switched off by an exception
