"""Faults that are known: what a file of waivers waives, and what it does not."""

from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from sparseety.errors import SparseetyError
from sparseety.records import LogOpen, Scope
from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD, codes, verify
from verifier.findings import FAULTS
from verifier.known import EXAMPLE, load_known

__all__ = ["verify"]  # a fixture

ROOT = Path(__file__).parent.parent
TODAY = date(2026, 11, 29)


@pytest.fixture
def folder(tmp_path):
    book = Logbook(reasoning_parser="qwen3")
    book.exchange([HELLO, WORLD, EOS], ["hello"], name="chatcmpl-1")  # MISSING_TEXT
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-2", usage=9)  # COUNT_MISMATCH
    return book.write(tmp_path / "logs")


@pytest.fixture
def run(tmp_path, verify, folder):
    def run(text: str, *arguments: object, logs: Path = folder):
        file = tmp_path / "known.toml"
        file.write_text(text)
        return verify(logs, "--known", file, "--json", *arguments)

    return run


def waiver(code: str = "MISSING_TEXT", **more: str) -> str:
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[known]]", f'class = "{code}"', 'reference = "ticket 7"', *lines]) + "\n"


def test_what_is_known_does_not_fail_and_is_counted_apart(run, verify, folder, tmp_path):
    result = run(waiver())
    assert codes(result) == ("pass", {"MISSING_TEXT"})
    [finding] = result.json()[0]["findings"]
    assert (finding["severity"], finding["waived_by"]) == ("waived", "ticket 7")
    assert codes(result, "chatcmpl-2") == ("fail", {"COUNT_MISMATCH"})
    assert result.exit_code == 1, "the other one still fails"
    assert result.json()[-1]["waived"] == {"MISSING_TEXT": 1}
    both = run(waiver() + waiver("COUNT_MISMATCH"))
    assert both.exit_code == 0
    out = verify(folder, "--known", tmp_path / "known.toml").out
    assert "2 requests: 2 pass, 0 fail, 0 incomplete" in out
    assert "waived faults: 1 MISSING_TEXT (ticket 7), 1 COUNT_MISMATCH (ticket 7)" in out
    assert "of the passes" not in out, "a waived fault is no reason of a pass"


def test_what_is_waived_is_told_to_other_programs_too(run, tmp_path):
    run(waiver(), "--junit", tmp_path / "junit.xml", "--prom-textfile", tmp_path / "verify.prom")
    [suite] = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("failures") == "1", "the fault that is not known"
    [known] = [case for case in suite if case.get("name") == "chatcmpl-1"]
    assert [child.tag for child in known] == ["system-out"]
    assert "MISSING_TEXT at token 1, chunk 1 (waived: ticket 7)" in (known[0].text or "")
    gauges = (tmp_path / "verify.prom").read_text()
    assert 'findings{code="MISSING_TEXT",model_name="toy",severity="waived"} 1' in gauges


def test_only_faults_are_waived_and_what_could_not_be_checked_stays_incomplete(run, tmp_path):
    book = Logbook()
    book.exchange([HELLO, EOS], ["jello"], use_beam_search=True)
    book.exchange([HELLO, HELLO2, WORLD], ["hello"], name="chatcmpl-2", outcome="upstream_broken", finish=None)
    logs = book.write(tmp_path / "other")
    result = run(waiver("ALTERED_TEXT"), logs=logs)
    assert result.exit_code == 3
    assert codes(result) == ("incomplete", {"NOT_SUPPORTED"})


@pytest.mark.parametrize(
    ("more", "waived"),
    [
        ({"parser": '"qwen3"'}, True),
        ({"parser": '"hermes"'}, False),
        ({"model": '"toy"'}, True),
        ({"model": '"toys"'}, False),
        ({"vllm": '">=0.30,<0.33"'}, True),
        ({"vllm": '"<0.32"'}, False),
        ({"expires": "2999-01-01"}, True),
        ({"expires": "2001-01-01"}, False),
        ({"model": '"toy"', "parser": '"qwen3"', "vllm": '"==0.32.*"', "expires": "2999-01-01"}, True),
        ({"model": '"toy"', "parser": '"qwen3"', "vllm": '">0.32"', "expires": "2999-01-01"}, False),
    ],
)
def test_a_waiver_holds_only_where_each_of_its_conditions_does(run, more, waived):
    assert codes(run(waiver(**more)))[0] == ("pass" if waived else "fail")


