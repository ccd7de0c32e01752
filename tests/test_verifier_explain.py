"""`verify-tokens explain`: one request in full."""

import json
import shutil
import stat

import msgspec
import pytest

from sparseety.logreader import find_logs, read_log
from sparseety.records import EngineStart, Gap, Step
from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD, codes, verify

__all__ = ["verify"]  # a fixture


@pytest.fixture
def folder(tmp_path):
    book = Logbook()
    pieces = ["hello", " world", " jello", " hello", " hello"]
    book.exchange([HELLO, WORLD, HELLO2, HELLO2, HELLO2, EOS], pieces, name="chatcmpl-1", x_request_id="mine")
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-2")
    return book.write(tmp_path)


@pytest.mark.parametrize("name", ["chatcmpl-1", "uuid-1", "mine"])
def test_a_request_is_found_by_each_of_its_names_and_its_fault_is_marked(folder, verify, name):
    result = verify("explain", name, folder, "--show-text")
    assert result.exit_code == 1
    [marked] = [line for line in result.out.splitlines() if "✗" in line]
    assert marked.split() == ["✗", "3", *marked.split()[2:3], "2-2", '"', 'jello"', "[265]"]
    assert "ALTERED_TEXT at token 2, chunk 3" in result.out
    assert "chatcmpl-2" not in result.out


def test_each_chunk_stands_beside_its_tokens_the_end_token_included_and_content_is_hidden_unless_asked_for(
    folder, verify
):
    out = verify("explain", "chatcmpl-2", folder).out
    assert "0-1 ‹5›" in out
    assert '"hello"' not in out
    assert "2 ids sampled, 1 chunks of 5 characters delivered" in out
    assert verify("explain", "chatcmpl-2", folder).exit_code == 0


def test_a_name_that_no_request_has_is_said(folder, verify):
    result = verify("explain", "nobody", folder)
    assert result.exit_code == 2
    assert 'no request "nobody"' in result.err


# ------------------------------------------------------------------------------------------------ for a bug report


def test_a_bundle_holds_one_request_and_comes_to_the_same_verdict_elsewhere(folder, verify, tmp_path):
    bundle = tmp_path / "bundle"
    result = verify("explain", "mine", folder, "--bundle", bundle)
    assert result.exit_code == 1
    assert "holds the text and the ids" in result.err
    assert "jello" not in result.out, "what is printed stays without content"
    for path in folder.glob("*.jsonl"):
        path.unlink()
    again = verify(bundle, "--json")
    assert again.exit_code == 1
    assert codes(again) == ("fail", {"ALTERED_TEXT"})
    assert len(again.json()) == 2, "one request and the sum"
    about = json.loads((bundle / "verdict.json").read_text())
    assert about["engines"][0]["vllm"] == "0.32.0"
    assert about["verdict"]["findings"][0]["came"] == " j"
    assert "jello" in (bundle / "explain.txt").read_text()
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.iterdir()} == {0o600}


def test_a_bundle_tells_nothing_of_other_requests(tmp_path, verify):
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-1")
    book.exchange([WORLD, EOS], [" world"], name="chatcmpl-2")
    at = [n for n, record in enumerate(book.engine) if isinstance(record, Step)]
    first, other = book.engine[at[0]], book.engine[at[2]]
    assert isinstance(first, Step)
    assert isinstance(other, Step)
    together = msgspec.structs.replace(first, rows=[*first.rows, *other.rows])  # one step for both
    book.engine[at[0]] = together
    del book.engine[at[2]]
    book.proxy.append(Gap(ts=book.tick(), reason="disk full", count=1, captures=[1, 2]))
    folder = book.write(tmp_path / "logs")
    assert codes(verify(folder, "--json"), "chatcmpl-2")[0] == "incomplete"
    verify("explain", "chatcmpl-1", folder, "--bundle", tmp_path / "bundle")
    text = "".join(path.read_text() for path in (tmp_path / "bundle").iterdir())
    assert "chatcmpl-2" not in text
    assert "world" not in text
    records = [r for path in find_logs([str(tmp_path / "bundle")]) for _, r in read_log(path, print)]
    assert [row.ids for record in records if isinstance(record, Step) for row in record.rows] == [[HELLO], [EOS]]
    assert [record.captures for record in records if isinstance(record, Gap)] == [[1]]
    assert sum(isinstance(record, EngineStart) for record in records) == 1


def test_a_bundle_is_never_put_among_other_files(folder, verify, tmp_path):
    (tmp_path / "bundle").mkdir()
    result = verify("explain", "mine", folder, "--bundle", tmp_path / "bundle")
    assert result.exit_code == 2
    assert "cannot make" in result.err
    shutil.rmtree(tmp_path / "bundle")
    twice = Logbook()
    for number in (1, 2):
        twice.exchange([HELLO, EOS], ["hello"], name=f"chatcmpl-{number}", x_request_id="same")
    result = verify("explain", "same", twice.write(tmp_path / "twice"), "--bundle", tmp_path / "bundle")
    assert result.exit_code == 2
    assert 'called "same"; a bundle is of one' in result.err
