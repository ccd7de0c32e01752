"""Judge what the engine served and no reply names. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparseety.records import Endpoint
from verifier.findings import Finding, RequestVerdict, Severity, Verdict
from verifier.join import reply_id
from verifier.logs import CLOCK_SKEW, Log, Writer
from verifier.packed import OpenCapture, Served


@dataclass(slots=True)
class Unnamed:
    """Replies without an id. Each whose client left before it had one accounts for one request of the engine."""

    _by_name: Counter[tuple[Endpoint, str]] = field(default_factory=Counter)  # the client chose the id
    _anonymous: Counter[Endpoint] = field(default_factory=Counter)
    _unsure: set[Writer] = field(default_factory=set)  # some replies in their logs may have been anything
    going_on: set[Writer] = field(default_factory=set)  # some replies in their logs may yet get any name

    def state(self) -> list[tuple[Endpoint, str | None, int]]:
        """To go on with after a restart."""
        named = [(endpoint, name, count) for (endpoint, name), count in self._by_name.items() if count]
        return [*named, *((endpoint, None, count) for endpoint, count in self._anonymous.items() if count)]

    def restore(self, state: list[tuple[Endpoint, str | None, int]]) -> None:
        for endpoint, name, count in state:
            if name is None:
                self._anonymous[endpoint] += count
            else:
                self._by_name[endpoint, name] += count

    def add(self, capture: OpenCapture) -> None:
        begin, end = capture.begin, capture.end
        if capture.ids:
            return
        if begin is None or end is None:
            self._unsure.add(capture.log.writer)
        elif begin.endpoint is not None and end.outcome == "client_gone":
            endpoint: Endpoint = "chat" if begin.endpoint == "messages" else begin.endpoint  # the ids are of one kind
            if begin.x_request_id and endpoint != "responses":  # those are random
                self._by_name[endpoint, begin.x_request_id] += 1
            else:
                self._anonymous[endpoint] += 1

    def account_for(self, endpoint: Endpoint, request_id: str) -> bool:
        name = request_id.partition("-")[2]
        if self._by_name[endpoint, name]:
            self._by_name[endpoint, name] -= 1
            return True
        if self._anonymous[endpoint]:
            self._anonymous[endpoint] -= 1
            return True
        return False

    def may_be_in(self, log: Log) -> bool:
        return log.writer in self._unsure or log.writer in self.going_on


def judge_orphans(logs: list[Log], orphans: Iterable[Served], unnamed: Unnamed) -> list[RequestVerdict]:
    """Clients that left before their request was named account for some of it; the rest came past the proxy, unless
    the operator said that nothing does."""
    exclusive = [log for log in logs if log.opening and log.opening.source == "proxy" and log.opening.scope.exclusive]
    verdicts: dict[str, RequestVerdict] = {}
    for request in sorted(orphans, key=_order):
        assert request.added is not None  # the others are not among them
        endpoint, request_id = reply_id(request.added.external_id)
        if request_id in verdicts:
            continue  # another choice of the same request
        if unnamed.account_for(endpoint, request_id):
            code, severity, detail = "ABORTED_BEFORE_ID", Severity.INFO, "its client left before the server named it"
        elif any(_obliged(log, request, unnamed) for log in exclusive):
            detail = "the engine served it, and a proxy that all requests pass did not see it"
            code, severity = "ORPHAN_BACKEND", Severity.FAULT
        else:
            detail = "the engine served it past the proxy, or for a proxy whose log is not here or not whole"
            code, severity = "ORPHAN_BACKEND", Severity.INFO
        verdict = RequestVerdict(request_id, Verdict.OUT_OF_SCOPE, endpoint=endpoint, ts=request.added.ts)
        place = request.log.place(request.line)
        verdict.findings.append(Finding(code, "protocol", severity, detail, places=(place,)))
        verdicts[request_id] = verdict.settle()
    return list(verdicts.values())


def _order(served: Served) -> tuple[float, Writer, int]:
    """The same however the logs were read."""
    assert served.added is not None
    return served.added.ts, served.log.writer, served.number


def _obliged(log: Log, request: Served, unnamed: Unnamed) -> bool:
    """Would this proxy log name the request, given that all requests pass the proxy?

    Not while one of its own is open, or without its beginning: it may be that one, which has no id so far.
    """
    begin, end = request.life
    assert log.opening is not None
    if log.damaged or not log.opening.ts <= begin or not log.covers(end):
        return False
    return not log.lost_between(begin - CLOCK_SKEW, end + CLOCK_SKEW) and not unnamed.may_be_in(log)
