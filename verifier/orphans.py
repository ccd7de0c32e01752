"""Judge what the engine served and no reply names. Pure."""

from collections import Counter

from sparseety.records import Endpoint
from verifier.findings import Finding, RequestVerdict, Severity, Verdict
from verifier.join import CLOCK_SKEW, EngineRequest, Log, Logs


def judge_orphans(logs: Logs, orphans: list[EngineRequest]) -> list[RequestVerdict]:
    """What the engine served and no reply names.

    Requests that the proxy's log does not name (their client left, or the log ends, before the server named them)
    account for some of it; the rest came past the proxy, unless the operator said that nothing does.
    """
    named: Counter[tuple[Endpoint, str]] = Counter()  # by the id that the client chose
    anonymous: Counter[Endpoint] = Counter()
    for capture in logs.captures.values():
        start = capture.start
        if start is None or start.endpoint is None or capture.response_id is not None:
            continue
        if start.x_request_id:
            named[start.endpoint, start.x_request_id] += 1
        else:
            anonymous[start.endpoint] += 1
    exclusive = [
        log
        for log in logs.files
        if log.opening and log.opening.source == "proxy" and log.opening.scope.exclusive and not log.damaged
    ]
    verdicts: dict[str, RequestVerdict] = {}
    for request in orphans:
        assert request.added is not None  # the index holds no others
        endpoint, request_id = _reply_id(request.added.external_id)
        if request_id in verdicts:
            continue  # another choice of the same request
        here = (request.place,)
        x_request_id = request_id.partition("-")[2]
        if named[endpoint, x_request_id] > 0 or anonymous[endpoint] > 0:
            if named[endpoint, x_request_id] > 0:
                named[endpoint, x_request_id] -= 1
            else:
                anonymous[endpoint] -= 1
            detail = "its client left, or the proxy's log ends, before the server named it"
            code, severity = "ABORTED_BEFORE_ID", Severity.INFO
        elif any(_obliged(log, request) for log in exclusive):
            detail = "the engine served it, and a proxy that all requests pass did not see it"
            code, severity = "ORPHAN_BACKEND", Severity.FAULT
        else:
            detail = "the engine served it past the proxy, or for a proxy whose log is not here"
            code, severity = "ORPHAN_BACKEND", Severity.INFO
        verdict = RequestVerdict(request_id, Verdict.OUT_OF_SCOPE, endpoint=endpoint, ts=request.added.ts)
        verdict.findings.append(Finding(code, "protocol", severity, detail, places=here))
        verdicts[request_id] = verdict.settle()
    return list(verdicts.values())


def _obliged(log: Log, request: EngineRequest) -> bool:
    """Would this proxy log hold the request, given that all requests pass the proxy?"""
    begin, end = request.life
    if log.opening is None or begin < log.opening.ts or end > log.last_ts + CLOCK_SKEW:
        return False
    return not log.lost_between(begin - CLOCK_SKEW, end + CLOCK_SKEW)


def _reply_id(external_id: str) -> tuple[Endpoint, str]:
    """(endpoint, id in the reply) of an engine's external id: completions add `-<prompt>` to it."""
    if external_id.startswith("cmpl-"):
        return "completions", external_id.rpartition("-")[0]
    return "chat", external_id
