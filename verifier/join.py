"""Find the engine's requests behind a reply. Pure.

The join key is the id the server put into the reply, which is the id the engine was given.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparseety.records import Endpoint
from verifier.logs import CLOCK_SKEW
from verifier.requests import Capture, EngineRequest


@dataclass(frozen=True, slots=True)
class Join:
    """What the engines' logs have for one reply."""

    choices: dict[int, list[EngineRequest]] = field(default_factory=dict)  # claimants of each choice
    claims: int = 1  # captures that bear this id and could mean the same engine requests


class EngineIndex:
    """Engine requests by external id, and how many captures ask for each id."""

    def __init__(self, requests: Iterable[EngineRequest], captures: Iterable[Capture]) -> None:
        self._by_id: dict[str, list[EngineRequest]] = defaultdict(list)
        self._captures: dict[str, list[Capture]] = defaultdict(list)
        self._taken: set[int] = set()
        for request in requests:
            if request.added is not None:
                self._by_id[request.added.external_id].append(request)
        for capture in captures:
            if capture.response_id is not None:
                self._captures[capture.response_id].append(capture)

    def join(self, capture: Capture) -> Join:
        """Chat and messages: the reply's id is the engine's. Completions: the engine adds `-<prompt>`, and the choice
        is prompt * n + child. Responses: it adds `_<turn>`; several turns are not told apart here.

        An id that several requests bear (clients repeat their X-Request-Id) is told apart by time, where that decides.
        """
        response_id = capture.response_id
        if response_id is None:
            return Join()
        rivals = self._captures[response_id]
        found: dict[int, list[EngineRequest]] = defaultdict(list)
        for first, external_id in self._engine_ids(capture, response_id):
            for request in self._by_id.get(external_id, ()):
                assert request.added is not None
                self._taken.add(id(request))
                found[first + request.added.child].append(request)
        if all(len(requests) == 1 for requests in found.values()) and len(rivals) == 1:
            return Join(found)
        for choice, requests in found.items():
            found[choice] = [request for request in requests if within(request, capture)]
        claims = sum(any(within(r, rival) for requests in found.values() for r in requests) for rival in rivals)
        return Join({choice: requests for choice, requests in found.items() if requests}, max(1, claims))

    def _engine_ids(self, capture: Capture, response_id: str) -> Iterator[tuple[int, str]]:
        """(its first choice, external id) of each prompt or turn of a request."""
        parameters = capture.start.parameters if capture.start else None
        if response_id.startswith("cmpl-"):
            separator, choices = "-", max(1, parameters.n) if parameters else 1
        elif response_id.startswith("resp_"):
            separator, choices = "_", 0
        else:
            yield 0, response_id
            return
        # As many as the engine knows, not as many as were asked for: that number may be anything.
        for number in itertools.count():
            external_id = f"{response_id}{separator}{number}"
            if external_id not in self._by_id:
                return
            yield number * choices, external_id

    def untaken(self) -> Iterator[EngineRequest]:
        """Engine requests that no reply has asked for so far."""
        for requests in self._by_id.values():
            yield from (request for request in requests if id(request) not in self._taken)


def within(request: EngineRequest, capture: Capture) -> bool:
    """Can the engine have worked on this during that request? The engine begins after the proxy, and ends before it."""
    begin, _ = request.life
    start, ending = capture.start, capture.ending
    return (start is None or start.ts - CLOCK_SKEW <= begin) and (ending is None or begin <= ending.ts + CLOCK_SKEW)


def reply_id(external_id: str) -> tuple[Endpoint, str]:
    """(endpoint, id in the reply) of an engine's external id, as the join has it; messages count as chat."""
    if external_id.startswith("cmpl-"):
        return "completions", external_id.rpartition("-")[0]
    if external_id.startswith("resp_"):
        return "responses", external_id.rpartition("_")[0]
    return "chat", external_id
