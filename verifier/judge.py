"""Judge one request: protocol, join, text and ids of each choice, counts. Pure.

A fault needs a witness that was obliged to speak. What is not known is never a pass and never a fault.
"""

from sparseety.records import RequestParameters
from verifier.choice import ChoiceJudge, TokenizerOf
from verifier.findings import Axis, Finding, RequestVerdict, Severity, Verdict, place
from verifier.join import Capture, EngineRequest, Log

_BROKEN_OFF = {
    "client_gone": "the client left",
    "upstream_broken": "the upstream broke off",
    "shutdown": "the proxy was stopped",
    "internal_error": "the proxy failed",
}


def judge(
    capture: Capture,
    engine_choices: dict[int, list[EngineRequest]],
    engine_logs: list[Log],
    tokenizer_of: TokenizerOf,
) -> RequestVerdict:
    """The verdict on one captured request. `engine_choices`: what the join found for each choice."""
    start = capture.start
    parameters = (start.parameters if start else None) or RequestParameters()
    result = RequestVerdict(
        request_id=capture.response_id or (start.uuid if start else f"capture {capture.number}"),
        verdict=Verdict.PASS,
        endpoint=start.endpoint if start else None,
        uuid=start.uuid if start else None,
        ts=start.ts if start else None,
    )
    if out := _not_judged(capture):
        result.verdict, finding = out
        result.findings.append(finding)
        return result
    result.findings += _log_findings(capture)
    result.findings += _protocol_findings(capture, parameters)
    damaged = any(finding.severity is Severity.UNKNOWN for finding in result.findings)
    counted: list[tuple[int, int]] | None = []  # (ids kept, ids in all) of each choice; None: not all are known
    for choice in range(parameters.n * parameters.prompts):
        candidates = engine_choices.get(choice, [])
        if len(candidates) != 1:
            result.findings.append(_no_join(capture, choice, len(candidates), engine_logs))
            counted = None
            continue
        kept = ChoiceJudge(result, capture, choice, candidates[0], damaged).judge(tokenizer_of)
        counted = None if kept is None or counted is None else [*counted, kept]
    if counted is not None and not damaged:
        result.findings += _count_findings(capture, counted)
    return result.settle()


# ---------------------------------------------------------------------------------------------- the whole request


def _not_judged(capture: Capture) -> tuple[Verdict, Finding] | None:
    """A verdict for what has no text to judge."""

    def info(code: str, detail: str) -> Finding:
        return Finding(code, "protocol", Severity.INFO, detail, places=(place(capture.log.path, capture.line),))

    start, ending = capture.start, capture.done or capture.response
    if start is not None and start.endpoint is None:
        return Verdict.OUT_OF_SCOPE, info("NOT_AN_ENDPOINT", "passed through; only chat and completions are judged")
    if ending is None:
        return Verdict.OPEN, info("OPEN", "has not ended in this log")
    if (ending.status is None or ending.status >= 400) and ending.outcome != "client_gone":
        said = "no reply" if ending.status is None else f"status {ending.status}"
        return Verdict.OUT_OF_SCOPE, info("REFUSED", f"{said} ({ending.outcome}): no text to judge")
    if capture.response_id is None and ending.outcome == "client_gone":
        return Verdict.OUT_OF_SCOPE, info("ABORTED_BEFORE_ID", "the client left before the server named the request")
    return None


def _log_findings(capture: Capture) -> list[Finding]:
    """What this log lost of the request: then nothing is a fault that the loss could explain."""
    here = (place(capture.log.path, capture.line),)

    def unknown(code: str, detail: str) -> Finding:
        return Finding(code, "log", Severity.UNKNOWN, detail, places=here)

    found = [unknown("LOST_RECORDS", f"{gap.count} records were lost ({gap.reason})") for gap in capture.gaps]
    if capture.start is None:
        found.append(unknown("TORN_RECORD", "its request_start is missing from the log"))
    elif capture.start.parameters is None:
        found.append(unknown("UNVERIFIABLE", "the request's body was not readable, so its parameters are not known"))
    done = capture.done
    if done is not None and not capture.gaps and capture.chunks_seen != done.chunk_count:
        lost = done.chunk_count - capture.chunks_seen
        found.append(unknown("TORN_RECORD", f"{lost} of its {done.chunk_count} chunk records are missing from the log"))
    if capture.response is not None and capture.response.unread is not None:
        found.append(unknown("UNPARSED_EVENT", f"the reply was not read: {capture.response.unread}"))
    if capture.unparsed_events:
        found.append(unknown("UNPARSED_EVENT", f"{capture.unparsed_events} events were not readable"))
    return found


