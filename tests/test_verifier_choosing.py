"""Which requests of the logs are judged, by which tokenizer, and how the result comes out."""

import io
import shutil

import msgspec
import pytest

from sparseety.records import EngineStart
from tests.logbook import BYTE_LEVEL, EOS, Logbook
from tests.test_verifier_run import HELLO, codes, verify
from verifier.progress import Progress
from verifier.selection import point_in_time

__all__ = ["verify"]  # a fixture

END_THINK = 274


@pytest.fixture
def folder(tmp_path):
    """Requests at 1000, 2000 and 3000 seconds; the last one is wrong."""
    book = Logbook()
    for number, piece in enumerate(["hello", "hello", "jello"], 1):
        book.now = 1000.0 * number
        book.exchange([HELLO, EOS], [piece], name=f"chatcmpl-{number}", x_request_id=f"mine-{number}")
    return book.write(tmp_path / "logs")


def judged(result) -> list[str]:
    return [line["request_id"] for line in result.json() if line["type"] == "request"]


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["--since", "1970-01-01T00:30:00Z"], [2, 3]),
        (["--until", "1970-01-01T00:30:00Z"], [1]),
        (["--since", "1970-01-01T00:30:00+00:00", "--until", "1970-01-01T00:40:00Z"], [2]),
        (["--request-id", "chatcmpl-2"], [2]),
        (["--request-id", "uuid-3", "--request-id", "mine-1"], [1, 3]),
        (["--request-id", "2"], [2]),  # as the client sent it
        (["--request-id", "mine-3", "--until", "1970-01-01T00:40:00Z"], []),
        (["--since", "1h"], []),
    ],
)
def test_requests_are_chosen_by_when_they_began_and_by_name(folder, verify, arguments, numbers):
    result = verify(folder, "--json", *arguments)
    assert judged(result) == [f"chatcmpl-{number}" for number in numbers]
    assert result.exit_code == (1 if 3 in numbers else 0 if numbers else 3)
    if not numbers:
        assert "nothing to check" in result.err


def test_a_name_that_no_request_has_is_said(folder, verify):
    result = verify(folder, "--json", "--request-id", "chatcmpl-1", "--request-id", "nobody")
    assert judged(result) == ["chatcmpl-1"]
    assert 'no request "nobody"' in result.err
    assert result.exit_code == 3, "not all that was asked for could be checked"


def test_a_request_whose_beginning_is_lost_may_be_of_any_time(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.proxy = [record for record in book.proxy if type(record).__name__ != "RequestStart"]
    result = verify(book.write(tmp_path), "--json", "--since", "2h")
    assert codes(result)[0] == "incomplete"


@pytest.mark.parametrize("text", ["yesterday", "2 fortnights", "", "12:61", "9" * 400 + "w"])
def test_a_time_that_is_none_is_refused(folder, verify, text):
    result = verify(folder, "--since", text)
    assert result.exit_code == 2
    assert "is no time; examples: 2h" in result.err


def test_times_are_ago_or_iso_8601():
    now = 1_000_000.0
    ago = {"90s": 90, "2h": 7200, "1.5h": 5400, "3d": 259200, "1w": 604800, "10 m": 600}
    assert {text: now - point_in_time(text, now) for text in ago} == ago
    assert point_in_time("2026-11-29T17:00:00Z", now) == point_in_time("2026-11-29T18:00:00+01:00", now)
    assert point_in_time("2026-11-29", now) < point_in_time("2026-11-29T00:00:01", now)


# ------------------------------------------------------------------------------------------------------- tokenizers


def test_the_tokenizer_of_one_model_is_named_and_its_hash_decides(folder, verify, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(BYTE_LEVEL, moved / "tokenizer.json")
    other = Logbook().tokenizer.parent / "spm.json"
    assert verify(folder, "--model-map", f"toy={moved}", "--request-id", "chatcmpl-1").exit_code == 0
    # Another file than the engine's is passed over; the right one lies where the engine says.
    assert verify(folder, "--model-map", f"toy={other}", "--request-id", "chatcmpl-1").exit_code == 0


def test_where_only_another_tokenizer_is_there_that_is_refused_by_its_hash(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    at = next(n for n, record in enumerate(book.engine) if isinstance(record, EngineStart))
    start = book.engine[at]
    assert isinstance(start, EngineStart)
    identity = msgspec.structs.replace(start.tokenizer, name="org/not-here")
    book.engine[at] = msgspec.structs.replace(start, tokenizer=identity)
    folder = book.write(tmp_path)
    result = verify(folder, "--model-map", f"toy={BYTE_LEVEL.parent / 'spm.json'}")
    assert result.exit_code == 2
    assert "sha256" in result.err
    assert "spm.json is" in result.err
    assert verify(folder, "--model-map", f"toy={BYTE_LEVEL}").exit_code == 0
    assert verify(folder, "--model-map", f"another={BYTE_LEVEL}").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--model-map", "toy"], '"toy" is not NAME=PATH'), (["--json", "--jsonl"], "not allowed with argument --json")],
)
def test_wrong_use_is_said(folder, verify, capsys, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        verify(folder, *arguments)
    assert said in capsys.readouterr().err


def test_a_fault_behind_the_reasoning_needs_the_tool_call_parser_where_tools_are_offered(tmp_path, verify):
    book = Logbook(reasoning_parser="deepseek_r1")
    book.exchange([104, END_THINK, HELLO, EOS], [("reasoning", "h"), ("text", "jello")], tools=True)
    folder = book.write(tmp_path)
    unknown = verify(folder, "--json")
    assert codes(unknown) == ("incomplete", {"UNVERIFIABLE"})
    assert "which tool-call parser is on is not known" in unknown.out
    assert codes(verify(folder, "--json", "--tool-call-parser", "hermes")) == ("fail", {"ALTERED_TEXT"})
    assert codes(verify(folder, "--json", "--tool-call-parser", "pythonic")) == ("incomplete", {"UNVERIFIABLE"})
    assert verify("explain", "chatcmpl-1", folder, "--tool-call-parser", "hermes").exit_code == 1


# ----------------------------------------------------------------------------------------------------------- output


def test_jsonl_has_a_line_for_each_finding_and_one_for_the_whole(folder, verify):
    result = verify(folder, "--jsonl")
    *findings, summary = result.json()
    assert [(line["type"], line["request_id"], line["verdict"], line["code"]) for line in findings] == [
        ("finding", "chatcmpl-3", "fail", "ALTERED_TEXT")
    ]
    assert "due" not in findings[0]
    assert verify(folder, "--jsonl", "--show-text").json()[0]["came"] == "j"
    assert summary["exit_code"] == result.exit_code == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_a_person_at_a_terminal_only():
    screen, pipe = Terminal(), io.StringIO()
    for stream, wanted in ((screen, True), (pipe, True), (Terminal(), False)):
        progress = Progress(stream, wanted=wanted)
        progress("reading files", 3, 3)
        progress("checking", 5, 5)
        progress.clear()
        if stream is not screen:
            assert stream.getvalue() == ""
    assert screen.getvalue() == "\rreading files 3/3\rchecking 5/5     \r" + " " * 12 + "\r"


def test_what_is_printed_for_machines_is_not_mixed_with_progress(folder, verify):
    assert [line[0] for line in verify(folder, "--json").out.splitlines()] == ["{"] * 4
