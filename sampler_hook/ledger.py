"""Whose a row of a step's batch is, and what of it has been counted before. No torch, no vLLM.

A step computes rows (tokens) of many requests at once. Each row belongs to one slot, a (request, phase) whose counts
add up on the device; this says which slot each row has, and which slots are to be written down.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sparseety.records import Phase

EVERY = 64  # tokens of one slot: so many a killed process loses at most


@dataclass(frozen=True, slots=True)
class Rows:
    """What one step computed for one request."""

    engine_id: str
    count: int
    start: int  # position of the first row's token
    prompt_len: int
    drafts: int = 0  # of the rows, the last ones: tokens that were only proposed
    exact: bool = True  # False: `start` may be too high, by drafts that were rejected meanwhile


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring rows of one request and phase."""

    engine_id: str
    phase: Phase
    start: int | None
    count: int
    drafts: int = 0


@dataclass(slots=True)
class Slot:
    """A sum that is being made: fields as in records.Sparsity. `index` is its row in the device's table."""

    index: int
    engine_id: str
    phase: Phase
    tokens: int = 0
    drafts: int = 0
    positions: list[tuple[int, int]] = field(default_factory=list)
    step: int | None = None

    def add(self, segment: Segment, step: int | None) -> None:
        self.tokens += segment.count
        self.drafts += segment.drafts
        self.step = step
        if segment.start is None:
            return
        if self.positions and sum(self.positions[-1]) == segment.start:
            first, count = self.positions[-1]
            self.positions[-1] = (first, count + segment.count)
        else:
            self.positions.append((segment.start, segment.count))


class Ledger:
    """Follows the requests of one worker."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._computed: dict[str, int] = {}  # by request: positions below were counted, and stand
        self._slots: dict[tuple[str, Phase], Slot] = {}
        self._free: list[int] = []
        self.capacity = 0  # slots ever needed at once: rows that the device's table must have

    @property
    def requests(self) -> int:
        """How many are followed."""
        return len(self._computed)

    def segments(self, rows: Iterable[Rows]) -> list[Segment]:
        """A step's rows in their order, cut where the phase changes. To be called once a step."""
        return [segment for each in rows for segment in self._cut(each)]

    def place(self, segments: Iterable[Segment], step: int | None) -> list[int]:
        """Give each row its slot; returns the slots' indexes, one a row."""
        indexes: list[int] = []
        for segment in segments:
            slot = self._slot(segment.engine_id, segment.phase)
            slot.add(segment, step)
            indexes += [slot.index] * segment.count
        return indexes

    def due(self, at_least: int | None = None) -> list[Slot]:
        """The slots that have enough to be written down; they begin anew."""
        enough = at_least or self._every
        found = [slot for slot in self._slots.values() if slot.tokens >= enough]
        for slot in found:
            self._slots[slot.engine_id, slot.phase] = Slot(slot.index, slot.engine_id, slot.phase)
        return found

    def finished(self, engine_ids: Iterable[str] | None = None) -> list[Slot]:
        """What is left of requests that have ended (None: all), to be written down and forgotten."""
        gone = set(self._computed) if engine_ids is None else set(engine_ids) & set(self._computed)
        found = [slot for slot in self._slots.values() if slot.engine_id in gone]
        for slot in found:
            del self._slots[slot.engine_id, slot.phase]
            self._free.append(slot.index)
        for engine_id in gone:
            del self._computed[engine_id]
        return [slot for slot in found if slot.tokens]

    def _slot(self, engine_id: str, phase: Phase) -> Slot:
        slot = self._slots.get((engine_id, phase))
        if slot is None:
            if self._free:
                index = self._free.pop()
            else:
                index, self.capacity = self.capacity, self.capacity + 1
            slot = self._slots[engine_id, phase] = Slot(index, engine_id, phase)
        return slot

    def _cut(self, rows: Rows) -> list[Segment]:
        """A position computed again (the request was preempted) is no second observation of it, so it gets a phase of
        its own. A rejected draft's position is not computed again but for the first time: the draft did not stand."""
        start, end = rows.start, rows.start + rows.count
        computed = self._computed.get(rows.engine_id, 0)
        again = max(start, min(end, computed)) if rows.exact else start
        prompt = max(again, min(end, rows.prompt_len))
        self._computed[rows.engine_id] = max(computed, start, end - rows.drafts) if rows.exact else computed
        cuts: list[tuple[Phase, int, int]] = [
            ("recomputed", start, again),
            ("prefill", again, prompt),
            ("decode", prompt, end),
        ]
        found = [
            Segment(rows.engine_id, phase, first if rows.exact else None, last - first)
            for phase, first, last in cuts
            if last > first
        ]
        if found and rows.drafts:
            found[-1] = replace(found[-1], drafts=min(rows.drafts, found[-1].count))
        return found
