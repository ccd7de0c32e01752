"""Every fault of the demo backend changes what it says, and nothing else."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.backend import Settings, serving
from deploy.demo.faults import KINDS, Fault, NotPossible, apply, parse_fault
from deploy.demo.replay import Ended, Piece, Tick
from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, LogClose, RequestAdded, RequestFinished, Step

PROMPT = "Write a C program that reverses a string in place."


def spell(token_id: int) -> str:
    return f"<{token_id}>"


def ticks_of(*texts: str) -> list[Tick]:
    last = len(texts)
    return [
        Tick(
            {0: [i]},
            [Piece(0, text, [i], i, "length" if i == last else None)],
            {0: Ended("length")} if i == last else {},
        )
        for i, text in enumerate(texts, start=1)
    ]


def texts_of(ticks: list[Tick]) -> list[str]:
    return [piece.text for tick in ticks for piece in tick.pieces]


def rows_of(ticks: list[Tick]) -> list[int]:
    return [i for tick in ticks for i in tick.rows[0]]


def done(kind: str, ticks: list[Tick], *, stream: bool = True, usage: bool = True) -> Any:
    return apply(parse_fault(kind), ticks, spell=spell, stream=stream, usage=usage)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("drop@1", ["b", "c", "d"]),
        ("drop", ["a", "c", "d"]),
        ("duplicate@3", ["a", "b", "c", "c", "d"]),
        ("swap@1", ["b", "a", "c", "d"]),
        ("swap@2", ["a", "c", "b", "d"]),
        ("alter@2", ["a", "#", "c", "d"]),
    ],
)
def test_text_faults_change_the_text_and_no_id(kind: str, texts: list[str]) -> None:
    plan = done(kind, ticks_of("a", "b", "c", "d"))
    assert texts_of(plan.ticks) == texts
    assert rows_of(plan.ticks) == [1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "ids"), [("lose-id@2", [1, 3, 4]), ("alter-id@2", [1, 300, 3, 4])])
def test_id_faults_change_the_log_and_no_text(kind: str, ids: list[int]) -> None:
    plan = done(kind, ticks_of("a", "b", "c", "d"))
    assert texts_of(plan.ticks) == ["a", "b", "c", "d"]
    assert rows_of(plan.ticks) == ids


def test_a_swap_passes_over_pairs_whose_order_makes_no_difference() -> None:
    assert texts_of(done("swap@1", ticks_of("\n", "\n\n", "\n", "x", "y")).ticks) == ["\n", "\n\n", "x", "\n", "y"]
    with pytest.raises(NotPossible, match="no two neighbouring chunks"):
        done("swap", ticks_of("a", "aa", "a", "x"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "extra-usage"])
def test_what_cannot_be_done_is_said_and_changes_nothing(kind: str) -> None:
    ticks = ticks_of("", "only the finish has text")
    before = copy.deepcopy(ticks)
    with pytest.raises(NotPossible):
        done(kind, ticks)
    with pytest.raises(NotPossible):
        done(f"{kind}@9", ticks)
    assert ticks == before


def test_usage_that_nobody_sees_cannot_be_wrong_and_a_whole_reply_cannot_be_cut() -> None:
    with pytest.raises(NotPossible, match="include_usage"):
        done("extra-usage", ticks_of("a", "b"), usage=False)
    with pytest.raises(NotPossible, match="streamed"):
        done("cut", ticks_of("a", "b"), stream=False)


@pytest.mark.parametrize("text", ["", "alter@0", "alter@", "alter@-1", "typo", "alter@2@3", "drop@99999999999"])
def test_a_fault_that_does_not_exist_is_refused_with_the_list_of_those_that_do(text: str) -> None:
    with pytest.raises(ValueError, match="duplicate, swap, alter, lose-id"):
        parse_fault(text)
    assert parse_fault("lose-id@3") == Fault("lose-id", 3)


# ------------------------------------------------------------------------------------------ over the wire


@dataclass
class Run:
    """One request, as its client and its engine's log saw it."""

    text: str
    body: str
    broke_off: bool
    records: list[AnyRecord]

    @property
    def ids(self) -> list[int]:
        return [i for record in self.records if isinstance(record, Step) for row in record.rows for i in row.ids]


def ask(url: str, fault: str | None, **more: Any) -> tuple[str, bool]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 20} | more
    received, broke_off = b"", False
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers={"X-Demo-Fault": fault} if fault else {}
    ) as response:
        assert response.status_code == 200
        try:
            for data in response.iter_raw():
                received += data
        except httpx.RemoteProtocolError:
            broke_off = True
    return received.decode(), broke_off


def text_in(body: str) -> str:
    chunks = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def records_in(folder: Path) -> list[list[AnyRecord]]:
    def refuse(problem: object) -> None:
        raise AssertionError(problem)

    return [[record for _, record in read_log(path, refuse)] for path in find_logs([str(folder)])]


