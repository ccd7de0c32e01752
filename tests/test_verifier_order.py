"""A verdict does not depend on how the logs were cut and in which order they were read."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseety.records import AnyRecord, EngineEvent, Gap, LogClose, LogOpen, Response, Scope, Stamps
from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD
from tests.test_verifier_segments import cut
from verifier.findings import RequestVerdict
from verifier.fragments import assort
from verifier.gather import LogFile, Logs
from verifier.judging import judge_cases
from verifier.orphans import judge_orphans
from verifier.pending import Contested, Pending
from verifier.run import verify
from verifier.tokenizer import TokenizerShelf
from verifier.witnesses import Witnesses

SHELF = TokenizerShelf([])
Blocks = list[tuple[str, list[tuple[int, AnyRecord]], float]]
"""In reading order: file, lines with their records, and up to when everything is said to be read after it."""


def judged(blocks: Blocks) -> list[RequestVerdict]:
    """The verdicts of a run that reads these blocks in this order."""
    logs, verdicts = one_pass(blocks, None)
    contested = Contested()
    while (more := contested | logs.pending.contested) != contested:
        contested = more
        logs, again = one_pass(blocks, contested)
        verdicts |= again
    orphans = judge_orphans(logs.files, logs.pending.orphans(), logs.pending.unnamed)
    return [verdict for _, verdict in sorted(verdicts.items())] + orphans


def one_pass(blocks: Blocks, only: Contested | None) -> tuple[Logs, dict[Any, RequestVerdict]]:
    unread = {name for name, records, _ in blocks if isinstance(records[0][1], LogOpen)}
    openings = {name: records[0][1].ts for name, records, _ in blocks if isinstance(records[0][1], LogOpen)}

    def to_come() -> float:
        return min((openings[name] for name in unread if name.startswith("engine")), default=math.inf)

    logs = Logs(Pending(Witnesses(lambda: logs.engine_logs, to_come), only))
    files: dict[str, LogFile] = {}
    cases = []
    for name, records, watermark in blocks:
        unread.discard(name)
        file = files.setdefault(name, logs.file(Path(name)))
        file.take(assort(Path(name), records, []))
        cases += [(case, judge_cases([case], logs.engine_logs, SHELF)[0]) for case in logs.pending.ready(watermark)]
    for file in files.values():
        file.end()
    logs.end()
    cases += [(case, judge_cases([case], logs.engine_logs, SHELF)[0]) for case in logs.pending.rest()]
    for _, verdict in cases:
        verdict.model = None  # is decided in the end
    return logs, {(case.capture.log.writer, case.capture.number): verdict for case, verdict in cases}


def whole(books: Sequence[Logbook]) -> Blocks:
    """Each log at once, and nothing judged before the end."""
    found: Blocks = []
    for number, book in enumerate(books):
        for name, records in ((f"proxy{number}", book.proxy), (f"engine{number}", book.engine)):
            found.append((name, list(enumerate(records, 1)), -math.inf))
    return found


# ------------------------------------------------------------------------------------------------- what logs hold

NAMES = st.sampled_from(["chatcmpl-a", "chatcmpl-b", "chatcmpl-c", "cmpl-d"])
PAUSES = st.sampled_from([0.0, 0.5, 3.0, 90.0])


@st.composite
def logbooks(draw: Callable[..., Any]) -> Logbook:
    book = Logbook(now=draw(st.sampled_from([1000.0, 1001.0])))
    exclusive = Scope(exclusive=draw(st.booleans()))
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=exclusive)
    if draw(st.integers(0, 9)) == 0:
        book.engine.append(EngineEvent(ts=book.tick(), kind="control", sample=0.5))
    for _ in range(draw(st.integers(1, 5))):
        draw(st.sampled_from([both, both, both, both, choices, proxy_only, engine_only, nameless, gap]))(book, draw)
        book.now += draw(PAUSES)
    for records in (book.proxy, book.engine):
        if draw(st.booleans()):  # lines swapped, lost or late
            spoil(records, draw)
        if draw(st.booleans()):
            records.append(LogClose(ts=book.tick(), records=len(records), lost=0))
    return book


def both(book: Logbook, draw: Any) -> None:
    name = draw(NAMES)
    text = draw(st.sampled_from([" world", " wOrld"]))
    keys: dict[str, Any] = {"x_request_id": name.partition("-")[2]} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        keys |= {"finish": None, "outcome": "client_gone", "end_marker": False}
    engine = {"name": name, "endpoint": "chat"}
    if name.startswith("cmpl-"):
        book.engine_request(f"{name}-0", [HELLO, WORLD, EOS])
        book.stream(name, ["hello", text], endpoint="completions", **keys)
    else:
        book.exchange([HELLO, WORLD, EOS], ["hello", text], **engine, **keys)


def choices(book: Logbook, draw: Any) -> None:
    for choice in range(4):
        book.engine_request(f"cmpl-d-{choice // 2}", [HELLO, 65 + choice, EOS], child=choice % 2)
    pieces = {choice: ["hello", chr(65 + choice)] for choice in range(draw(st.integers(2, 4)))}
    book.stream("cmpl-d", pieces, endpoint="completions", n=2, prompts=2)


def proxy_only(book: Logbook, draw: Any) -> None:
    book.stream(draw(NAMES), ["hello"], model=draw(st.sampled_from(["toy", "other"])))


def engine_only(book: Logbook, draw: Any) -> None:
    book.engine_request(draw(NAMES), [HELLO, HELLO2])


def nameless(book: Logbook, draw: Any) -> None:
    number = book.stream(None, [], finish=None, outcome="client_gone", end_marker=False, x_request_id="a")
    if draw(st.booleans()):
        book.proxy.append(
            Response(ts=book.tick(), capture=number, outcome="complete", stamps=Stamps(), status=draw(st.just(503)))
        )


def gap(book: Logbook, draw: Any) -> None:
    numbers = draw(st.lists(st.integers(1, 3), max_size=2, unique=True))
    records = draw(st.sampled_from([book.proxy, book.engine]))
    key = "captures" if records is book.proxy else "requests"
    records.append(Gap(ts=book.tick(), reason="queue full", count=1, **{key: numbers}))


def spoil(records: list[AnyRecord], draw: Any) -> None:
    movable = range(1, len(records))
    if len(movable) > 1:
        one, other = draw(st.sampled_from(movable)), draw(st.sampled_from(movable))
        match draw(st.sampled_from(["swap", "lose", "repeat", "late"])):
            case "swap":
                records[one], records[other] = records[other], records[one]
            case "lose":
                del records[one]
            case "repeat":
                records.insert(other, records[one])
            case "late":
                records[one] = msgspec.structs.replace(records[one], ts=records[one].ts + draw(PAUSES))


@st.composite
def readings(draw: Callable[..., Any], books: Sequence[Logbook]) -> Blocks:
    """The same logs in blocks of any size, in any order between logs; and what is said to be read may be a lie."""
    queues = []
    for name, records, _ in whole(books):
        size = draw(st.integers(1, 12))
        queues.append([(name, records[at : at + size]) for at in range(0, len(records), size)])
    found: Blocks = []
    while queues:
        queue = queues[draw(st.integers(0, len(queues) - 1))]
        name, records = queue.pop(0)
        watermark = draw(st.sampled_from([-math.inf, records[-1][1].ts - 1, records[-1][1].ts, math.inf]))
        found.append((name, records, watermark))
        queues = [one for one in queues if one]
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_the_verdicts_are_those_of_judging_whole_logs_in_whatever_order_they_are_read(data):
    books = data.draw(st.lists(logbooks(), min_size=1, max_size=2))
    for number, book in enumerate(books):  # writers of their own
        for records in (book.proxy, book.engine):
            records[0] = msgspec.structs.replace(records[0], pid=number)
    expected = judged(whole(books))
    found = judged(data.draw(readings(books)))
    assert brief(found) == brief(expected)
    assert found == expected


def brief(verdicts: list[RequestVerdict]) -> list[Any]:
    """What a failure is best seen by."""
    return [(one.uuid, one.request_id, one.verdict.value, [f.code for f in one.findings]) for one in verdicts]


@pytest.mark.parametrize(("jobs", "block"), [(1, 300), (1, 5000), (2, 4000)])
def test_the_verdicts_are_the_same_whatever_the_number_of_processes_and_the_size_of_blocks(
    tmp_path, monkeypatch, jobs, block
):
    book = Logbook()
    for number in range(60):
        text = " wOrld" if number % 7 == 0 else " world"
        book.exchange([HELLO, WORLD, EOS], ["hello", text], name=f"chatcmpl-{number % 50}", usage=3 + number % 2)
        book.now += number % 5
    cut(book.proxy, tmp_path, 70)
    cut(book.engine, tmp_path, 90)
    paths = sorted(tmp_path.iterdir())
    expected = verify(paths, SHELF, jobs=1)
    monkeypatch.setattr("verifier.reading.BLOCK_BYTES", block)
    found = verify(paths, SHELF, jobs=jobs)
    assert found == expected
    assert {verdict.verdict.value for verdict in found.verdicts} == {"pass", "fail"}


def test_a_request_whose_engine_ended_long_after_is_judged_as_if_all_had_been_read_at_once(tmp_path):
    """Clocks that differ by an hour, and one log that holds everything at its very end."""
    book = Logbook()
    for number in range(5):
        book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name=f"chatcmpl-{number}")
    book.engine = [msgspec.structs.replace(record, ts=record.ts + 3600) for record in book.engine]
    report = verify(sorted(book.write(tmp_path).iterdir()), SHELF)
    assert [verdict.verdict.value for verdict in report.verdicts] == ["pass"] * 5
