"""`verify-tokens` on whole logs: the join, the verdicts, the exit codes and the words."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from sparseety.records import EngineEvent, Gap, LogClose, RequestFinished, Scope, Step
from tests.logbook import BYTE_LEVEL, EOS, SENTENCEPIECE, Logbook
from verifier import cli

HELLO, WORLD, HELLO2 = 259, 264, 265


class Result:
    def __init__(self, exit_code: int, out: str, err: str) -> None:
        self.exit_code, self.out, self.err = exit_code, out, err

    def json(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def verify(capsys, monkeypatch):
    monkeypatch.delenv("SPARSEETY_VERIFY_TOKENIZER", raising=False)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        exit_code = cli.main([str(argument) for argument in arguments])
        return Result(exit_code, *capsys.readouterr())

    return run


def codes(result: Result, request_id: str = "chatcmpl-1") -> tuple[str, set[str]]:
    [request] = [r for r in result.json() if r.get("request_id") == request_id]
    return request["verdict"], {finding["code"] for finding in request["findings"]}


def test_right_streams_pass_and_every_token_is_counted(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], usage=3)
    book.exchange([HELLO, 83, 84], ["hello"], name="chatcmpl-2", stop_reason="ST", stop=["ST"], engine_finish="abort")
    result = verify(book.write(tmp_path))
    assert result.exit_code == 0
    assert result.out.startswith("2 requests: 2 pass, 0 fail, 0 incomplete; 6 of 6 tokens checked\n")
    assert "1 TRIMMED_STOP" in result.out


def test_a_fault_names_request_class_token_chunk_and_both_lines(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2, EOS], ["hello", " world", " jello"], name="chatcmpl-81c0")
    result = verify(book.write(tmp_path), "--show-text")
    assert result.exit_code == 1
    first, places = result.out.splitlines()[:2]
    assert first == (
        'chatcmpl-81c0  FAIL        ALTERED_TEXT at token 2, chunk 3: client got " j", sampler chose " h" (265)'
    )
    proxy, engine = places.split()
    assert b'" jello"' in line_at(proxy)
    assert b"265" in line_at(engine)


def line_at(place: str) -> bytes:
    path, _, number = place.rpartition(":")
    return Path(path).read_bytes().splitlines()[int(number) - 1]


def test_content_is_hidden_unless_asked_for(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " secret"])
    folder = book.write(tmp_path)
    for arguments in ([], ["--json"], ["-v"]):
        out = verify(folder, *arguments).out
        assert "secret" not in out
        assert "world" not in out
    assert "ecret" in verify(folder, "--json", "--show-text").out


def test_hostile_text_cannot_move_the_cursor(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello", "\x1b[2J\u202e\x07"])
    out = verify(book.write(tmp_path), "--show-text").out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\u001b[2J\\u202e\\u0007" in out


def test_choices_of_several_prompts_and_n_are_joined_each_with_its_own_engine_request(tmp_path, verify):
    book = Logbook()
    for choice in range(4):
        book.engine_request(f"cmpl-9-{choice // 2}", [HELLO, 65 + choice, EOS], child=choice % 2)
    pieces = {choice: ["hello", chr(65 + choice)] for choice in range(4)}
    book.stream("cmpl-9", pieces, endpoint="completions", n=2, prompts=2, usage=12)
    result = verify(book.write(tmp_path), "--json")
    assert codes(result, "cmpl-9") == ("pass", set())
    assert result.json()[0]["choices"] == 4


def test_usage_that_is_off_by_one_is_a_fault_of_the_counts(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"], usage=1)
    result = verify(book.write(tmp_path), "--json")
    assert (result.exit_code, codes(result)) == (1, ("fail", {"COUNT_MISMATCH"}))


def test_ids_in_the_stream_must_be_the_engines(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], token_ids=[[HELLO], [WORLD, EOS]])
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name="chatcmpl-2", token_ids=[[HELLO], [WORLD + 1, EOS]])
    result = verify(book.write(tmp_path), "--json")
    assert codes(result) == ("pass", set())
    assert codes(result, "chatcmpl-2") == ("fail", {"ID_MISMATCH"})


def test_a_stream_that_ends_cleanly_without_its_end_is_unfinished(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], finish=None, end_marker=False)
    assert codes(verify(book.write(tmp_path), "--json")) == ("fail", {"UNFINISHED"})


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ("client_gone", "pass"),
        ("upstream_broken", "incomplete"),
        ("upstream_timeout", "incomplete"),
        ("shutdown", "incomplete"),
    ],
)
def test_a_broken_stream_passes_only_where_the_client_left(tmp_path, verify, outcome, verdict):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2], ["hello", " wo"], finish=None, outcome=outcome, end_marker=False)
    result = verify(book.write(tmp_path), "--json")
    assert codes(result)[0] == verdict
    assert "ABORTED_PREFIX" in codes(result)[1]


def test_a_client_that_left_before_the_id_is_not_judged_and_explains_the_engines_orphan(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.stream(None, [], finish=None, outcome="client_gone", end_marker=False)
    book.engine_request("chatcmpl-left", [HELLO], finish="abort")
    result = verify(book.write(tmp_path), "--json")
    assert result.exit_code == 0
    assert codes(result, "chatcmpl-left") == ("out_of_scope", {"ABORTED_BEFORE_ID"})


def test_requests_that_came_past_the_proxy_are_no_fault_unless_nothing_should(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.engine_request("chatcmpl-past", [HELLO, EOS])
    result = verify(book.write(tmp_path / "open"), "--json")
    assert (result.exit_code, codes(result, "chatcmpl-past")[0]) == (0, "out_of_scope")

    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    result = verify(book.write(tmp_path / "exclusive"), "--json")
    assert (result.exit_code, codes(result, "chatcmpl-past")) == (1, ("fail", {"ORPHAN_BACKEND"}))


def test_a_reply_the_engine_does_not_know_is_a_fault_only_where_its_log_is_whole(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.stream("chatcmpl-2", ["hello"])
    result = verify(book.write(tmp_path / "whole"), "--json")
    assert codes(result, "chatcmpl-2") == ("fail", {"ORPHAN_CAPTURE"})

    book.engine.append(Gap(ts=book.tick(), reason="queue full", count=3))
    result = verify(book.write(tmp_path / "gap"), "--json")
    assert codes(result, "chatcmpl-2") == ("incomplete", {"UNVERIFIABLE"})


def test_a_reply_the_engine_does_not_know_is_no_fault_once_not_all_are_recorded(tmp_path, verify):
    book = Logbook()
    book.engine.append(EngineEvent(ts=book.tick(), kind="control", sample=0.001))
    book.exchange([HELLO, EOS], ["hello"])
    book.stream("chatcmpl-2", ["hello"])
    result = verify(book.write(tmp_path / "logs"), "--json")
    assert codes(result, "chatcmpl-2") == ("incomplete", {"UNVERIFIABLE"})


def test_a_reply_after_the_engines_log_was_closed_is_no_orphan(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.engine.append(LogClose(ts=book.tick(), records=9, lost=0))  # the plugin switched itself off here
    book.now += 60
    book.stream("chatcmpl-2", ["hello"])
    result = verify(book.write(tmp_path, close=False), "--json")
    assert codes(result, "chatcmpl-2") == ("incomplete", {"UNVERIFIABLE"})


def test_of_an_engine_for_prompts_and_one_for_outputs_the_second_ones_ids_are_judged(tmp_path, verify):
    book = Logbook()
    book.engine_request("chatcmpl-1", [HELLO], finish="length", role="prefill", max_tokens=1)
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], engine_role="decode")
    assert codes(verify(book.write(tmp_path), "--json")) == ("pass", set())


def test_two_engine_requests_with_one_id_are_ambiguous_not_wrong(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.engine_request("chatcmpl-1", [WORLD, EOS])
    assert codes(verify(book.write(tmp_path), "--json")) == ("incomplete", {"JOIN_AMBIGUOUS"})


# ------------------------------------------------------------------------------------------------- loss and damage


def test_lost_chunks_leave_a_request_incomplete_and_say_how_much_was_checked(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2, EOS], ["hello", " world", " hello"])
    book.proxy = [record for record in book.proxy if getattr(record, "delta_text", "") != " hello"]
    book.proxy.append(Gap(ts=book.tick(), captures=[1], count=1, reason="queue full"))
    result = verify(book.write(tmp_path))
    assert result.exit_code == 3
    assert "INCOMPLETE  2 of 4 tokens checked; LOST_RECORDS: 1 records were lost (queue full)" in result.out


def test_a_chunk_record_missing_without_a_gap_is_damage_of_the_log_not_a_fault_of_the_server(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"])
    book.proxy = [record for record in book.proxy if getattr(record, "delta_text", "") != " world"]
    verdict, found = codes(verify(book.write(tmp_path), "--json"))
    assert verdict == "incomplete"
    assert "TORN_RECORD" in found
    assert "MISSING_TEXT" not in found


def test_a_hole_in_the_engines_ids_makes_its_log_invalid(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD, HELLO2, EOS], ["hello", " world", " hello"])
    steps = [record for record in book.engine if isinstance(record, Step)]
    book.engine.remove(steps[1])
    assert codes(verify(book.write(tmp_path), "--json")) == ("incomplete", {"BACKEND_LOG_INVALID"})


def test_an_engine_that_died_leaves_its_open_requests_incomplete(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, WORLD], ["hello", " world", " hello"], finish=None, outcome="upstream_broken")
    book.engine = [record for record in book.engine if not isinstance(record, RequestFinished)]
    verdict, found = codes(verify(book.write(tmp_path, close=False), "--json"))
    assert (verdict, "BACKEND_LOG_INVALID" in found) == ("incomplete", True)


def test_foreign_lines_are_named_and_harm_nothing_where_the_log_proves_itself_whole(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    folder = book.write(tmp_path)
    proxy = folder / "proxy-h-1-1.jsonl"
    lines = proxy.read_bytes().splitlines(keepends=True)
    torn = lines[2][: len(lines[2]) // 2]
    lines[-1:-1] = [b'{"name":"foreign"}\n', b"\x00\xff not json\n", b'{"event":"chunk","ts":1.0,"capture":1}\n']
    proxy.write_bytes(b"".join(lines) + torn)
    result = verify(folder)
    assert result.exit_code == 0
    for line, message in enumerate(
        ["JSON without an", "not a JSON object", 'record "chunk" lacks field "wire_index" (format 1)'], 7
    ):
        assert f"{proxy}:{line}: {message}" in result.err
    assert f"{proxy}:11: the last line is torn" in result.err


def test_a_damaged_line_in_a_log_that_does_not_count_itself_rules_out_exit_0(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    folder = book.write(tmp_path, close=False)
    with (folder / "proxy-h-1-1.jsonl").open("ab") as file:
        file.write(b"what was this?\n")
    assert verify(folder).exit_code == 3


def test_a_log_of_a_later_format_is_refused_by_name(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], format=99)
    result = verify(book.write(tmp_path))
    assert result.exit_code == 3
    assert "format 99; this release reads format 1 only" in result.err


# ------------------------------------------------------------------------------------------- nothing to check, misuse


def test_nothing_to_check_is_never_a_pass(tmp_path, verify):
    result = verify(tmp_path)
    assert result.exit_code == 3
    assert "no log files" in result.err


def test_proxy_logs_alone_exit_with_3_and_say_why(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    folder = book.write(tmp_path)
    (folder / "engine-h-2-1.jsonl").unlink()
    result = verify(folder)
    assert result.exit_code == 3
    assert "was vLLM started with SPARSEETY_HOOK_DIR set?" in result.err
    assert "INCOMPLETE" in result.out


def test_files_without_a_single_usable_line_exit_with_4(tmp_path, verify):
    (tmp_path / "x.jsonl").write_bytes(b"\x00\x01\n{}\n")
    assert verify(tmp_path).exit_code == 4


def test_a_missing_path_is_wrong_use(tmp_path, verify):
    result = verify(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "no such file or folder" in result.err


def test_a_missing_tokenizer_exits_with_2_and_says_three_ways_to_give_one(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    identity = msgspec.structs.replace(book.engine[1].tokenizer, name="org/elsewhere")  # type: ignore[union-attr]
    book.engine[1] = msgspec.structs.replace(book.engine[1], tokenizer=identity)
    folder = book.write(tmp_path)
    result = verify(folder)
    assert result.exit_code == 2
    for way in ("--tokenizer", "SPARSEETY_VERIFY_TOKENIZER", "the engine's own path or hub cache"):
        assert way in result.err
    assert verify(folder, "--tokenizer", BYTE_LEVEL).exit_code == 0


def test_a_tokenizer_that_is_not_the_served_one_is_refused(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    identity = msgspec.structs.replace(book.engine[1].tokenizer, name="org/elsewhere")  # type: ignore[union-attr]
    book.engine[1] = msgspec.structs.replace(book.engine[1], tokenizer=identity)
    folder = book.write(tmp_path)
    result = verify(folder, "--tokenizer", SENTENCEPIECE)
    assert result.exit_code == 2
    assert "sha256" in result.err


def test_min_coverage_decides_whether_an_incomplete_request_matters(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-2", use_beam_search=True)
    folder = book.write(tmp_path)
    assert verify(folder).exit_code == 3
    assert verify(folder, "--min-coverage", "0.5").exit_code == 0


def test_echoed_prompts_are_checked_and_told_from_generated_text(tmp_path, verify):
    sha256 = hashlib.sha256(b"the prompt").hexdigest()
    keys = {"endpoint": "completions", "echo": True, "prompt_chars": 10, "prompt_sha256": sha256}
    book = Logbook()
    for name, text in {"cmpl-1": "the prompthello", "cmpl-2": "the Prompthello", "cmpl-3": "the promptjello"}.items():
        book.engine_request(f"{name}-0", [HELLO, EOS])
        book.stream(name, [text], **keys)
    result = verify(book.write(tmp_path), "--json")
    assert codes(result, "cmpl-1") == ("pass", set())
    assert codes(result, "cmpl-2") == ("incomplete", {"UNVERIFIABLE"})
    assert codes(result, "cmpl-3") == ("fail", {"ALTERED_TEXT"})
