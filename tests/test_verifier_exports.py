"""What a run writes for other programs, read by readers of their own."""

from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, WORLD, verify

__all__ = ["verify"]  # a fixture


@pytest.fixture
def folder(tmp_path):
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name="chatcmpl-right")
    book.exchange([HELLO, WORLD, EOS], ["hello", " secret\x1b"], name='chatcmpl-wrong"<&\x07')
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-beam", use_beam_search=True)
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-other", model='made up by "a client"')
    return book.write(tmp_path / "logs")


def test_junit_has_a_case_for_each_request_and_no_content(folder, verify, tmp_path):
    file = tmp_path / "junit.xml"
    assert verify(folder, "--junit", file).exit_code == 1
    assert b"secret" not in file.read_bytes()
    [suite] = ElementTree.parse(file).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases["chatcmpl-right"] == []
    assert cases["chatcmpl-beam"] == ["skipped"]
    [wrong] = [case for case in suite if case.get("name", "").startswith("chatcmpl-wrong")]
    failure = wrong.find("failure")
    assert failure is not None
    assert "ALTERED_TEXT" in (failure.get("message") or "")
    assert "token 1, chunk 2" in (failure.text or "")


def test_the_text_file_is_read_by_prometheus_own_parser_and_names_served_models_only(folder, verify, tmp_path):
    file = tmp_path / "verify.prom"
    verify(folder, "--prom-textfile", file)
    samples = {
        (sample.name.removeprefix("sparseety_verify_run_"), tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    assert samples["requests", ("pass", "toy")] == 1
    assert samples["requests", ("fail", "toy")] == 1
    assert samples["requests", ("other", "pass")] == 1, "the name that a client made up is no label"
    assert samples["findings", ("ALTERED_TEXT", "error", "toy")] == 1
    assert samples["coverage_ratio", ("toy",)] == pytest.approx(2 / 3)
    assert samples["success", ()] == 0
    assert samples["completion_timestamp_seconds", ()] > 1.7e9
    assert list(tmp_path.glob(".verify.prom*")) == []


def test_a_file_that_cannot_be_written_is_said(folder, verify, tmp_path):
    result = verify(folder, "--junit", tmp_path / "nowhere" / "junit.xml")
    assert result.exit_code == 2
    assert "cannot write" in result.err
