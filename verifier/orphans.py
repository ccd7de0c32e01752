"""Judge what the engine served and no reply names. Pure."""

from collections import Counter

from sparseety.records import Endpoint
from verifier.findings import Finding, RequestVerdict, Severity, Verdict, place
from verifier.join import EngineRequest, Logs


def judge_orphans(logs: Logs, orphans: list[EngineRequest]) -> list[RequestVerdict]:
    """What the engine served and no reply names.

    Clients that left before the server named their request account for some of it; the rest came past the proxy,
    unless the operator said that nothing does.
    """
    named: Counter[tuple[Endpoint, str]] = Counter()  # by the id that the client chose; messages count as chat
    anonymous: Counter[Endpoint] = Counter()
    for capture in logs.captures.values():
        start = capture.start
        if start is None or start.endpoint is None or not capture.ended or capture.response_id is not None:
            continue
        endpoint: Endpoint = "chat" if start.endpoint == "messages" else start.endpoint
        if start.x_request_id and endpoint != "responses":  # which name requests themselves
            named[endpoint, start.x_request_id] += 1
        else:
            anonymous[endpoint] += 1
    exclusive = [
        log.first_ts
        for log in logs.files
        if log.opening and log.opening.source == "proxy" and log.opening.scope.exclusive and not log.damaged
    ]
    verdicts: dict[str, RequestVerdict] = {}
    for request in orphans:
        assert request.added is not None  # the index holds no others
        endpoint, request_id = _reply_id(request.added.external_id)
        if request_id in verdicts:
            continue  # another choice of the same request
        here = (place(request.log.path, request.line),)
        x_request_id = request_id.partition("-")[2]
        if named[endpoint, x_request_id] > 0 or anonymous[endpoint] > 0:
            if named[endpoint, x_request_id] > 0:
                named[endpoint, x_request_id] -= 1
            else:
                anonymous[endpoint] -= 1
            code, severity, detail = "ABORTED_BEFORE_ID", Severity.INFO, "its client left before the server named it"
        elif any(since is not None and since <= request.added.ts for since in exclusive):
            detail = "the engine served it, and a proxy that all requests pass did not see it"
            code, severity = "ORPHAN_BACKEND", Severity.FAULT
        else:
            detail = "the engine served it past the proxy, or for a proxy whose log is not here"
            code, severity = "ORPHAN_BACKEND", Severity.INFO
        verdict = RequestVerdict(request_id, Verdict.OUT_OF_SCOPE, endpoint=endpoint, ts=request.added.ts)
        verdict.findings.append(Finding(code, "protocol", severity, detail, places=here))
        verdicts[request_id] = verdict.settle()
    return list(verdicts.values())


def _reply_id(external_id: str) -> tuple[Endpoint, str]:
    """(endpoint, id in the reply) of an engine's external id, as EngineIndex.choices has it; messages count as chat."""
    if external_id.startswith("cmpl-"):
        return "completions", external_id.rpartition("-")[0]
    if external_id.startswith("resp_"):
        return "responses", external_id.rpartition("_")[0]
    return "chat", external_id