def run(folder: Path, fault: str | None) -> Run:
    with serving(Settings(log_dir=folder, token_delay=0)) as url:
        body, broke_off = ask(url, fault, stream_options={"include_usage": True})
    return Run(text_in(body), body, broke_off, records_in(folder)[0])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("clean"), None)


@pytest.mark.parametrize("kind", ["drop", "duplicate", "swap", "alter"])
def test_a_text_fault_reaches_the_client_alone(kind: str, clean: Run, tmp_path: Path) -> None:
    faulty = run(tmp_path, kind)
    assert faulty.text != clean.text
    assert faulty.ids == clean.ids
    assert faulty.body.endswith("data: [DONE]\n\n")


def test_a_lost_id_is_lost_in_the_log_alone_and_leaves_no_hole_there(clean: Run, tmp_path: Path) -> None:
    faulty = run(tmp_path, "lose-id@4")
    assert faulty.text == clean.text
    assert faulty.ids == clean.ids[:3] + clean.ids[4:]
    indexes = [row.first_index for record in faulty.records if isinstance(record, Step) for row in record.rows]
    assert indexes == list(range(19))
    assert next(r.total_ids for r in faulty.records if isinstance(r, RequestFinished)) == 19


def test_an_altered_id_is_altered_in_the_log_alone(clean: Run, tmp_path: Path) -> None:
    faulty = run(tmp_path, "alter-id@4")
    assert faulty.text == clean.text
    assert [a == b for a, b in zip(faulty.ids, clean.ids, strict=True)] == [True] * 3 + [False] + [True] * 16


def test_extra_usage_counts_one_token_too_many(clean: Run, tmp_path: Path) -> None:
    assert '"completion_tokens":20,' in clean.body
    faulty = run(tmp_path, "extra-usage")
    assert '"completion_tokens":21,' in faulty.body
    assert (faulty.text, faulty.ids) == (clean.text, clean.ids)


def test_a_cut_stream_ends_in_order_without_its_finish_while_the_engine_goes_on(clean: Run, tmp_path: Path) -> None:
    faulty = run(tmp_path, "cut@5")
    assert not faulty.broke_off
    assert clean.text.startswith(faulty.text)
    assert 0 < len(faulty.text) < len(clean.text)
    assert "[DONE]" not in faulty.body
    assert '"finish_reason":"' not in faulty.body
    assert faulty.body.endswith("\n\n")


def test_a_dying_engine_breaks_all_connections_off_and_its_log_just_ends(clean: Run, tmp_path: Path) -> None:
    with serving(Settings(log_dir=tmp_path, token_delay=0.002)) as url:
        body, broke_off = ask(url, "die@5")
        after, _ = ask(url, None)
    assert broke_off
    assert 0 < len(text_in(body)) < len(clean.text)
    dead, alive = records_in(tmp_path)
    assert any(isinstance(record, RequestAdded) for record in dead)
    assert isinstance(dead[-1], Step)
    assert not any(isinstance(record, LogClose | RequestFinished) for record in dead)
    assert after.endswith("[DONE]\n\n"), "a new engine takes the next request"
    assert isinstance(alive[-1], LogClose)


def test_the_settings_fault_falls_on_every_mth_request(clean: Run, tmp_path: Path) -> None:
    with serving(Settings(log_dir=tmp_path, token_delay=0, fault=Fault("alter"), fault_every=3)) as url:
        texts = [text_in(ask(url, None)[0]) for _ in range(7)]
    assert [text == clean.text for text in texts] == [True, True, False, True, True, False, True]


def test_the_settings_fault_waits_for_a_request_that_it_can_be_done_to() -> None:
    with serving(Settings(token_delay=0, fault=Fault("extra-usage"), fault_every=2)) as url:
        bodies = [ask(url, None)[0] for _ in range(3)]
        asked = ask(url, None, stream_options={"include_usage": True})[0]
    assert not any("usage" in body for body in bodies)
    assert '"completion_tokens":21,' in asked


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Settings(token_delay=0)) as url:
        yield url


@pytest.mark.parametrize("fault", ["typo", "alter@500", "extra-usage"])
def test_a_header_that_asks_for_the_impossible_is_a_400(fault: str, url: str) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 20}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"X-Demo-Fault": fault})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Demo-Fault"


def test_faults_reach_whole_replies_too(url: str) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20}

    def whole(fault: str | None) -> Any:
        headers = {"X-Demo-Fault": fault} if fault else {}
        return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)

    plain = whole(None).json()
    altered = whole("alter").json()
    assert altered["choices"][0]["message"] != plain["choices"][0]["message"]
    assert whole("extra-usage").json()["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] + 1
    assert whole("die").status_code == 500
