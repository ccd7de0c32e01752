"""Requests that were read and not judged yet, and when each can be judged. Pure.

A request is judged once its reply has ended, the engine is done with it, and all logs are read past that time, so that
what else bears its id is known. Records may still come that would have changed the verdict: where clocks differ by more
than the skew allowed, or a log was put together in another order. Such requests are *contested*: everything is read
once more, and they are judged when all of it is known; that may show more of them, and so on, until it shows none. So
the order of reading decides about memory and time, not about verdicts.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sparseety.records import RequestAdded
from verifier.join import Group, began, reply_id
from verifier.logs import CLOCK_SKEW, Log, Loss, Writer, within
from verifier.orphans import Unnamed
from verifier.packed import Case, OpenCapture, Past, PastOfId, Served
from verifier.witnesses import Witnesses

HORIZON = 60.0  # seconds of log time after which the other side of a request is not waited for with all its content

_PAST_KEPT = 1_000_000  # ids of judged replies, where there is no end

Key = tuple[Writer, int]
"""A request: its writer, and the writer's number for it."""


@dataclass(slots=True)
class Contested:
    """Requests that were judged before everything about them was known."""

    ids: set[str] = field(default_factory=set)
    captures: set[Key] = field(default_factory=set)
    served: set[Key] = field(default_factory=set)
    losses: list[tuple[Writer, Loss]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.captures or self.served or self.losses)

    def __or__(self, other: "Contested") -> "Contested":
        losses = self.losses + [loss for loss in other.losses if loss not in self.losses]
        return Contested(self.ids | other.ids, self.captures | other.captures, self.served | other.served, losses)

    def has(self, captures: list[OpenCapture], served: list[Served]) -> bool:
        """Is any of these among them?"""
        return any(
            (capture.log.writer, capture.number) in self.captures
            or not self.ids.isdisjoint(capture.ids)
            or self._lost(capture.log, *capture.life)
            for capture in captures
        ) or any((one.log.writer, one.number) in self.served or self._lost(one.log, *one.life) for one in served)

    def _lost(self, log: Log, begin: float, end: float) -> bool:
        return any(w == log.writer and loss.begin <= end and loss.end >= begin for w, loss in self.losses)


class Waiting(NamedTuple):
    """What is not judged of a log's requests."""

    captures: list[int]
    served: list[int]
    first: int | None  # number of the first block that holds one of them


NOTHING = Waiting([], [], None)


