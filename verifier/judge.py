"""Judge one request: protocol, join, text and ids of each choice, counts. Pure.

A fault needs a witness that was obliged to speak. What is not known is never a pass and never a fault.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from sparseety.records import Gap, Response, StreamDone
from verifier.choice import ChoiceJudge, TokenizerOf
from verifier.findings import Axis, Finding, RequestVerdict, Severity, Verdict
from verifier.fragments import asked_choices
from verifier.logs import CLOCK_SKEW, Log, within
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.requests import Capture, EngineRequest, Join
from verifier.textonly import StreamAlone
from verifier.tokenizer import Tokenizer

_UNWRITTEN = 60.0  # seconds after its last line in which an engine's log may be read on, or written
_BROKEN_OFF = {
    "upstream_broken": "the upstream broke off",
    "upstream_timeout": "the upstream kept the proxy waiting for too long",
    "shutdown": "the proxy was stopped",
    "internal_error": "the proxy failed",
}


TokenizerFor = Callable[[str | None], Tokenizer | None]
"""The tokenizer of a model by the name that clients use, for replies without an engine's log; None: not known."""


def judge(
    capture: Capture,
    join: Join,
    engine_logs: list[Log],
    tokenizer_of: TokenizerOf,
    *,
    options: JudgeOptions = AS_A_RULE,
    tokenizer_for: TokenizerFor = lambda model: None,
) -> RequestVerdict:
    """The verdict on one captured request."""
    start = capture.start
    result = RequestVerdict(
        request_id=capture.response_id or (start.uuid if start else f"capture {capture.number}"),
        verdict=Verdict.PASS,
        endpoint=start.endpoint if start else None,
        uuid=start.uuid if start else None,
        x_request_id=start.x_request_id if start else None,
        ts=start.ts if start else None,
    )
    model = start.parameters.model if start and start.parameters else None
    result.model = model
    if out := _not_judged(capture):
        result.verdict, finding = out
        result.findings.append(finding)
        return result
    damage = _damage(capture)
    result.findings += damage
    result.findings += _protocol_findings(capture, bool(damage))
    kept: list[tuple[int, int] | None] = []  # (ids up to the stop, ids in all) of each choice; None: not all known
    engines: list[Log] = []  # that served it
    for choice in _choices(capture, join):
        candidates = _decoding(join.choices.get(choice, []))
        if candidates and choice not in capture.choices and choice >= (_expected_choices(capture) or choice + 1):
            detail = f"the engine has a choice {choice}, which was not asked for and did not come"
            result.findings.append(_unknown(capture, "BACKEND_LOG_INVALID", detail))
            continue
        if len(candidates) != 1 or join.claims > 1:
            result.findings.append(_no_join(capture, choice, len(candidates), join.claims, engine_logs))
            kept.append(None)
            continue
        _note_engine(result, candidates[0], capture, options)
        engines.append(candidates[0].log)
        kept.append(ChoiceJudge(result, capture, choice, candidates[0], bool(damage), options).judge(tokenizer_of))
    if kept and None not in kept and not damage:
        result.findings += _count_findings(capture, [pair for pair in kept if pair], engines)
    if not damage and not join.choices:
        _judge_alone(result, capture, tokenizer_for(model))
    return result.settle()


def _decoding(candidates: list[EngineRequest]) -> list[EngineRequest]:
    """Where one engine computed the prompt and another the output, the client got the latter's ids."""
    decoding = [each for each in candidates if each.added is not None and each.added.role == "decode"]
    return decoding or candidates


def _judge_alone(result: RequestVerdict, capture: Capture, tokenizer: Tokenizer | None) -> None:
    """No engine's log knows it. Where none had to, the stream alone is looked at; the verdict says by what rules."""
    unknown = [number for number, finding in enumerate(result.findings) if finding.code == "UNVERIFIABLE"]
    if not unknown:
        return
    alone = StreamAlone(capture, tokenizer).judge()
    for number in unknown:
        finding = result.findings[number]
        result.findings[number] = replace(finding, detail=f"{finding.detail}; {alone.sentence()}")
    result.findings += alone.findings
    result.rules = alone.rules


def _note_engine(result: RequestVerdict, engine: EngineRequest, capture: Capture, options: JudgeOptions) -> None:
    """What served it; and whether its clock is the proxy's."""
    start = engine.log.engine
    if start is not None:
        result.vllm = start.vllm
        result.parsers = tuple(filter(None, (start.reasoning_parser, options.tool_parser)))
    if not within(engine.life[0], capture.life) and not any(
        finding.code == "CLOCK_ANOMALY" for finding in result.findings
    ):
        detail = (
            "by the clocks the engine began it before the proxy had it, or after it had ended; times do not compare"
        )
        places = (capture.place, engine.place)
        result.findings.append(Finding("CLOCK_ANOMALY", "log", Severity.INFO, detail, places=places))


