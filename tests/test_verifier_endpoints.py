"""`verify-tokens` on /v1/responses and /v1/messages: joined by their ids, judged by the same rules."""

import json
from typing import Any

import msgspec
import pytest

from sparseety.records import Scope
from tests.logbook import EOS, Logbook
from verifier import cli

HELLO, WORLD = 259, 264
IDS, PIECES = [HELLO, WORLD, EOS], ["hello", " world"]


@pytest.fixture
def judge(capsys, tmp_path):
    def run(book: Logbook) -> dict[str, tuple[str, set[str]]]:
        cli.main([str(book.write(tmp_path)), "--json"])
        verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {
            request["request_id"]: (request["verdict"], {finding["code"] for finding in request["findings"]})
            for request in verdicts
            if "request_id" in request
        }

    return run


def exchange(book: Logbook, engine_id: str, pieces: list[str], **stream: Any) -> None:
    book.engine_request(engine_id, IDS)
    book.stream(engine_id.removesuffix("_0"), pieces, usage=3, **stream)


def test_a_right_message_and_a_right_response_pass_and_a_changed_one_fails(judge):
    book = Logbook()
    exchange(book, "chatcmpl-1", PIECES, endpoint="messages", finish="end_turn")
    exchange(book, "resp_1_0", PIECES, endpoint="responses", finish="completed")
    exchange(book, "chatcmpl-2", ["hello", " worlt"], endpoint="messages", finish="end_turn")
    exchange(book, "resp_2_0", ["hello", " worlt"], endpoint="responses", finish="completed")
    assert judge(book) == {
        "chatcmpl-1": ("pass", set()),
        "resp_1": ("pass", set()),
        "chatcmpl-2": ("fail", {"ALTERED_TEXT"}),
        "resp_2": ("fail", {"ALTERED_TEXT"}),
    }


def test_a_message_cut_at_a_stop_sequence_passes_and_a_response_cut_at_one_is_not_known(judge):
    book = Logbook()
    for name, endpoint, reason in (("chatcmpl-1", "messages", " wo"), ("resp_1_0", "responses", None)):
        book.engine_request(name, IDS[:2], finish="abort")
        response_id = name.removesuffix("_0")
        book.stream(response_id, ["hello"], endpoint=endpoint, finish="x", stop_reason=reason, stop=[" wo"])
    found = judge(book)
    assert found["chatcmpl-1"] == ("pass", {"TRIMMED_STOP"})
    assert found["resp_1"] == ("incomplete", {"UNVERIFIABLE"})


def test_a_stream_without_its_end_marker_is_unfinished(judge):
    book = Logbook()
    exchange(book, "resp_1_0", PIECES, endpoint="responses", finish="completed", end_marker=False)
    assert judge(book)["resp_1"] == ("fail", {"UNFINISHED"})


def test_the_turns_of_a_response_are_not_told_apart_and_are_no_orphans(judge):
    book = Logbook()
    book.engine_request("resp_1_1", IDS)
    exchange(book, "resp_1_0", [*PIECES, *PIECES], endpoint="responses", finish="completed")
    assert judge(book) == {"resp_1": ("incomplete", {"JOIN_AMBIGUOUS"})}


def test_requests_that_were_left_before_they_had_an_id_account_for_what_the_engine_served(judge):
    book = Logbook()
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    for endpoint, x_request_id in (("messages", "a"), ("responses", "b")):
        book.stream(None, [], endpoint=endpoint, x_request_id=x_request_id, finish=None, outcome="client_gone")
    book.engine_request("chatcmpl-a", IDS)
    book.engine_request("resp_77_0", IDS)
    book.engine_request("resp_78_0", IDS)
    found = judge(book)
    assert found["chatcmpl-a"] == found["resp_77"] == ("out_of_scope", {"ABORTED_BEFORE_ID"})
    assert found["resp_78"] == ("fail", {"ORPHAN_BACKEND"})
