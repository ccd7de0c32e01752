"""What is known to be lost, odd or unread is nobody's fault, and no pass either."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseety.records import (
    AnyRecord,
    Chunk,
    EngineStart,
    Gap,
    LogClose,
    RequestAdded,
    RequestStart,
    Response,
    Scope,
    Stamps,
    StreamDone,
)
from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD, Result, codes, verify

__all__ = ["verify"]  # a fixture

Verify = Callable[..., Result]


def change(records: list[AnyRecord], kind: type, number: int = 0, **fields: Any) -> None:
    """Replace fields of the so-and-so-many-th record of a kind."""
    index = [i for i, record in enumerate(records) if isinstance(record, kind)][number]
    records[index] = msgspec.structs.replace(records[index], **fields)


def without(records: list[AnyRecord], kind: type, number: int = 0) -> None:
    index = [i for i, record in enumerate(records) if isinstance(record, kind)][number]
    del records[index]


@pytest.fixture
def book() -> Logbook:
    made = Logbook()
    made.exchange([HELLO, WORLD, HELLO2, EOS], ["hello", " world", " hello"], usage=4)
    return made


# ------------------------------------------------------------------------------------------ the log's own damage


def swap_chunks(book: Logbook) -> None:
    first, second = [i for i, record in enumerate(book.proxy) if isinstance(record, Chunk)][:2]
    book.proxy[first], book.proxy[second] = book.proxy[second], book.proxy[first]


def one_for_another(book: Logbook) -> None:
    chunks = [i for i, record in enumerate(book.proxy) if isinstance(record, Chunk)]
    book.proxy[chunks[1]] = book.proxy[chunks[0]]


@pytest.mark.parametrize(
    "damage",
    [
        swap_chunks,
        one_for_another,
        lambda book: without(book.proxy, Chunk, 1),
        lambda book: without(book.proxy, Chunk, 3),  # the finish
        lambda book: without(book.proxy, RequestStart),
        lambda book: without(book.proxy, StreamDone),
        lambda book: change(book.proxy, Chunk, 1, delta_text=" wor"),
        lambda book: change(book.proxy, Chunk, 1, delta_text="", delta_len=6),
        lambda book: change(book.proxy, StreamDone, total_text_len=999),
        lambda book: without(book.engine, RequestAdded),
        lambda book: change(book.engine, RequestAdded, prompt_tail=[2**70]),
    ],
    ids=[
        "two chunk lines swapped",
        "one chunk line in place of another",
        "a chunk line lost",
        "the finish lost",
        "the beginning lost",
        "the ending lost",
        "text cut short",
        "text not recorded",
        "counts that do not fit",
        "the engine's beginning lost",
        "impossible ids in the prompt",
    ],
)
def test_damage_of_a_log_makes_a_request_incomplete_and_blames_no_server(tmp_path, verify, book, damage):
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-whole")
    damage(book)
    result = verify(book.write(tmp_path), "--json")
    assert result.exit_code == 3, result.out + result.err
    verdicts = [request["verdict"] for request in result.json() if request["type"] == "request"]
    assert "fail" not in verdicts
    assert "incomplete" in verdicts
    assert codes(result, "chatcmpl-whole") == ("pass", set())


def test_a_request_whose_lines_were_all_taken_out_of_a_closed_log_is_missed(tmp_path, verify, book):
    book.exchange([HELLO, EOS], ["jello"], name="chatcmpl-2")  # a fault that somebody hides
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-3")
    book.proxy = [record for record in book.proxy if getattr(record, "capture", None) != 2]
    result = verify(book.write(tmp_path), "--json")
    assert result.exit_code == 3
    assert codes(result, "capture 2") == ("incomplete", {"TORN_RECORD"})


def test_a_log_that_was_closed_with_more_records_than_it_has_rules_out_exit_0(tmp_path, verify, book):
    folder = book.write(tmp_path)
    engine = folder / "engine-h-2-1.jsonl"
    lines = engine.read_bytes().splitlines(keepends=True)
    engine.write_bytes(b"".join([*lines[:2], *lines[2:3], *lines[3:-1], lines[-1].replace(b'"lost"', b'"lost"')]))
    assert verify(folder).exit_code == 0
    engine.write_bytes(b"".join([*lines[:-1], msgspec.json.encode(LogClose(ts=1e9, records=99, lost=0)) + b"\n"]))
    result = verify(folder)
    assert result.exit_code == 3
    assert "99 records when it was closed" in result.err


def test_an_ending_lost_in_a_log_that_is_still_written_is_open(tmp_path, verify, book):
    without(book.proxy, StreamDone)
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-2")
    result = verify(book.write(tmp_path, close=False), "--json")
    assert codes(result) == ("open", {"OPEN"})
    assert result.exit_code == 0


# -------------------------------------------------------------------------------------- replies that were not read


def test_a_stream_that_was_not_read_is_incomplete_not_unfinished(tmp_path, verify, book):
    """A compressed stream, an event too long to copy: forwarded, not read, and a gap says so."""
    number = book.stream(None, [], finish=None, end_marker=False)
    book.proxy.insert(-1, Gap(ts=book.tick(), reason="event stream in content coding br", count=1, captures=[number]))
    verdict, found = codes(verify(book.write(tmp_path), "--json"), f"uuid-{number}")
    assert verdict == "incomplete"
    assert "UNFINISHED" not in found


def test_a_whole_reply_that_was_not_read_is_incomplete(tmp_path, verify, book):
    number = book.stream(None, [])
    book.proxy = [record for record in book.proxy if getattr(record, "capture", 0) != number or hasattr(record, "uuid")]
    unread = Response(
        ts=book.tick(), capture=number, outcome="complete", stamps=Stamps(), status=200, unread="content coding gzip"
    )
    book.proxy.append(unread)
    verdict, found = codes(verify(book.write(tmp_path), "--json"), f"uuid-{number}")
    assert (verdict, "UNPARSED_EVENT" in found, "UNFINISHED" in found) == ("incomplete", True, False)


@pytest.mark.parametrize(
    "request_keys",
    [{"include_reasoning": False}, {"tools": True}],
)
def test_text_that_a_parser_may_have_taken_is_incomplete(tmp_path, verify, request_keys):
    book = Logbook()
    change(book.engine, EngineStart, reasoning_parser="no_parser_of_ours")
    book.exchange([HELLO, WORLD, EOS], [" world"], **request_keys)
    assert codes(verify(book.write(tmp_path), "--json"))[0] == "incomplete"


def test_a_request_without_text_is_checked_by_its_ids(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], [""], token_ids=[[HELLO, EOS]], detokenize=False, engine_detokenize=False)
    change(book.proxy, Chunk, chunk_index=None, accumulated_len=None)
    change(book.proxy, StreamDone, chunk_count=0)
    assert codes(verify(book.write(tmp_path / "ids"), "--json")) == ("pass", {"HIDDEN"})
    change(book.proxy, Chunk, token_ids=None)
    assert codes(verify(book.write(tmp_path / "none"), "--json"))[0] == "incomplete"


def test_a_tokenizer_mode_of_another_kind_is_not_judged_by_tokenizer_json(tmp_path, verify):
    book = Logbook()
    start = book.engine[1]
    assert isinstance(start, EngineStart)
    change(book.engine, EngineStart, tokenizer=msgspec.structs.replace(start.tokenizer, mode="mistral"))
    book.exchange([HELLO, EOS], ["hello"])
    assert codes(verify(book.write(tmp_path), "--json")) == ("incomplete", {"UNVERIFIABLE"})


# ---------------------------------------------------------------------------------------------- who had to speak


@pytest.mark.parametrize(
    "excuse",
    [
        lambda book: without(book.proxy, StreamDone, 1),  # a request in flight
        lambda book: book.proxy.append(Gap(ts=book.tick(), reason="queue full", count=9)),
        lambda book: book.proxy.append(Gap(ts=book.tick(), reason="queue full", count=9, captures=[2])),
    ],
    ids=["a request is open", "the proxy lost records", "it lost those of a request"],
)
def test_an_exclusive_proxy_that_lost_something_accuses_nobody(tmp_path, verify, book, excuse):
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    book.engine_request("chatcmpl-2", [HELLO, EOS])
    book.stream(None, [], finish=None)
    excuse(book)
    assert verify(book.write(tmp_path, close=False)).exit_code != 1


def test_an_exclusive_proxy_does_not_answer_for_the_time_after_its_end(tmp_path, verify, book):
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    book.now += 60
    book.engine_request("chatcmpl-later", [HELLO, EOS])
    closed = LogClose(ts=book.now - 50, records=len(book.proxy), lost=0)
    book.proxy.append(closed)
    result = verify(book.write(tmp_path, close=False), "--json")
    assert codes(result, "chatcmpl-later") == ("out_of_scope", {"ORPHAN_BACKEND"})


def test_a_reply_of_a_model_that_no_logged_engine_serves_is_no_orphan(tmp_path, verify, book):
    book.stream("chatcmpl-2", ["hello"], model="another")
    assert codes(verify(book.write(tmp_path), "--json"), "chatcmpl-2") == ("incomplete", {"UNVERIFIABLE"})


def test_only_clients_that_left_account_for_what_the_engine_did_unnamed(tmp_path, verify, book):
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    number = book.stream(None, [], finish=None)
    index = next(i for i, r in enumerate(book.proxy) if isinstance(r, StreamDone) and r.capture == number)
    book.proxy[index] = Response(
        ts=book.tick(), capture=number, outcome="complete", stamps=Stamps(), status=400, unread="status 400"
    )
    book.proxy = [r for r in book.proxy if not (isinstance(r, Chunk) and r.capture == number)]
    book.engine_request("chatcmpl-past", [HELLO, EOS])
    result = verify(book.write(tmp_path), "--json")
    assert codes(result, "chatcmpl-past") == ("fail", {"ORPHAN_BACKEND"})


# --------------------------------------------------------------------------------------------- faults that hid before


@pytest.mark.parametrize("outcome", ["upstream_broken", "shutdown", "internal_error"])
def test_wrong_text_before_a_break_is_a_fault(tmp_path, verify, outcome):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2], ["hello", " WORLD"], finish=None, outcome=outcome, end_marker=False)
    verdict, found = codes(verify(book.write(tmp_path), "--json"))
    assert (verdict, "ALTERED_TEXT" in found) == ("fail", True)


def test_a_stop_string_that_nobody_asked_for_excuses_no_lost_text(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2, EOS], ["hello"], stop_reason=" world")
    verdict, found = codes(verify(book.write(tmp_path), "--json"))
    assert verdict == "fail"
    assert {"STOP_NOT_IN_IDS", "MISSING_TEXT"} <= found


def test_a_choice_that_nobody_asked_for_is_a_fault(tmp_path, verify):
    book = Logbook()
    book.engine_request("chatcmpl-1", [HELLO, EOS])
    book.stream("chatcmpl-1", {0: ["hello"], 1: ["injected"]})
    verdict, found = codes(verify(book.write(tmp_path), "--json"))
    assert (verdict, "EXTRA_TEXT" in found) == ("fail", True)


@pytest.mark.parametrize("n", [0, -1, 5_000_000])
def test_an_absurd_number_of_choices_is_neither_a_pass_nor_a_hang(tmp_path, verify, n):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"], n=n)
    assert verify(book.write(tmp_path)).exit_code in (1, 3)


@pytest.mark.parametrize(("told", "engine"), [("length", "stop"), ("stop", "length")])
def test_a_finish_reason_that_is_not_the_engines_is_a_fault(tmp_path, verify, told, engine):
    book = Logbook()
    ids = [HELLO, EOS] if engine == "stop" else [HELLO, WORLD]
    book.exchange(ids, ["hello"] if engine == "stop" else ["hello", " world"], finish=told, engine_finish=engine)
    assert codes(verify(book.write(tmp_path), "--json")) == ("fail", {"FINISH_MISMATCH"})


def test_usage_that_counts_ids_past_a_stop_string_is_a_fault_of_a_server_that_does_not(tmp_path, verify):
    book = Logbook()
    keys: dict[str, Any] = {"stop": ["ST"], "stop_reason": "ST", "engine_finish": "abort", "engine_stop": ["ST"]}
    book.exchange([HELLO, 83, 84, WORLD], ["hello"], usage=4, **keys)
    assert codes(verify(book.write(tmp_path / "new"), "--json"))[1] == {
        "TRIMMED_STOP",
        "BACKEND_OVERRUN",
        "COUNT_MISMATCH",
    }
    change(book.engine, EngineStart, vllm="0.28.0")
    assert codes(verify(book.write(tmp_path / "old"), "--json"))[0] == "pass"


@pytest.mark.parametrize("ids", [[HELLO, -1, EOS], [HELLO, 2**70, EOS], [HELLO, 499, 500, EOS]])
def test_ids_that_no_model_can_sample_are_found_without_a_crash(tmp_path, verify, ids):
    book = Logbook()
    book.exchange(ids, ["hello"])
    verdict, _ = codes(verify(book.write(tmp_path), "--json"))
    assert verdict in ("fail", "incomplete")


# ----------------------------------------------------------------------------------------------------- one id, twice


def test_a_repeated_id_is_told_apart_by_time_where_that_decides(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.now += 60
    book.exchange([WORLD, EOS], [" world"])
    result = verify(book.write(tmp_path), "--json")
    assert [request["verdict"] for request in result.json()[:2]] == ["pass", "pass"]


def test_two_replies_that_claim_one_engine_request_are_ambiguous(tmp_path, verify, book):
    book.stream("chatcmpl-1", ["hello", " world", " hello"])
    result = verify(book.write(tmp_path), "--json")
    assert {request["verdict"] for request in result.json()[:2]} == {"incomplete"}


def test_an_empty_id_in_the_first_event_is_no_id(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    first = next(i for i, record in enumerate(book.proxy) if isinstance(record, Chunk))
    book.proxy[first] = msgspec.structs.replace(book.proxy[first], response_id="")
    change(book.proxy, Chunk, 1, response_id="chatcmpl-1")
    assert codes(verify(book.write(tmp_path), "--json"))[0] == "pass"


# ----------------------------------------------------------------------------------------------------- files


def test_logs_put_together_into_one_file_are_taken_apart_again(tmp_path, verify, book):
    folder = book.write(tmp_path / "logs")
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted(folder.iterdir())))
    result = verify(whole)
    assert result.exit_code == 0
    assert "1 pass" in result.out


@pytest.mark.parametrize("again", ["spelling", "copy", "link"])
def test_a_log_that_is_given_twice_counts_once(tmp_path, verify, book, again):
    folder = book.write(tmp_path / "logs")
    paths: list[Path] = [folder]
    if again == "spelling":
        paths.append(folder / ".." / "logs")
    else:
        for path in list(folder.iterdir()):
            copy = folder / f"{path.stem}-again.jsonl"
            copy.symlink_to(path) if again == "link" else copy.write_bytes(path.read_bytes())
    result = verify(*paths)
    assert result.exit_code == 0
    assert "1 request: 1 pass" in result.out


def test_one_engine_without_its_tokenizer_does_not_cost_the_others_their_verdict(tmp_path, verify, book):
    folder = book.write(tmp_path)
    other = Logbook(now=5000.0)
    other.exchange([HELLO, EOS], ["hello"], name="chatcmpl-other")
    start = other.engine[1]
    assert isinstance(start, EngineStart)
    change(other.engine, EngineStart, tokenizer=msgspec.structs.replace(start.tokenizer, name="org/elsewhere"))
    moved = other.write(tmp_path / "other")
    for path in moved.iterdir():
        path.rename(folder / f"other-{path.name}")
    result = verify(folder, "--json")
    assert result.exit_code == 3
    assert codes(result)[0] == "pass"
    assert codes(result, "chatcmpl-other") == ("incomplete", {"UNVERIFIABLE"})


def test_a_fifo_or_a_broken_link_in_the_folder_stops_nothing(tmp_path, verify, book):
    folder = book.write(tmp_path)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "broken.jsonl").symlink_to(folder / "nowhere")
    assert verify(folder).exit_code == 0
    assert verify(folder, "--tokenizer", folder / "pipe.jsonl").exit_code == 2
