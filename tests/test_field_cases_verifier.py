"""Faults and oddities reported in the field for LLM servers, each as a small log pair with the verdict that is right.

Retold from public bug reports; the issue is named with each. Ids belong to the toy tokenizers in tests/data/toy.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseety.records import Chunk, Step
from tests.logbook import BYTE_LEVEL, EOS, SENTENCEPIECE, Logbook
from verifier import cli

HE, LLO, HELLO, WORLD, HELLO2 = 256, 258, 259, 264, 265
BOS = 271


@dataclass
class Case:
    source: str
    ids: list[int]
    pieces: list[Any]
    verdict: str
    codes: set[str] = field(default_factory=set)
    tokenizer: Path = BYTE_LEVEL
    at: tuple[int, int] | None = None  # token index, chunk number
    keys: dict[str, Any] = field(default_factory=dict)


CASES = {
    "two tokens in one step, only the last one streamed": Case(
        "vllm#30099", [HELLO, WORLD, HELLO2, EOS], ["hello", " hello"], "fail", {"MISSING_TEXT"}, at=(1, 2)
    ),
    "a stop string's ids have no text": Case(
        "vllm#36830",
        [HELLO, WORLD, 83, 84, 79, 80],
        ["hello", " world"],
        "pass",
        {"TRIMMED_STOP"},
        keys={"stop_reason": "STOP", "stop": ["STOP"], "engine_finish": "abort"},
    ),
    "a stop string begins inside a token": Case(
        "vllm#36830",
        [HELLO, 266],
        ["hello?"],
        "pass",
        {"TRIMMED_STOP"},
        keys={"stop_reason": "\n", "stop": ["\n"], "engine_finish": "abort"},
    ),
    "spaces lost by decoding token by token": Case(
        "tensorrtllm_backend#332",
        [292, 294, 301],
        ["what", "is", "dropout"],
        "fail",
        {"MISSING_TEXT"},
        SENTENCEPIECE,
        at=(1, 2),
        keys={"engine_prompt_tail": [1], "engine_finish": "length", "finish": "length"},
    ),
    "a healthy stream of the same tokenizer": Case(
        "tensorrtllm_backend#332",
        [292, 294, 301],
        ["what", " is", " dropout"],
        "pass",
        {"LEADING_SPACE"},
        SENTENCEPIECE,
        keys={"engine_prompt_tail": [1], "engine_finish": "length", "finish": "length"},
    ),
    "a leading space that stays behind a prompt with text": Case(
        "tensorrtllm_backend#332",
        [292, 294, 301],
        [" what", " is dropout"],
        "pass",
        set(),
        SENTENCEPIECE,
        keys={"engine_prompt_tail": [292], "engine_finish": "length", "finish": "length"},
    ),
    "a character of four tokens turned into U+FFFD": Case(
        "", [97, 240, 159, 140, 182, 98, EOS], ["a", "\ufffd\ufffd", "b"], "fail", {"ALTERED_TEXT", "BROKEN_UTF8"}
    ),
    "the model really wrote U+FFFD": Case("", [97, 239, 191, 189, 98, EOS], ["a", "\ufffd", "b"], "pass"),
    "cut inside the character, nothing sent": Case(
        "",
        [97, 240, 159],
        ["a"],
        "pass",
        {"INCOMPLETE_UTF8_TAIL"},
        keys={"finish": "length", "engine_finish": "length"},
    ),
    "an abort chunk repeats the whole answer": Case(
        "sglang#40901",
        [HELLO, WORLD],
        ["hello", " world", "hello world"],
        "fail",
        {"DUPLICATED_TEXT"},
        keys={"finish": "abort", "engine_finish": "abort"},
    ),
    "re-tokenized text gives other ids": Case("", [HE, LLO, WORLD, EOS], ["he", "llo", " world"], "pass", {"DRIFT"}),
    "seven single spaces": Case("", [32] * 7 + [120, EOS], [" " * 7 + "x"], "pass", {"DRIFT"}),
    "chunk-wise encoding would give another count": Case("", [HELLO, WORLD, EOS], ["hel", "lo wor", "ld"], "pass"),
    "the end token is hidden": Case("vllm#2538", [HELLO, EOS], ["hello"], "pass"),
    "specials shown on request": Case(
        "vllm#46224",
        [HELLO, EOS, WORLD],
        ["hello", "<|eos|>", " world"],
        "pass",
        keys={
            "skip_special_tokens": False,
            "engine_skip_special_tokens": False,
            "finish": "length",
            "engine_finish": "length",
        },
    ),
    "a special leaked though skipping was on": Case(
        "vllm#25281", [HELLO, EOS], ["hello", "<|eos|>"], "fail", {"EXTRA_TEXT"}, at=(1, 2)
    ),
    "running usage on every chunk, the last one counts": Case(
        "", [HELLO, WORLD, EOS], ["hello", " world"], "pass", keys={"usage": 3}
    ),
    "usage is one token short": Case(
        "vllm#9028", [HELLO, WORLD, EOS], ["hello", " world"], "fail", {"COUNT_MISMATCH"}, keys={"usage": 2}
    ),
    "the client left": Case(
        "",
        [HELLO, WORLD, HELLO2],
        ["hello", " world"],
        "pass",
        {"ABORTED_PREFIX"},
        keys={"finish": None, "outcome": "client_gone", "end_marker": False, "engine_finish": "abort"},
    ),
    "the upstream died in mid-stream": Case(
        "",
        [HELLO, WORLD],
        ["hello"],
        "incomplete",
        {"ABORTED_PREFIX", "BROKEN_OFF"},
        keys={"finish": None, "outcome": "upstream_broken", "end_marker": False, "engine_finish": "abort"},
    ),
    "ids in the stream fell short under load": Case(
        "sglang#30917",
        [HELLO, WORLD, HELLO2, EOS],
        ["hello", " world", " hello"],
        "fail",
        {"ID_MISMATCH"},
        keys={"token_ids": [[HELLO], [], [HELLO2, EOS]]},
    ),
    "events without text while a character is not whole": Case(
        "", [97, 240, 159, 140, 182, EOS], ["a", None, None, None, "🌶"], "pass", {"HELD_BACK"}
    ),
    "ids missing from the stream of a tool call": Case(
        "vllm#27482",
        [275, 123, 34, 110, 34, 58, 49, 125, 276, EOS],
        [("tool_call", '{"n":1}')],
        "pass",
        {"PARSED", "IDS_LEFT_OUT"},
        keys={"token_ids": [[58, 49, 125, 276]], "tools": True, "finish": "tool_calls"},
    ),
    "no usage at all": Case("", [HELLO, EOS], ["hello"], "pass"),
    "the prompt begins twice": Case(
        "",
        [HELLO, WORLD, EOS],
        ["hello", " world"],
        "pass",
        {"DOUBLE_BOS"},
        keys={"engine_prompt_tail": [BOS, BOS, HELLO], "engine_prompt_len": 3},
    ),
    "nothing but the end marker": Case(
        "", [HELLO, EOS], [], "fail", {"UNFINISHED", "MISSING_TEXT"}, keys={"finish": None}
    ),
}


@pytest.fixture
def judge(tmp_path, capsys) -> Callable[..., dict[str, Any]]:
    def run(book: Logbook, *arguments: str) -> dict[str, Any]:
        cli.main([str(book.write(tmp_path)), "--json", *arguments])
        first: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[0])
        return first

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_in_the_field_case_is_the_right_one(name, judge):
    case = CASES[name]
    book = Logbook(case.tokenizer)
    book.exchange(case.ids, case.pieces, **case.keys)
    request = judge(book, *(["--drift"] if "DRIFT" in case.codes else []))
    assert request["verdict"] == case.verdict, request
    assert {finding["code"] for finding in request["findings"]} == case.codes
    if case.at:
        [finding] = [finding for finding in request["findings"] if finding["severity"] == "fault"]
        assert (finding["token_index"], finding["chunk_index"]) == case.at


@pytest.mark.parametrize(
    ("indexes", "detail"),
    [([0, 2], "ids are missing: index 1 was due"), ([0, 0, 0], "ids stand twice: index 1 was due")],
    ids=["a row is missing", "rows that repeat all ids so far"],
)
def test_a_log_of_the_engine_that_contradicts_itself_blames_nobody(judge, indexes, detail):
    """sglang#30917 and others: ids lost under load, or written cumulatively."""
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2], ["hello", " world", " hello"], finish="length", engine_finish="length")
    steps = [n for n, record in enumerate(book.engine) if isinstance(record, Step)]
    kept = {}
    for at, index in zip(steps, indexes, strict=False):
        record = book.engine[at]
        assert isinstance(record, Step)
        ids = [HELLO2] if len(indexes) == 2 and index else [HELLO, WORLD, HELLO2][: at - steps[0] + 1]
        row = msgspec.structs.replace(record.rows[0], first_index=index, ids=ids)
        kept[at] = msgspec.structs.replace(record, rows=[row])
    book.engine = [kept.get(n, record) for n, record in enumerate(book.engine) if n not in steps or n in kept]
    request = judge(book)
    assert (request["verdict"], [f["code"] for f in request["findings"]]) == ("incomplete", ["BACKEND_LOG_INVALID"])
    assert detail in request["findings"][0]["detail"]


def test_an_error_event_is_never_equal_because_both_are_empty(judge):
    """vllm#27482 and others: an error inside a 200 stream, then [DONE]."""
    book = Logbook()
    book.engine_request("chatcmpl-1", [HELLO, WORLD], finish="abort")
    number = book.stream("chatcmpl-1", ["hello"], finish=None)
    done = book.proxy.pop()
    book.proxy += [Chunk(ts=book.tick(), capture=number, wire_index=3, kind="error", raw="data: {}\n\n"), done]
    request = judge(book)
    assert request["verdict"] == "incomplete"
    assert {finding["code"] for finding in request["findings"]} == {"SERVER_ERROR", "ABORTED_PREFIX"}