def _protocol_findings(capture: Capture, parameters: RequestParameters) -> list[Finding]:
    here = (place(capture.log.path, capture.line),)
    ending = capture.done or capture.response
    assert ending is not None  # _not_judged saw to it
    if ending.outcome in ("upstream_broken", "shutdown", "internal_error"):
        detail = f"{_BROKEN_OFF[ending.outcome]} before the reply's end; what came was checked"
        return [Finding("BROKEN_OFF", "protocol", Severity.UNKNOWN, detail, places=here)]
    if capture.error_events:
        detail = "the server sent an error event instead of the rest; what came before it was checked"
        return [Finding("SERVER_ERROR", "protocol", Severity.UNKNOWN, detail, places=here)]
    if ending.outcome != "complete":
        return []
    missing = [n for n in range(parameters.n * parameters.prompts) if not _finish_reason(capture, n)]
    what = []
    if capture.done is not None and not capture.done.end_marker:
        what.append("without [DONE]")
    if missing and not capture.gaps:
        what.append("without a finish_reason for " + ", ".join(f"choice {n}" for n in missing))
    if not what:
        return []
    detail = f"the transport ended cleanly, {' and '.join(what)}"
    return [Finding("UNFINISHED", "protocol", Severity.FAULT, detail, places=here)]


def _finish_reason(capture: Capture, choice: int) -> str | None:
    delivered = capture.choices.get(choice)
    return delivered.finish_reason if delivered else None


def _no_join(capture: Capture, choice: int, candidates: int, engine_logs: list[Log]) -> Finding:
    """No single engine request behind a choice: whose fault that is, if anybody's."""
    here = (place(capture.log.path, capture.line),)

    def finding(code: str, axis: Axis, severity: Severity, detail: str) -> Finding:
        return Finding(code, axis, severity, detail, choice=choice, places=here)

    if candidates:
        detail = f"{candidates} engine requests bear this id (a repeated X-Request-Id?); which is meant is not known"
        return finding("JOIN_AMBIGUOUS", "protocol", Severity.UNKNOWN, detail)
    if not engine_logs:
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, "there is no engine log")
    if capture.response_id is None:
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, "the reply bears no id")
    if not any(_obliged(log, capture) for log in engine_logs):
        detail = "no engine log covers this request's time without a loss"
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, detail)
    detail = "an engine log that covers its time, without a loss, does not know this request"
    return finding("ORPHAN_CAPTURE", "protocol", Severity.FAULT, detail)


def _obliged(log: Log, capture: Capture) -> bool:
    """Would this engine log hold the request if its engine had served it?"""
    ending = capture.done or capture.response
    if log.opening is None or log.damaged or log.open_gaps or log.sampled or ending is None:
        return False
    began = capture.start.ts if capture.start else ending.ts
    return log.opening.ts <= began and ending.ts <= log.last_ts + 1  # after its end it had no duty, closed or not


def _count_findings(capture: Capture, counted: list[tuple[int, int]]) -> list[Finding]:
    """usage.completion_tokens against the ids. vLLM before 0.32 counts ids past a stop string too, so both sums do."""
    ending, usage = capture.done or capture.response, capture.usage
    if usage is None or usage.completion_tokens is None or ending is None or ending.outcome != "complete":
        return []
    if capture.error_events:
        return []
    kept, total = (sum(column) for column in zip(*counted, strict=True))
    if usage.completion_tokens in (kept, total):
        return []
    detail = f"usage says {usage.completion_tokens} completion tokens, the engine sampled {kept}"
    return [
        Finding("COUNT_MISMATCH", "ids", Severity.FAULT, detail, places=(place(capture.log.path, capture.line),)),
    ]