class Pending:
    def __init__(self, witnesses: Witnesses, only: Contested | None = None, *, live: bool = False) -> None:
        """only: judge nothing but these, at the end. live: there is no end, so nothing waits longer than HORIZON."""
        self._live = live
        self._ended: set[int] = set()  # id(log): no more will come
        self._orphans: list[Served] = []  # let go of
        self._read_until = -math.inf
        self.contested = Contested()
        self.unnamed = Unnamed()
        self._witnesses, self._only = witnesses, only
        self._captures: dict[tuple[int, int], OpenCapture] = {}  # by (id(log), number)
        self._served: dict[tuple[int, int], Served] = {}
        self._groups: dict[str, Group] = {}
        self._past: dict[int, PastOfId] = {}  # by hash of the id
        self._judged_until: dict[int, float] = {}  # by id(log)
        self._due: list[tuple[float, int, int, str]] = []  # a heap: time, id(log), number, what
        self._order = itertools.count(1)  # of naming and judging

    def __len__(self) -> int:
        """Replies not judged."""
        return len(self._captures)

    # ---------------------------------------------------------------------------------------------- what was read

    def new_capture(self, capture: OpenCapture) -> OpenCapture:
        self._captures[id(capture.log), capture.number] = capture
        return capture

    def new_served(self, served: Served) -> Served:
        self._served[id(served.log), served.number] = served
        return served

    def capture(self, log: Log, number: int) -> OpenCapture | None:
        """None: it is judged, and should not have been."""
        capture = self._captures.get((id(log), number))
        if capture is None or capture.past is not None:
            self.contested.captures.add((log.writer, number))
            return None
        return capture

    def served(self, log: Log, number: int) -> Served | None:
        served = self._served.get((id(log), number))
        if served is None or served.judged:
            self.contested.served.add((log.writer, number))
        return served

    def named(self, capture: OpenCapture) -> None:
        """Its reply bears an id."""
        capture.named = next(self._order)
        self._group(capture.ids[0]).captures.append(capture)

    def ended(self, capture: OpenCapture) -> None:
        assert capture.end is not None  # that is what happened
        self._look_at(capture, capture.end.ts)
        self._look_again(capture.id)

    def added(self, served: Served, added: RequestAdded) -> None:
        """The engine has named its request."""
        if served.added is not None:  # twice: the last one counts
            self._groups[reply_id(served.added.external_id)[1]].served.remove(served)
        served.added = added
        _, name = reply_id(added.external_id)
        group = self._group(name)
        group.served.append(served)
        served.taken = hash(name) in self._past or any(one.past for one in group.captures)
        # What has a number behind its id may be a prompt that a judged reply was not known to have.
        for past in self._judged(name, group, added.ts if added.external_id == name else -math.inf):
            if past.changed_by(added, name):
                self.contested.ids.add(name)

    def finished(self, served: Served) -> None:
        assert served.finished is not None  # that is what happened
        heapq.heappush(self._due, (served.finished.ts + HORIZON, id(served.log), served.number, "served"))
        if served.added is not None:
            self._look_again(reply_id(served.added.external_id)[1])

    def lost(self, log: Log, loss: Loss) -> None:
        """Records are missing from a log: were all requests they may belong to still unjudged?"""
        if loss.begin <= self._judged_until.get(id(log), -math.inf):
            self.contested.losses.append((log.writer, loss))

    def logs_without_added(self) -> Iterator[Log]:
        """Logs that hold steps of requests whose beginning is not there."""
        return (served.log for served in self._served.values() if served.added is None)

    def _group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group())

    def _judged(self, name: str, group: Group, after: float, since: float = math.inf) -> list[Past]:
        """Replies of that id that were judged before `since`, and may matter to what began after that time."""
        here = [one.past for one in group.captures if one.past is not None and one.past.judged < since]
        known = self._past.get(hash(name))
        if known is None or known.is_over(after):
            return here
        return [*Past.unpack(bytes(known.packed)), *here]

    def _look_at(self, capture: OpenCapture, ts: float) -> None:
        """Once all logs are read to that time and a bit further, it may be ready."""
        if not capture.queued:  # else it is looked at anyway, and all this seen
            capture.queued = True
            heapq.heappush(self._due, (ts + CLOCK_SKEW, id(capture.log), capture.number, "capture"))

    def _look_again(self, name: str | None) -> None:
        """Something of that id has ended."""
        group = self._groups.get(name) if name is not None else None
        if group is None:
            return
        last = max((one.finished.ts for one in group.served if one.finished), default=-math.inf)
        for capture in group.captures:
            if capture.end and capture.past is None:
                self._look_at(capture, max(capture.end.ts, last))

    # ------------------------------------------------------------------------------------------- what can be judged

    def ready(self, watermark: float) -> Iterator[Case]:
        """Requests that can be judged now that all logs are read to that time; they are forgotten."""
        self._read_until = watermark
        while self._due and self._due[0][0] < watermark:
            _, log, number, what = heapq.heappop(self._due)
            if what == "served":
                self._shrink(log, number)
                continue
            capture = self._captures.get((log, number))
            if capture is None or capture.end is None or capture.past is not None:
                continue
            if what == "capture":
                capture.queued = False
            if (case := self._case(capture, watermark)) is not None:
                self._settle(case)
                if self._only is None:
                    yield case
            elif not capture.late:
                capture.late = True
                heapq.heappush(self._due, (capture.end.ts + CLOCK_SKEW + HORIZON, log, number, "late"))

    def rest(self) -> list[Case]:
        """Everything else, now that there is no more. What is contested is left out, or is all there is."""
        cases = []
        for capture in self._captures.values():
            if capture.past is not None:
                continue
            group = self._groups[capture.ids[0]] if capture.ids else Group([capture])
            case = group.join(capture) if capture.ids else Case(capture)
            self._contest(group, case)
            self.unnamed.add(capture)
            contested = (self._only or self.contested).has(group.captures, group.served)
            if contested == (self._only is not None):
                cases.append(case)
        return cases

    def orphans(self) -> list[Served]:
        """What the engines served and no reply has asked for."""
        return [served for served in self._served.values() if served.added is not None and not served.taken]

    # ------------------------------------------------------------------------------------------- where there is no end

    def give_up(self, log: Log) -> Iterator[Case]:
        """No more will come of that log: its requests that have not ended never will."""
        self._ended.add(id(log))
        for capture in [one for one in self._captures.values() if one.log is log and one.end is None]:
            if capture.past is None:
                case = self._groups[capture.ids[0]].join(capture) if capture.ids else Case(capture)
                self._settle(case)
                yield case
        for served in self._served.values():
            if served.log is log and served.finished is None:
                heapq.heappush(self._due, (log.last_ts + HORIZON, id(log), served.number, "served"))

    def take_orphans(self) -> list[Served]:
        """Those that were let go of since."""
        self.unnamed.going_on = {one.log.writer for one in self._captures.values() if not one.ids}
        orphans, self._orphans = self._orphans, []
        return orphans

    def take_contested(self) -> bool:
        """Did anything come too late since?"""
        contested, self.contested = self.contested, Contested()
        return bool(contested)

    def waiting(self) -> dict[int, Waiting]:
        """By id(log)."""
        found: dict[int, Waiting] = {}
        for capture in self._captures.values():
            if capture.past is None:
                known = found.get(id(capture.log), Waiting([], [], capture.block))
                known.captures.append(capture.number)
                found[id(capture.log)] = known._replace(first=min(known.first or 0, capture.block))
        for served in self._served.values():
            if not served.judged:
                known = found.get(id(served.log), Waiting([], [], served.block))
                known.served.append(served.number)
                found[id(served.log)] = known._replace(first=min(known.first or 0, served.block))
        return found

    def earliest(self) -> float:
        """When the first of the replies began that are not judged; inf: there are none."""
        return min((one.life[0] for one in self._captures.values() if one.past is None), default=math.inf)

    def backlog(self) -> int:
        """Replies that ended and are not judged."""
        return sum(capture.end is not None and capture.past is None for capture in self._captures.values())

    def _is_over(self, served: Served) -> bool:
        """It ended so long ago that no reply will ask for it any more."""
        end = served.finished.ts if served.finished else served.log.last_ts
        return (served.finished is not None or id(served.log) in self._ended) and end + HORIZON < self._read_until

    def _let_go(self, served: Served) -> None:
        """Of an engine's request that no reply waits for."""
        name = reply_id(served.added.external_id)[1] if served.added else None
        group = self._groups.get(name) if name is not None else None
        if group is not None and any(capture.past is None for capture in group.captures):
            return  # it goes with the last of them
        self._served.pop((id(served.log), served.number), None)
        if group is not None and name is not None:
            group.served.remove(served)
            if not served.taken:
                self._orphans.append(served)
            if not group.captures and not group.served:
                del self._groups[name]

    def _case(self, capture: OpenCapture, watermark: float) -> Case | None:
        """None: it is to wait."""
        assert capture.end is not None  # `ready` asks for no others
        group = self._groups[capture.ids[0]] if capture.ids else Group([capture])
        if self._only is not None and self._only.has(group.captures, group.served):
            return None
        late = watermark > capture.end.ts + CLOCK_SKEW + HORIZON
        if not capture.ids:
            known = needs_no_engine(capture) or self._witnesses.engines_known()
            return Case(capture) if known or (self._live and late) else None
        if self._live and late:
            return group.join(capture)
        if not self.contested.ids.isdisjoint(capture.ids) or _undecided(group, capture):
            return None
        case = group.join(capture)
        if self._contest(group, case):
            return None
        expected = (capture.begin.choices if capture.begin else None) or 1
        if all(choice in case.choices for choice in range(min(expected, len(group.served) + 1))):
            return case
        late = late or self._witnesses.none()
        return case if needs_no_engine(capture) or (late and not self._witnesses.obliged(capture)) else None

    def _contest(self, group: Group, case: Case) -> bool:
        """Is this at odds with what was judged before, or cannot be judged for lack of what was dropped?"""
        capture = case.capture
        if not capture.ids:
            return False
        begins = [began(served) for candidates in case.choices.values() for served in candidates]
        own = all(within(begin, capture.life) for begin in begins)
        after = capture.life[0] - CLOCK_SKEW if own else -math.inf
        for past in self._judged(capture.ids[0], group, after, capture.named):
            if past.rivals(capture, begins):
                self.contested.ids.add(capture.ids[0])
        if any(served.shrunk for candidates in case.choices.values() for served in candidates):
            self.contested.ids.add(capture.ids[0])
        return not self.contested.ids.isdisjoint(capture.ids)

    def _settle(self, case: Case) -> None:
        """A request is judged: of its records nothing is needed any more."""
        capture = case.capture
        end = capture.end.ts if capture.end else capture.log.last_ts
        self._judged_at(capture.log, end)
        if not capture.ids:
            self.unnamed.add(capture)
            del self._captures[id(capture.log), capture.number]
            return
        served = [one for candidates in case.choices.values() for one in candidates]
        for one in served:
            one.judged = True
            self._judged_at(one.log, one.life[1])
        begin = capture.begin.ts if capture.begin else -math.inf
        externals = {one.added.external_id for one in served if one.added}
        capture.past = Past(begin, end, tuple(map(began, served)), len(externals), next(self._order))
        if capture.begin is None:
            self.unnamed.add(capture)
        self._forget(capture.ids[0])

    def _judged_at(self, log: Log, ts: float) -> None:
        self._judged_until[id(log)] = max(ts, self._judged_until.get(id(log), -math.inf))

    def _forget(self, name: str) -> None:
        """Let go of the judged replies of an id that overlap with none that waits, and of what belongs to them."""
        group = self._groups[name]
        waiting = [capture for capture in group.captures if capture.past is None]
        earliest = min((capture.life[0] for capture in waiting), default=math.inf)
        kept = []
        for capture in group.captures:
            past = capture.past
            if past is None or earliest <= past.end + 4 * CLOCK_SKEW:  # then none can claim what it was judged by
                kept.append(capture)
                continue
            self._past.setdefault(hash(name), PastOfId()).add(past)
            del self._captures[id(capture.log), capture.number]
            for served in group.served:
                begin = began(served)
                if begin in past.begins and (
                    begin < earliest - CLOCK_SKEW or not any(within(begin, one.life) for one in waiting)
                ):
                    self._served.pop((id(served.log), served.number), None)
        group.captures = kept
        if self._live:
            for served in group.served if not waiting else ():
                if served.taken and self._is_over(served):
                    self._served.pop((id(served.log), served.number), None)
            while len(self._past) > _PAST_KEPT:
                del self._past[next(iter(self._past))]
        group.served = [one for one in group.served if (id(one.log), one.number) in self._served]
        if not group.captures and not group.served:
            del self._groups[name]

    def _shrink(self, log: int, number: int) -> None:
        """No reply has asked for it for long: keep that it was there, not what it was."""
        served = self._served.get((log, number))
        if served is None or self._only is not None:
            return
        if self._live:
            self._let_go(served)
            return
        group = self._groups.get(reply_id(served.added.external_id)[1]) if served.added else None
        if group is None or not group.captures:
            served.parts, served.shrunk = [], True


def needs_no_engine(capture: OpenCapture) -> bool:
    """There is no text to judge, whatever the engine says."""
    end = capture.end
    if capture.begin is not None and capture.begin.endpoint is None:
        return True
    if end is None:
        return False
    if end.outcome == "client_gone":
        return not capture.ids
    return end.status is None or end.status >= 400


def _undecided(group: Group, capture: OpenCapture) -> bool:
    """Does something of the same id go on that may be this reply's, or may claim what is?"""
    assert capture.end is not None  # asked of no others
    alone = len(group.captures) == 1
    mine = [served for served in group.served if alone or within(began(served), capture.life)]
    if any(served.finished is None or served.log.engine is None for served in mine):
        return True
    horizon = capture.end.ts + 2 * CLOCK_SKEW
    return any(one.end is None and (one.begin is None or one.begin.ts <= horizon) for one in group.captures)