def _expected_choices(capture: Capture) -> int | None:
    return asked_choices(capture.start.parameters if capture.start else None)


def _choices(capture: Capture, join: Join) -> list[int]:
    """The choices to judge: those that were asked for, that came, or that an engine worked on."""
    seen = set(capture.choices) | set(join.choices)
    expected = _expected_choices(capture) or 0
    # The first one missing stands for all: that number is the client's, and may be anything.
    missing = next((choice for choice in range(expected) if choice not in seen), None)
    return sorted(seen | ({missing} if missing is not None else set()))


# ---------------------------------------------------------------------------------------------- the whole request


def _not_judged(capture: Capture) -> tuple[Verdict, Finding] | None:
    """A verdict for what has no text to judge."""

    def info(code: str, detail: str) -> Finding:
        return Finding(code, "protocol", Severity.INFO, detail, places=(capture.place,))

    start, ending = capture.start, capture.ending
    if start is not None and start.endpoint is None:
        return Verdict.OUT_OF_SCOPE, info("NOT_AN_ENDPOINT", "passed through; not an endpoint whose text is judged")
    if ending is None:
        if damage := _damage(capture):
            return Verdict.INCOMPLETE, damage[0]
        if capture.log.closed or capture.log.damaged:
            detail = "its ending is missing from the log"
            return Verdict.INCOMPLETE, _unknown(capture, "TORN_RECORD", detail)
        return Verdict.OPEN, info("OPEN", "has not ended in this log")
    if (ending.status is None or ending.status >= 400) and ending.outcome != "client_gone":
        said = "no reply" if ending.status is None else f"status {ending.status}"
        return Verdict.OUT_OF_SCOPE, info("REFUSED", f"{said} ({ending.outcome}): no text to judge")
    if capture.response_id is None and ending.outcome == "client_gone":
        return Verdict.OUT_OF_SCOPE, info("ABORTED_BEFORE_ID", "the client left before the server named the request")
    return None


def _unknown(capture: Capture, code: str, detail: str, axis: Axis = "log") -> Finding:
    return Finding(code, axis, Severity.UNKNOWN, detail, places=(capture.place,))


def _lost(gap: Gap, capture: Capture) -> Finding:
    return _unknown(capture, "LOST_RECORDS", f"{gap.count or 'some'} records were lost ({gap.reason})")


def _damage(capture: Capture) -> list[Finding]:
    """What this log lost of the request, or could not read: then nothing is a fault that this could explain."""
    found = [_lost(gap, capture) for gap in capture.losses]
    if capture.start is None:
        found.append(_unknown(capture, "TORN_RECORD", "its request_start is missing from the log"))
    elif capture.start.parameters is None:
        detail = "the request's body was not readable, so its parameters are not known"
        found.append(_unknown(capture, "UNVERIFIABLE", detail))
    elif _expected_choices(capture) is None:
        found.append(_unknown(capture, "UNVERIFIABLE", "the number of choices asked for makes no sense"))
    if capture.contradiction and not capture.losses:
        detail = f"the log's records of it contradict each other: {capture.contradiction}"
        found.append(_unknown(capture, "TORN_RECORD", detail))
    if capture.response is not None and capture.response.unread is not None:
        found.append(_unknown(capture, "UNPARSED_EVENT", f"the reply was not read: {capture.response.unread}"))
    if capture.unparsed_events:
        found.append(_unknown(capture, "UNPARSED_EVENT", f"{capture.unparsed_events} events were not readable"))
    if len(capture.response_ids) > 1:
        found.append(_unknown(capture, "JOIN_AMBIGUOUS", f"the reply bears {len(capture.response_ids)} different ids"))
    return found


def _protocol_findings(capture: Capture, damaged: bool) -> list[Finding]:
    ending = capture.ending
    assert ending is not None  # _not_judged saw to it
    if ending.outcome in _BROKEN_OFF:
        detail = f"{_BROKEN_OFF[ending.outcome]} before the reply's end; what came was checked"
        return [_unknown(capture, "BROKEN_OFF", detail, "protocol")]
    if capture.error_events:
        detail = "the server sent an error event instead of the rest; what came before it was checked"
        return [_unknown(capture, "SERVER_ERROR", detail, "protocol")]
    if ending.outcome != "complete":
        return []
    found = [] if damaged else _unfinished(capture, ending)
    expected = _expected_choices(capture)
    extra = [choice for choice in sorted(capture.choices) if expected is not None and not 0 <= choice < expected]
    if extra:
        detail = f"the reply has a choice {extra[0]}; {expected} {'was' if expected == 1 else 'were'} asked for"
        found.append(Finding("EXTRA_TEXT", "protocol", Severity.FAULT, detail, places=(capture.place,)))
    return found


