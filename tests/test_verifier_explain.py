"""`verify-tokens explain`: one request in full."""

import pytest

from tests.logbook import EOS, Logbook
from tests.test_verifier_run import HELLO, HELLO2, WORLD, verify

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