def test_a_tool_call_parser_counts_where_it_is_said_to_be_on(run):
    assert codes(run(waiver(parser='"hermes"'), "--tool-call-parser", "hermes"))[0] == "pass"


def test_a_waiver_that_expired_or_matched_nothing_is_mentioned(run):
    text = waiver(expires="2001-01-01") + waiver("REORDERED") + waiver("MISROUTED", expires="2001-01-01")
    result = run(text)
    assert result.exit_code == 1
    notes = [line.partition("known.toml: ")[2] for line in result.err.splitlines()]
    assert "waiver 1 (MISSING_TEXT, ticket 7) expired on 2001-01-01: what it covered is a fault again" in notes
    assert "waiver 2 (REORDERED, ticket 7) matched nothing" in notes
    assert "waiver 3 (MISROUTED, ticket 7) expired on 2001-01-01, and nothing here needs it: it can go" in notes


def test_a_waived_fault_that_leaves_the_text_unchecked_makes_no_pass(run, tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.stream("chatcmpl-2", ["whatever"])  # ORPHAN_CAPTURE
    book.exchange([HELLO, 9999, EOS], ["anything"], name="chatcmpl-3")  # ID_OUT_OF_VOCAB
    book.now += 5
    logs = book.write(tmp_path / "unchecked")
    text = waiver("ORPHAN_CAPTURE") + waiver("ID_OUT_OF_VOCAB")
    result = run(text, logs=logs)
    assert result.exit_code == 3
    assert codes(result, "chatcmpl-2") == ("incomplete", {"ORPHAN_CAPTURE"})
    assert codes(result, "chatcmpl-3") == ("incomplete", {"ID_OUT_OF_VOCAB"})
    assert "ORPHAN_CAPTURE (waived: ticket 7)" in verify(logs, "--known", tmp_path / "known.toml").out


def test_a_waiver_holds_through_its_last_day(tmp_path):
    file = tmp_path / "known.toml"
    file.write_text(waiver(expires="2026-11-29"))
    [known] = load_known(file, TODAY).waivers
    assert known.expires == TODAY
    assert load_known(file, TODAY).today <= known.expires


def test_an_orphan_that_is_known_is_out_of_scope(tmp_path, run):
    book = Logbook()
    book.proxy[0] = msgspec.structs.replace(book.proxy[0], scope=Scope(exclusive=True))
    assert isinstance(book.proxy[0], LogOpen)
    book.exchange([HELLO, EOS], ["hello"])
    book.engine_request("chatcmpl-batch", [HELLO, EOS])
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-3")
    logs = book.write(tmp_path / "exclusive")
    assert codes(run(waiver(), logs=logs), "chatcmpl-batch") == ("fail", {"ORPHAN_BACKEND"})
    assert codes(run(waiver("ORPHAN_BACKEND"), logs=logs), "chatcmpl-batch") == ("out_of_scope", {"ORPHAN_BACKEND"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("known = 3", "waivers are tables of this kind"),
        ("[[waiver]]\n", 'unknown key "waiver"'),
        (waiver(modle='"x"'), 'waiver 1: unknown key "modle"'),
        ('[[known]]\nclass = "REORDERED"\n', "it needs a class and a reference"),
        (waiver("DRIFT"), '"DRIFT" is no fault'),
        (waiver("NONSENSE"), '"NONSENSE" is no fault'),
        (waiver(expires='"2027-01-01"'), "expires is a date without quotes"),
        (waiver(vllm='"about 0.32"'), "is no range of versions"),
        (waiver(model="3"), "model is to be a text"),
        ("[[known", "is no TOML"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_words_that_help(run, text, said):
    result = run(text)
    assert result.exit_code == 2
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_file_that_is_not_there_is_said(verify, folder, tmp_path):
    assert "No such file" in verify(folder, "--known", tmp_path / "nowhere.toml").err


def test_the_example_in_the_messages_and_the_docs_is_a_right_one(tmp_path):
    file = tmp_path / "known.toml"
    file.write_text(EXAMPLE)
    [known] = load_known(file, TODAY).waivers
    assert known.code == "MISROUTED"
    assert EXAMPLE in (ROOT / "docs/verdicts.md").read_text()
    with pytest.raises(SparseetyError):
        load_known(tmp_path, TODAY)


def test_the_codes_that_can_be_waived_are_the_faults_of_the_docs():
    page = (ROOT / "docs/verdicts.md").read_text()
    faults = page[page.index("## Faults of the text") : page.index("## What could not be checked")]
    assert {line[4:] for line in faults.splitlines() if line.startswith("### ")} == set(FAULTS)