def _unfinished(capture: Capture, ending: StreamDone | Response) -> list[Finding]:
    """A clean end of the transport without the end of the reply."""
    expected = _expected_choices(capture) or 1
    finished = sum(bool(delivered.finish_reason) for delivered in capture.choices.values())
    what = []
    if isinstance(ending, StreamDone) and not ending.end_marker:
        what.append("without its end marker")
    if finished < expected:
        what.append(
            f"with {finished} finish_reasons for {expected} choices" if expected > 1 else "without a finish_reason"
        )
    if not what:
        return []
    detail = f"the transport ended cleanly, {' and '.join(what)}"
    return [Finding("UNFINISHED", "protocol", Severity.FAULT, detail, places=(capture.place,))]


def _no_join(capture: Capture, choice: int, candidates: int, claims: int, engine_logs: list[Log]) -> Finding:
    """No single engine request behind a choice: whose fault that is, if anybody's."""

    def finding(code: str, axis: Axis, severity: Severity, detail: str) -> Finding:
        return Finding(code, axis, severity, detail, choice=choice, places=(capture.place,))

    if candidates:
        who = f"{candidates} engine requests bear" if candidates > 1 else f"{claims} replies bear"
        detail = f"{who} this id (a repeated X-Request-Id, several turns?), and time does not tell which is meant"
        return finding("JOIN_AMBIGUOUS", "protocol", Severity.UNKNOWN, detail)
    if not engine_logs:
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, "there is no engine log")
    if capture.response_id is None:
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, "the reply bears no id")
    if not any(_obliged(log, capture) for log in engine_logs):
        detail = "no engine log that would have to hold this request is whole for its time"
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, detail)
    if any(_may_lack(log, capture) for log in engine_logs):
        detail = "of the engines that may have served this request, one has a log that is not whole for its time"
        return finding("UNVERIFIABLE", "ids", Severity.UNKNOWN, detail)
    detail = "an engine log that covers its time, without a loss, does not know this request"
    return finding("ORPHAN_CAPTURE", "protocol", Severity.FAULT, detail)


def _obliged(log: Log, capture: Capture) -> bool:
    """Would this engine log hold the request if its engine had served it, and does its engine serve that model?"""
    start, ending = capture.start, capture.ending
    if log.opening is None or log.damaged or log.sampled or log.silent or ending is None or start is None:
        return False
    if log.lost_between(start.ts - CLOCK_SKEW, ending.ts + CLOCK_SKEW):
        return False
    if not serves(log, start.parameters.model if start.parameters else None):
        return False
    return log.opening.ts <= start.ts and log.covers(ending.ts)


def _may_lack(log: Log, capture: Capture) -> bool:
    """May its engine have served the request, and this log have lost it?"""
    start, ending = capture.start, capture.ending
    assert start is not None  # asked where another log is obliged, and that takes both
    assert ending is not None
    if log.engine is not None and not serves(log, start.parameters.model if start.parameters else None):
        return False
    begin, end = start.ts - CLOCK_SKEW, ending.ts + CLOCK_SKEW
    if log.lost_between(begin, end) or log.goes_on:
        return True
    if (log.first_ts or 0.0) > end or log.last_ts + _UNWRITTEN < begin:
        return False
    return log.damaged or log.sampled or bool(log.silent) or not (log.closed or log.covers(ending.ts))


def serves(log: Log, model: str | None) -> bool:
    return log.engine is not None and model in (*log.engine.served_names, log.engine.model)


def _count_findings(capture: Capture, kept: list[tuple[int, int]], engines: list[Log]) -> list[Finding]:
    """usage.completion_tokens against the ids."""
    ending, usage = capture.ending, capture.usage
    if usage is None or usage.completion_tokens is None or ending is None or ending.outcome != "complete":
        return []
    if capture.error_events:
        return []
    fewest, most = (sum(column) for column in zip(*kept, strict=True))
    # From 0.32 on, vLLM counts ids up to the one completing a stop string; before, those of the same step as well.
    exact = all(log.engine is not None and _release(log.engine.vllm) >= (0, 32) for log in engines)
    if fewest <= usage.completion_tokens <= (fewest if exact else most):
        return []
    detail = f"usage says {usage.completion_tokens} completion tokens, the engine sampled {fewest}"
    return [Finding("COUNT_MISMATCH", "ids", Severity.FAULT, detail, places=(capture.place,))]


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
