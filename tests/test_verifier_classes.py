"""Findings about how a choice was asked for, held back, stopped and ended: each beside its nearest right neighbour."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseety.records import EngineEvent, EngineStart, RequestAdded
from tests.logbook import BYTE_LEVEL, EOS, SENTENCEPIECE, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD, codes, verify
from verifier.tokenizer import load_tokenizer

__all__ = ["verify"]  # a fixture

DEMO = Path(__file__).parent.parent / "deploy/demo/tokenizer"
BOS, THINK, END_THINK = 271, 273, 274
SMILE = [240, 159, 152, 128]  # its bytes, an id each
LENGTH: dict[str, Any] = {"finish": "length", "engine_finish": "length"}


@pytest.fixture
def judged(tmp_path, verify):
    """(verdict, codes) of one exchange."""

    def run(ids, pieces, *arguments: str, book: Logbook | None = None, **keys: Any) -> tuple[str, set[str]]:
        book = book or Logbook()
        book.exchange(ids, pieces, **keys)
        return codes(verify(book.write(tmp_path), "--json", *arguments))

    return run


# ------------------------------------------------------------------------------------------------- the prompt's start


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ({"prompt_len": 3, "prompt_tail": [BOS, BOS, HELLO]}, {"DOUBLE_BOS"}),
        ({"prompt_len": 3, "prompt_tail": [BOS, HELLO, BOS]}, set()),
        ({"prompt_len": 3, "prompt_tail": [HELLO, HELLO, BOS]}, set()),
        ({"prompt_len": 90, "prompt_tail": [BOS, BOS, HELLO]}, set()),  # that is the end of a longer one
        ({"prompt_len": 90, "prompt_tail": [HELLO], "prompt_head": [BOS, BOS]}, {"DOUBLE_BOS"}),
        ({"prompt_len": 90, "prompt_tail": [HELLO], "prompt_head": [HELLO, HELLO]}, set()),
        ({"prompt_len": 1, "prompt_tail": [BOS]}, set()),
    ],
)
def test_a_prompt_that_begins_twice_is_told_and_no_fault(judged, added, found):
    keys = {f"engine_{name}": value for name, value in added.items()}
    assert judged([HELLO, EOS], ["hello"], **keys) == ("pass", found)


def test_which_token_begins_a_prompt_is_read_from_the_tokenizer_or_its_configuration(tmp_path):
    assert load_tokenizer(SENTENCEPIECE).bos() == 1
    assert load_tokenizer(BYTE_LEVEL).bos() == BOS
    shutil.copy(DEMO / "tokenizer.json", tmp_path)  # which puts none there itself
    for config, token in [('{"bos_token": "<|im_start|>"}', 1), ('{"bos_token": {"content": "<|im_end|>"}}', 2)]:
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert load_tokenizer(tmp_path).bos() == token
    for config in ('{"bos_token": null}', "{}", "[]", "no JSON"):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert load_tokenizer(tmp_path).bos() is None


# ------------------------------------------------------------------------------------------------------ held back


@pytest.mark.parametrize(
    ("ids", "pieces", "found"),
    [
        ([HELLO, *SMILE, EOS], ["hello", None, None, None, "😀"], {"HELD_BACK"}),
        ([HELLO, *SMILE, EOS], ["hello", "😀"], set()),  # one chunk with all of it: merged, not held back
        ([HELLO, WORLD, HELLO2, EOS], [None, "hello world", " hello"], {"HELD_BACK"}),
        ([HELLO, WORLD, HELLO2, EOS], ["hello", None, " wor", "ld hello"], set()),
        ([HELLO, WORLD, HELLO2, EOS], ["hel", None, "lo wor", "ld hello"], {"HELD_BACK"}),
        ([HELLO, BOS, WORLD, EOS], ["hello", None, " world"], {"SPECIAL_SKIPPED"}),  # the event of the special token
        ([HELLO, BOS, WORLD, HELLO2, EOS], ["hello", None, " world hello"], {"SPECIAL_SKIPPED"}),  # perhaps of that
        ([HELLO, WORLD, EOS], ["hello", " world", None], set()),
    ],
)
def test_text_held_back_and_sent_with_later_text_is_told(judged, ids, pieces, found):
    assert judged(ids, pieces) == ("pass", found)


# ---------------------------------------------------------------------------------------------------- stop strings

MISSED = ("fail", {"STOP_MISSED"})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"stop": ["o w"], **LENGTH}, MISSED),
        ({"stop": ["o w"]}, MISSED),  # ended by the end token, further on
        ({"engine_stop": ["o w"], **LENGTH}, MISSED),
        ({"stop": ["o W"], **LENGTH}, ("pass", set())),
        ({"stop": [""], **LENGTH}, ("pass", set())),
        ({"stop": ["o w"], "engine_min_tokens": 2, **LENGTH}, ("pass", set())),  # complete within the first two tokens
        ({"stop": ["o w"], "engine_min_tokens": 1, **LENGTH}, MISSED),
    ],
)
def test_text_that_goes_on_past_a_stop_string_is_a_fault(judged, keys, expected):
    ids = [HELLO, WORLD, HELLO2, *([] if "finish" in keys else [EOS])]
    assert judged(ids, ["hello", " world", " hello"], **keys) == expected


def test_a_stop_string_at_the_end_is_right_where_it_is_to_stay(judged):
    kept = {"include_stop_str_in_output": True, "engine_include_stop_str_in_output": True, "stop": ["ld"]}
    assert judged([HELLO, WORLD], ["hello", " world"], stop_reason="ld", engine_finish="abort", **kept)[0] == "pass"
    gone = {"finish": None, "outcome": "client_gone", "end_marker": False, "engine_finish": "abort"}
    assert judged([HELLO, WORLD, HELLO2], ["hello", " world"], **gone, **kept) == ("pass", {"ABORTED_PREFIX"})
    went_on = judged([HELLO, WORLD, HELLO2], ["hello", " world", " hel"], **gone, **kept)
    assert went_on == ("fail", {"ABORTED_PREFIX", "STOP_MISSED"})


def test_of_two_stop_strings_in_one_step_the_server_goes_by_the_order_in_which_they_were_asked_for(judged):
    keys = {"stop": ["ld", "lo"], "stop_reason": "ld", "engine_finish": "abort"}
    assert judged([HELLO, WORLD], ["hello wor"], **keys) == ("pass", {"TRIMMED_STOP"})


def test_a_stop_string_that_only_a_left_out_marker_makes_is_none(judged):
    """`cd<think>ef`: a parser drops the marker, and "de" was never sampled in one piece."""
    book = Logbook(reasoning_parser="deepseek_r1")
    ids = [99, 100, THINK, 101, 102, END_THINK, 120, EOS]
    pieces = [("reasoning", "cd"), ("reasoning", "ef"), ("text", "x")]
    assert judged(ids, pieces, book=book, stop=["de"]) == ("pass", {"PARSED"})


def test_a_stop_string_within_the_reasoning_is_a_fault_as_well(judged):
    book = Logbook(reasoning_parser="deepseek_r1")
    pieces = [("reasoning", "cd"), ("reasoning", "ef"), ("text", "x")]
    verdict = judged([99, 100, 101, 102, END_THINK, 120, EOS], pieces, book=book, stop=["de"])
    assert verdict == ("fail", {"PARSED", "STOP_MISSED"})


# -------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("ids", "keys", "longest", "expected"),
    [
        ([HELLO, WORLD], {**LENGTH, "engine_max_tokens": 2}, 100, "pass"),
        ([HELLO, WORLD], {**LENGTH, "engine_max_tokens": 3}, 100, "fail"),
        (
            [HELLO, WORLD],
            {**LENGTH, "engine_max_tokens": 90, "engine_prompt_len": 98},
            100,
            "pass",
        ),  # the model's limit
        ([HELLO, WORLD], {**LENGTH, "engine_max_tokens": 90, "engine_prompt_len": 97}, 100, "fail"),
        ([HELLO, WORLD], {**LENGTH, "engine_max_tokens": 90}, None, "pass"),  # the model's limit is not known
        ([HELLO, WORLD], {**LENGTH, "engine_max_tokens": 90, "engine_role": "prefill"}, 100, "pass"),
        ([HELLO, WORLD], {"finish": "stop", "engine_finish": "length"}, 100, "fail"),
        ([HELLO, WORLD, EOS], {"finish": "length"}, 100, "fail"),
        ([HELLO, WORLD, 33], {}, 100, "pass"),  # "!" may end it, for all that is known
    ],
)
def test_a_finish_reason_that_ids_and_limits_speak_against_is_a_fault(judged, ids, keys, longest, expected):
    verdict, found = judged(ids, ["hello", " world"], book=Logbook(max_model_len=longest), **keys)
    assert verdict == expected
    assert found == ({"FINISH_MISMATCH"} if expected == "fail" else set())


# ---------------------------------------------------------------------------------------------------- re-tokenizing


@pytest.mark.parametrize(
    ("ids", "pieces", "keys", "found"),
    [
        ([256, 258, WORLD, EOS], ["hello world"], {}, {"DRIFT"}),
        ([HELLO, WORLD, EOS], ["hello world"], {}, set()),
        ([HELLO, 0xFF, WORLD, EOS], ["hello\ufffd world"], {}, {"NOT_COMPARABLE"}),
        ([HELLO, BOS, WORLD, EOS], ["hello world"], {}, {"NOT_COMPARABLE", "SPECIAL_SKIPPED"}),
    ],
)
def test_the_text_is_tokenized_anew_where_that_is_asked_for(judged, ids, pieces, keys, found):
    assert judged(ids, pieces, "--drift", **keys) == ("pass", found)
    assert judged(ids, pieces, **keys) == ("pass", found & {"SPECIAL_SKIPPED"})


def test_the_rate_of_drift_is_said_for_the_whole_run(tmp_path, verify):
    book = Logbook()
    book.exchange([256, 258, WORLD, EOS], ["hello world"])
    book.exchange([HELLO, WORLD, EOS], ["hello world"], name="chatcmpl-2")
    result = verify(book.write(tmp_path), "--drift")
    assert "tokenized anew: 400.0 of 1,000 tokens drifted (2 of 5 tokens)" in result.out
    assert "2 tokens in 1 stretch drifted" in verify(tmp_path, "--drift", "-v").out


# ---------------------------------------------------------------------------------------------------------- the logs


def test_a_hook_that_vllm_never_called_leaves_its_requests_incomplete(tmp_path, verify):
    book = Logbook()
    book.engine.append(EngineEvent(ts=book.tick(), kind="hook_silent", detail="Scheduler.update_from_output"))
    book.exchange([HELLO, EOS], ["jello"])
    book.stream("chatcmpl-unknown", ["hello"])
    result = verify(book.write(tmp_path), "--json")
    assert codes(result) == ("incomplete", {"HOOK_SILENT"})
    assert codes(result, "chatcmpl-unknown")[0] == "incomplete", "such a log was not obliged to know it"


@pytest.mark.parametrize(("seconds", "found"), [(-5.0, {"CLOCK_ANOMALY"}), (-0.5, set()), (5.0, {"CLOCK_ANOMALY"})])
def test_clocks_that_do_not_agree_are_told_and_the_text_is_judged_all_the_same(tmp_path, verify, seconds, found):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.engine = [
        msgspec.structs.replace(record, ts=record.ts + seconds) if isinstance(record, RequestAdded) else record
        for record in book.engine
    ]
    result = verify(book.write(tmp_path), "--json")
    assert codes(result) == ("pass", found)


# ------------------------------------------------------------------------------------------------------- tokenizers


def test_a_slow_tokenizer_is_not_judged_and_that_is_said(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    start = next(record for record in book.engine if isinstance(record, EngineStart))
    slow = msgspec.structs.replace(start.tokenizer, mode="slow")
    book.engine[book.engine.index(start)] = msgspec.structs.replace(start, tokenizer=slow)
    result = verify(book.write(tmp_path))
    assert result.exit_code == 3
    assert 'the engine decodes in tokenizer mode "slow", which is not judged yet' in result.out
