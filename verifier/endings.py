"""How a choice ended: what the client was told, against the engine's ids, its limits and the stop strings. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from sparseety.records import EngineStart, RequestAdded, RequestFinished
from verifier.expect import Expected


def finish_mismatch(
    told: str | None,
    stop_reason: int | str | None,
    ids: Sequence[int],
    added: RequestAdded,
    finished: RequestFinished,
    engine: EngineStart | None,
) -> str | None:
    """Why the finish reason cannot be right; None: nothing speaks against it. A stop string is the front end's."""
    if isinstance(stop_reason, str):
        return None
    by_engine = finished.finish_reason
    if {told, by_engine} == {"stop", "length"}:
        return f'the client was told "{told}", the engine ended it by "{by_engine}"'
    if told == by_engine == "length" and (room := _room(ids, added, engine)):
        return f'the client was told "length", and {room} more tokens had room'
    return None  # both say "stop": which ids can end it is not known so surely that the last one could speak against it


def _room(ids: Sequence[int], added: RequestAdded, engine: EngineStart | None) -> int:
    """How many tokens were left until the request's limit and the model's; 0 where a limit is not known."""
    longest = engine.max_model_len if engine else None
    if added.max_tokens is None or longest is None or added.role is not None:
        return 0
    return min(added.max_tokens - len(ids), longest - added.prompt_len - len(ids))


def stops_inside(texts: Iterable[str], stops: Iterable[str], *, may_end_with_one: bool) -> Iterator[tuple[str, int]]:
    """Each stop string that the texts hold, and where it ends there. may_end_with_one: at a text's end it is right."""
    stops = [stop for stop in stops if stop]
    for text in texts:
        for stop in stops:
            at = text.find(stop)
            while at >= 0:
                end = at + len(stop)
                if end < len(text) or not may_end_with_one:
                    yield stop, end
                at = text.find(stop, at + 1)


def counts(stop: str, end: int, expected: Expected | None, came: str, min_tokens: int) -> bool:
    """Would the server have stopped at this stop string, which ends there in `came`? False also where it is not known.

    expected: the text of the ids. A parser that drops a marker may make a stop string of what stood on both sides.
    """
    if expected is None or stop not in expected.text:
        return False
    return not min_tokens or (expected.text.startswith(came) and expected.tokens_emitting(end) > min_tokens)
