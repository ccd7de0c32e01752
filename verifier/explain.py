"""One request in full, as text: where its time went, each chunk beside the tokens in it, each check. Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate

from verifier.choice import TokenizerOf
from verifier.expect import TextRules, from_replay, from_table
from verifier.findings import RequestVerdict
from verifier.output import printable, quote, request_lines
from verifier.packed import OpenCapture
from verifier.requests import Capture, Delivered, EngineRequest, Join
from verifier.tokenizer import NoTokenizer

_AROUND = 6  # chunks shown before and after the first faulty one; all where there is no fault and they are few
_FEW = 40


def is_named(capture: OpenCapture, name: str) -> bool:
    """Is this the request that somebody calls so?"""
    begin = capture.begin
    return name in capture.ids or (begin is not None and name in (begin.uuid, begin.x_request_id))


def lines(
    capture: Capture, join: Join, verdict: RequestVerdict, tokenizer_of: TokenizerOf, show_text: bool
) -> Iterator[str]:
    yield from _head(capture)
    for choice in sorted(set(capture.choices) | set(join.choices)):
        engines = join.choices.get(choice, [])
        delivered = capture.choices.get(choice, Delivered())
        yield from _choice(capture, choice, delivered, engines, verdict, tokenizer_of, show_text)
    yield ""
    yield from request_lines(verdict, show_text, verbose=True)


def _head(capture: Capture) -> Iterator[str]:
    start, ending = capture.start, capture.ending
    name = capture.response_id or (start.uuid if start else f"capture {capture.number}")
    facts = [f"request {printable(name)}"]
    if start is not None:
        parameters = start.parameters
        facts.append(start.endpoint or start.path)
        if parameters is not None:
            facts += ["stream" if parameters.stream else "whole", printable(parameters.model or "no model named")]
        facts.append(datetime.fromtimestamp(start.ts, UTC).isoformat(timespec="milliseconds"))
    yield "   ".join(facts)
    if ending is None:
        yield "  not ended in this log"
        return
    stamps, usage = ending.stamps, capture.usage
    times = [f"{ending.outcome}, status {ending.status}"]
    if stamps.sent is not None and stamps.first_token is not None:
        times.append(f"TTFT {_ms(stamps.first_token - stamps.sent)}")
    if stamps.sent is not None and stamps.end is not None:
        times.append(f"total {_ms(stamps.end - stamps.sent)}")
    if usage is not None:
        times.append(f"usage {usage.prompt_tokens} prompt, {usage.completion_tokens} completion")
    yield "  " + "   ".join(times)


def _choice(
    capture: Capture,
    choice: int,
    delivered: Delivered,
    engines: list[EngineRequest],
    verdict: RequestVerdict,
    tokenizer_of: TokenizerOf,
    show_text: bool,
) -> Iterator[str]:
    yield ""
    told = f"finish {delivered.finish_reason or 'none'}"
    if delivered.stop_reason is not None:
        told += (
            f" ({quote(delivered.stop_reason) if isinstance(delivered.stop_reason, str) else delivered.stop_reason})"
        )
    if len(engines) != 1:
        yield f"  choice {choice}   {told}   {len(engines)} engine requests"
        return
    engine = engines[0]
    reason = engine.finished.finish_reason if engine.finished else "not in the log"
    yield (
        f"  choice {choice}   {told}   engine {reason}   {len(engine.ids)} ids sampled, "
        f"{len(delivered.pieces)} chunks of {delivered.length} characters delivered"
    )
    try:
        tokens = _tokens_of_chunks(engine, delivered, tokenizer_of)
    except NoTokenizer as error:
        yield f"  {error}"
        return
    faulty = [f.chunk_index for f in verdict.findings if f.choice == choice and f.chunk_index is not None]
    began = capture.start.ts if capture.start else (delivered.piece_times[0] if delivered.piece_times else 0.0)
    yield from _table(engine, delivered, tokens, faulty[0] - 1 if faulty else None, began, show_text)


def _tokens_of_chunks(engine: EngineRequest, delivered: Delivered, tokenizer_of: TokenizerOf) -> list[range]:
    """For each chunk, the tokens whose text ends in it, going by the length of the text alone."""
    assert engine.added is not None
    added, tokenizer = engine.added, tokenizer_of(engine.log)
    rules = TextRules(
        added.skip_special_tokens,
        added.spaces_between_special_tokens,
        added.include_stop_str_in_output,
        added.prompt_len,
        added.prompt_tail,
    )
    expected = from_table(tokenizer, engine.ids, rules) or from_replay(tokenizer, engine.ids, rules)
    found, first = [], 0
    for end in accumulate(map(len, delivered.pieces)):
        last = max(first, expected.token_at(end))
        found.append(range(first, last))
        first = last
    return found


def _table(
    engine: EngineRequest,
    delivered: Delivered,
    tokens: Sequence[range],
    faulty: int | None,
    began: float,
    show_text: bool,
) -> Iterator[str]:
    count = len(delivered.pieces)
    first, last = 0, count
    if faulty is not None:
        first, last = max(0, faulty - _AROUND), min(count, faulty + _AROUND + 1)
    elif count > _FEW:
        last = _FEW // 2
    yield "     chunk       ms  tokens  text"
    for index in range(first, last):
        ids = [engine.ids[token] for token in tokens[index]]
        piece = delivered.pieces[index]
        shown = f"{quote(piece)}  {ids}" if show_text else f"‹{len(piece)}›"
        span = f"{tokens[index].start}-{tokens[index].stop - 1}" if tokens[index] else "-"
        mark = "✗" if index == faulty else " "
        at = f"{(delivered.piece_times[index] - began) * 1000:8.1f}"
        kind = "" if delivered.piece_kinds[index] == "text" else f"  {delivered.piece_kinds[index]}"
        yield f"   {mark} {index + 1:5} {at}  {span:>7} {shown}{kind}"
    if last < count and faulty is None:
        yield f"     … {count - last} more chunks"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
