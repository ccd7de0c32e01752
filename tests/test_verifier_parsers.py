"""Reasoning and tool-call parsers: what they lay into channels is accounted for, and what is not so is found.

tests/data/parsers holds what vLLM 0.32's own parser classes delivered; benchmarks/parsers_vs_vllm.py made it.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseety.records import RequestParameters, RequestStart, ToolCall
from tests.logbook import EOS, Logbook
from verifier.channels import Parsers, Sent, explain, prompt_opens
from verifier.findings import RequestVerdict, Verdict
from verifier.parsers import REASONING, TOOLS
from verifier.run import verify
from verifier.script import Marker, Output
from verifier.tokenizer import TokenizerShelf

RECORDED = Path(__file__).parent / "data" / "parsers"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))
THINK, END, CALL, CALL_END = 273, 274, 275, 276  # the toy tokenizer's markers
HELLO, WORLD, HELLO2 = 259, 264, 265


def recorded(name: str) -> list[tuple[Output, Sent, Parsers]]:
    cases = []
    for row in json.loads((RECORDED / f"{name}.json").read_text()):
        markers = [Marker(*marker) for marker in row["markers"]]
        known = frozenset(
            mark for rules in REASONING.values() for mark in (rules.start, rules.end, *rules.openers) if mark
        )
        output = Output(row["text"], markers, known | {"</tool_call>"}, row["streamed"])
        calls = [ToolCall(index=n, name=name, arguments=text) for n, (name, text) in enumerate(row["calls"])]
        sent = Sent([(kind, text) for kind, text in row["pieces"]], calls, row["asked"])
        cases.append((output, sent, Parsers(row["reasoning"], row["tools"], row["opened"], row["offered"])))
    return cases


def test_each_parser_of_the_table_has_recorded_outputs():
    assert {name for name in NAMES if "-" not in name} == REASONING.keys() | TOOLS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_vllms_parser_delivered_is_accounted_for(name):
    for output, sent, parsers in recorded(name):
        account = explain(output, sent, parsers)
        assert account.difference is None, (output.text, sent, account)
        assert account.codes or account.undecided


@pytest.mark.parametrize("name", NAMES)
def test_an_altered_letter_is_never_accounted_for(name):
    altered = 0
    for output, sent, parsers in recorded(name):
        for index, (kind, text) in enumerate(sent.pieces):
            if kind == "tool_call":
                continue
            pieces = list(sent.pieces)
            pieces[index] = (kind, chr(ord(text[0]) ^ 1) + text[1:])
            account = explain(output, replace(sent, pieces=pieces), parsers)
            assert not account.codes, (output.text, pieces, account)
            altered += account.difference is not None
    assert altered > 10


@pytest.mark.parametrize("name", NAMES)
def test_a_full_account_is_a_proof_without_knowing_the_parser(name):
    for output, sent, parsers in recorded(name):
        if explain(output, sent, parsers).codes and output.streamed:
            unknown = explain(output, sent, replace(parsers, reasoning=None, tools=None, offered=True))
            assert unknown.codes
            assert unknown.difference is None


# ------------------------------------------------------------------------------------------------ small and by hand


def output(text: str, streamed: bool = True) -> Output:
    """An output whose markers are tokens."""
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    markers = [Marker(at, at + len(mark), mark, False) for at, mark in sorted(found)]
    ends = [hit.end() for hit in re.finditer(r"</?\w+>|[ ]?\w+|.", text, re.DOTALL)]
    return Output(text, markers, frozenset(marks), streamed, ends)


def pieces(*items: tuple[str, str], **keys: Any) -> Sent:
    return Sent(items, **keys)


R1 = Parsers("deepseek_r1", "", None)
TEXT = "<think>one two</think>three four"


def test_channels_end_to_end_with_the_markers_between_are_parsed():
    assert explain(output(TEXT), pieces(("reasoning", "one two"), ("text", "three four")), R1).codes == ["PARSED"]


def test_text_of_one_channel_in_another_is_misrouted_and_placed():
    account = explain(output(TEXT), pieces(("reasoning", "one"), ("text", " two"), ("text", "three four")), R1)
    assert account.difference is not None
    assert (account.difference.code, account.difference.offset, account.piece) == ("MISROUTED", 10, 1)


def test_the_same_without_knowing_the_parser_is_undecided_and_no_fault():
    account = explain(output(TEXT), pieces(("reasoning", "one"), ("text", " twothree four")), Parsers())
    assert account.difference is None
    assert account.undecided


@pytest.mark.parametrize(
    ("sent", "code", "offset"),
    [
        ([("reasoning", "one two"), ("text", "three")], "MISSING_TEXT", 27),
        ([("reasoning", " two"), ("text", "three four")], "MISSING_TEXT", 7),
        ([("reasoning", "one two"), ("text", "three five")], "ALTERED_TEXT", 27),
        ([("reasoning", "one two"), ("text", "three"), ("text", "three"), ("text", " four")], "DUPLICATED_TEXT", 27),
    ],
)
def test_a_fault_is_named_and_placed_in_the_text_of_the_ids(sent, code, offset):
    account = explain(output(TEXT), pieces(*sent), R1)
    assert account.difference is not None
    assert (account.difference.code, account.difference.offset) == (code, offset)


def test_reasoning_that_was_not_asked_for_is_hidden():
    account = explain(output(TEXT), pieces(("text", "three four"), reasoning_asked=False), R1)
    assert account.codes == ["PARSED", "HIDDEN"]
    assert explain(output(TEXT), pieces(("text", "three"), reasoning_asked=False), R1).difference is not None


def test_of_a_stream_that_broke_off_any_beginning_will_do_if_nothing_before_it_is_missing():
    for sent in ([], [("reasoning", "one")], [("reasoning", "one two"), ("text", "thr")]):
        assert explain(output(TEXT), pieces(*sent), R1, whole=False).codes == ["PARSED"], sent
    gap = pieces(("reasoning", "one"), ("text", "thr"))
    assert explain(output(TEXT), gap, R1, whole=False).difference is not None


@pytest.mark.parametrize(
    ("text", "sent", "code"),
    [
        # DeepSeek R1's class drops what comes before a start marker in one go with the end marker, and only then.
        ("one two</think>three<think>four", [("text", "three<think>four")], "PARSED"),
        ("one two</think>three<think>four", [("reasoning", "one"), ("text", "three<think>four")], "PARSED"),
        ("one two</think>three<think>four", [("reasoning", "one"), ("text", "three"), ("text", "<think>four")], None),
        ("one<think>two</think>three", [("reasoning", "two"), ("text", "three")], "PARSED"),
        ("one<think>two two</think>three", [("reasoning", "two"), ("reasoning", " two"), ("text", "three")], None),
    ],
)
def test_reasoning_is_dropped_only_where_the_markers_can_have_come_in_one_go(text, sent, code):
    account = explain(output(text), pieces(*sent), R1)
    assert account.codes == ([code] if code else [])
    assert (account.difference is None) == bool(code)
    assert bool(account.left_out) == bool(code)


def test_a_prompt_that_closed_the_reasoning_makes_all_of_a_stream_content():
    assert prompt_opens("<think>\n\n</think>\n\n", "qwen3") is False
    assert prompt_opens("assistant\n<think>\n", "qwen3") is True
    assert prompt_opens("assistant\n", "qwen3") is None
    closed = Parsers("qwen3", "", opened=False)
    assert explain(output("plain"), pieces(("text", "plain")), closed).codes == ["PLAIN"]
    account = explain(output("plain"), pieces(("reasoning", "plain")), closed)
    assert account.difference is not None
    assert account.difference.code == "MISROUTED"


CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
HERMES = Parsers("", "hermes", None, offered=True)


def called(name: str, arguments: str) -> Sent:
    return Sent([("tool_call", arguments)], [ToolCall(name=name, arguments=arguments)])


def test_arguments_written_anew_in_a_whole_reply_are_equal_by_meaning():
    assert explain(output(CALLED, streamed=False), called("f", '{"x":1}'), HERMES).codes == ["PARSED_SEMANTIC"]
    assert explain(output(CALLED, streamed=False), called("f", '{"x":1.0}'), HERMES).difference is not None


def test_in_a_stream_arguments_come_as_they_stand():
    assert explain(output(CALLED), called("f", '{"x": 1}'), HERMES).codes == ["PARSED"]
    assert explain(output(CALLED), called("f", '{"x": 2}'), HERMES).difference is not None
    assert explain(output(CALLED), called("g", '{"x": 1}'), HERMES).difference is not None


def test_a_call_that_did_not_come_is_missing_text():
    calls = [ToolCall(index=n, name="f", arguments='{"x": 1}') for n in range(2)]
    sent = Sent([("tool_call", call.arguments) for call in calls], calls)
    account = explain(output(CALLED * 3), sent, HERMES)
    assert account.difference is not None
    assert account.difference.code == "MISSING_TEXT"
    assert account.difference.offset == 2 * len(CALLED) + CALLED.index('{"x"')


def test_only_the_first_call_may_be_what_was_asked_for():
    account = explain(output(CALLED * 3), called("f", '{"x": 1}'), HERMES)
    assert (account.difference, bool(account.undecided)) == (None, True)


def test_named_and_required_calls_are_found_whatever_the_parser():
    unknown = Parsers("", None, None, offered=True)
    assert explain(output('{"x": 1'), called("f", '{"x": 1'), unknown).codes == ["PARSED"]
    required = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {'
    calls = [ToolCall(name="f", arguments='{"x": 1}'), ToolCall(index=1, name="g", arguments="{")]
    sent = Sent([("tool_call", '{"x": 1}'), ("tool_call", "{")], calls)
    assert explain(output(required), sent, unknown).codes == ["PARSED"]


def test_with_tools_offered_and_their_parser_unknown_a_difference_behind_the_reasoning_is_no_fault():
    offered = Parsers("deepseek_r1", None, None, offered=True)
    behind = explain(output(TEXT), pieces(("reasoning", "one two"), ("text", "three")), offered)
    assert (behind.difference, bool(behind.undecided)) == (None, True)
    inside = explain(output(TEXT), pieces(("reasoning", "one"), ("text", "three four")), offered)
    assert inside.difference is not None


# --------------------------------------------------------------------------------------------------- from the logs


def judged(book: Logbook, tmp_path: Path) -> RequestVerdict:
    folder = book.write(tmp_path / "logs")
    report = verify(sorted(folder.iterdir()), TokenizerShelf([book.tokenizer]))
    (verdict,) = report.verdicts
    return verdict


def codes(verdict: RequestVerdict) -> set[str]:
    return {finding.code for finding in verdict.findings}


def test_a_reasoning_stream_passes_as_parsed(tmp_path):
    book = Logbook(reasoning_parser="qwen3")
    book.exchange([THINK, HELLO, END, WORLD, EOS], [("reasoning", "hello"), ("text", " world")])
    verdict = judged(book, tmp_path)
    assert (verdict.verdict, "PARSED" in codes(verdict), verdict.checked) == (Verdict.PASS, True, 5)


def test_reasoning_in_the_content_fails_at_its_token_and_chunk(tmp_path):
    book = Logbook(reasoning_parser="qwen3")
    book.exchange([THINK, HELLO, HELLO2, END, WORLD, EOS], [("reasoning", "hello"), " hello", " world"])
    verdict = judged(book, tmp_path)
    assert verdict.verdict is Verdict.FAIL
    (finding,) = [finding for finding in verdict.findings if finding.code == "MISROUTED"]
    assert (finding.token_index, finding.chunk_index) == (2, 2)


@pytest.mark.parametrize("parser", ["a_parser_of_their_own", None])
def test_a_parser_that_is_not_in_the_table_leaves_a_difference_undecided(tmp_path, parser):
    book = Logbook(reasoning_parser=parser)
    book.exchange([THINK, HELLO, END, WORLD, EOS], [("reasoning", "hell"), ("text", " world")])
    assert judged(book, tmp_path).verdict is Verdict.INCOMPLETE


def test_ids_that_a_tool_parser_swallowed_are_missing_from_the_stream_and_that_is_no_fault(tmp_path):
    # Field case A4-02: the stream's token_ids lack what the parser held back; the engine's are whole.
    arguments = '{"n":1}'
    book = Logbook()
    book.exchange(
        [CALL, *arguments.encode(), CALL_END, EOS],
        [("tool_call", arguments)],
        token_ids=[[58, 49, 125, CALL_END]],
        finish="tool_calls",
        tools=True,
    )
    verdict = judged(book, tmp_path)
    assert (verdict.verdict, codes(verdict)) == (Verdict.PASS, {"PARSED", "IDS_LEFT_OUT"})


def test_hidden_reasoning_is_said(tmp_path):
    book = Logbook(reasoning_parser="qwen3")
    book.exchange([THINK, HELLO, END, WORLD, EOS], [" world"], include_reasoning=False)
    verdict = judged(book, tmp_path)
    assert (verdict.verdict, codes(verdict)) == (Verdict.PASS, {"PARSED", "HIDDEN"})


def test_a_request_that_offered_tools_and_called_none_is_judged(tmp_path):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], tools=True)
    assert judged(book, tmp_path).verdict is Verdict.PASS
    start = next(record for record in book.proxy if isinstance(record, RequestStart))
    assert start.parameters == RequestParameters(model="toy", stream=True, tools=True)
