"""Judge what the engine served and no reply names. Pure."""

from collections import Counter
from collections.abc import Iterable

from sparseety.records import Endpoint
from verifier.findings import Finding, RequestVerdict, Severity, Verdict
from verifier.gather import Logs
from verifier.join import reply_id
from verifier.logs import CLOCK_SKEW, Log
from verifier.requests import Capture, EngineRequest


class _LeftUnnamed:
    """Requests whose client left before the server had named them: each accounts for one request of the engine."""

    def __init__(self, captures: Iterable[Capture]) -> None:
        self._by_name: Counter[tuple[Endpoint, str]] = Counter()  # the client chose the id
        self._anonymous: Counter[Endpoint] = Counter()
        for capture in captures:
            start, ending = capture.start, capture.ending
            if start is None or start.endpoint is None or ending is None or capture.response_id is not None:
                continue
            endpoint: Endpoint = "chat" if start.endpoint == "messages" else start.endpoint  # the ids are of one kind
            if ending.outcome == "client_gone" and start.x_request_id and endpoint != "responses":  # those are random
                self._by_name[endpoint, start.x_request_id] += 1
            elif ending.outcome == "client_gone":
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


def judge_orphans(logs: Logs, orphans: Iterable[EngineRequest]) -> list[RequestVerdict]:
    """Clients that left before their request was named account for some of it; the rest came past the proxy, unless
    the operator said that nothing does."""
    left = _LeftUnnamed(logs.captures.values())
    exclusive = [
        log for log in logs.files if log.opening and log.opening.source == "proxy" and log.opening.scope.exclusive
    ]
    unsure = [capture for capture in logs.captures.values() if not capture.ending or capture.start is None]
    verdicts: dict[str, RequestVerdict] = {}
    for request in orphans:
        assert request.added is not None  # the index holds no others
        endpoint, request_id = reply_id(request.added.external_id)
        if request_id in verdicts:
            continue  # another choice of the same request
        if left.account_for(endpoint, request_id):
            code, severity, detail = "ABORTED_BEFORE_ID", Severity.INFO, "its client left before the server named it"
        elif any(_obliged(log, request, unsure) for log in exclusive):
            detail = "the engine served it, and a proxy that all requests pass did not see it"
            code, severity = "ORPHAN_BACKEND", Severity.FAULT
        else:
            detail = "the engine served it past the proxy, or for a proxy whose log is not here or not whole"
            code, severity = "ORPHAN_BACKEND", Severity.INFO
        verdict = RequestVerdict(request_id, Verdict.OUT_OF_SCOPE, endpoint=endpoint, ts=request.added.ts)
        verdict.findings.append(Finding(code, "protocol", severity, detail, places=(request.place,)))
        verdicts[request_id] = verdict.settle()
    return list(verdicts.values())


def _obliged(log: Log, request: EngineRequest, unsure: list[Capture]) -> bool:
    """Would this proxy log name the request, given that all requests pass the proxy?

    Not while one of its own is open, or without its beginning: it may be that one, which has no id so far.
    """
    begin, end = request.life
    assert log.opening is not None
    if log.damaged or not log.opening.ts <= begin or end > log.last_ts + CLOCK_SKEW:
        return False
    if log.lost_between(begin - CLOCK_SKEW, end + CLOCK_SKEW):
        return False
    return not any(capture.log is log and capture.response_id is None for capture in unsure)
