"""Find the engine's requests behind a reply. Pure.

The join key is the id the server put into the reply, which is the id the engine was given.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sparseety.records import Endpoint
from verifier.logs import within
from verifier.packed import Case, OpenCapture, Served, any_within


@dataclass(slots=True)
class Group:
    """What bears one id: replies, and the engine's requests that may be theirs. One of each, as a rule."""

    captures: list[OpenCapture] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)

    def join(self, capture: OpenCapture) -> Case:
        """Chat and messages: the reply's id is the engine's. Completions: the engine adds `-<prompt>`, and the choice
        is prompt * n + child. Responses: it adds `_<turn>`; several turns are not told apart here.

        An id that several requests bear (clients repeat their X-Request-Id) is told apart by time, where that decides.
        """
        by_id: dict[str, list[Served]] = defaultdict(list)
        for served in self.served:
            assert served.added is not None  # what has none is in no group
            by_id[served.added.external_id].append(served)
        found: dict[int, list[Served]] = defaultdict(list)
        for first, external_id in _engine_ids(capture, by_id):
            for served in by_id[external_id]:
                assert served.added is not None
                served.taken = True
                found[first + served.added.child].append(served)
        if all(len(served) == 1 for served in found.values()) and len(self.captures) == 1:
            return Case(capture, dict(found))
        for choice, candidates in found.items():
            found[choice] = [served for served in candidates if within(began(served), capture.life)]
        begins = sorted(began(served) for candidates in found.values() for served in candidates)
        claims = sum(any_within(begins, rival) for rival in self.captures)
        return Case(capture, {choice: served for choice, served in found.items() if served}, max(1, claims))


def _engine_ids(capture: OpenCapture, known: dict[str, list[Served]]) -> Iterator[tuple[int, str]]:
    """(its first choice, external id) of each prompt or turn of a request."""
    response_id = capture.id
    assert response_id is not None  # it is in a group
    if response_id.startswith("cmpl-"):
        separator, choices = "-", capture.begin.n if capture.begin else 1
    elif response_id.startswith("resp_"):
        separator, choices = "_", 0
    else:
        if response_id in known:
            yield 0, response_id
        return
    # As many as the engine knows, not as many as were asked for: that number may be anything.
    for number in itertools.count():
        external_id = f"{response_id}{separator}{number}"
        if external_id not in known:
            return
        yield number * choices, external_id


def began(served: Served) -> float:
    assert served.added is not None
    return served.added.ts


def reply_id(external_id: str) -> tuple[Endpoint, str]:
    """(endpoint, id in the reply) of an engine's external id, as the join has it; messages count as chat."""
    if external_id.startswith("cmpl-"):
        return "completions", external_id.rpartition("-")[0]
    if external_id.startswith("resp_"):
        return "responses", external_id.rpartition("_")[0]
    return "chat", external_id
