"""A stability run against servers, files and options that are not what they should be."""

import json
import threading
from pathlib import Path

import pytest

from sparseety.errors import SparseetyError
from tests.toy_model_server import Toy, toy_serving
from verifier.stability import store
from verifier.stability.cli import main
from verifier.stability.plan import Plan
from verifier.stability.prompts import Prompt
from verifier.stability.reply import alternatives

WHOLE = {
    "id": "cmpl-1",
    "choices": [
        {
            "index": 0,
            "text": " x",
            "token_ids": [10, 11],
            "prompt_token_ids": [1, 2, 3],
            "finish_reason": "length",
            "logprobs": {"top_logprobs": [{"token_id:10": -0.1, "token_id:9": -3.0}] * 2},
        }
    ],
}
USAGE = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def stream(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"


def with_(choice: dict[str, object] | None = None, **event: object) -> bytes:
    return stream(WHOLE | {"choices": [WHOLE["choices"][0] | (choice or {})]} | event, USAGE)


@pytest.fixture
def run(tmp_path: Path, capsys):
    """Run arm b against a toy; returns (exit code, stdout, stderr, what is kept)."""
    prompts = tmp_path / "prompts-in.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(6)))

    def call(toy: Toy, *arguments: str) -> tuple[int, str, str, store.Run]:
        with toy_serving(toy) as url:
            fixed = ["run", "--out", str(tmp_path / "run"), "--prompts", str(prompts), "--max-tokens", "2", "--quiet"]
            code = main([*fixed, "--gather", "--candidate", url, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err, store.load(tmp_path / "run")

    return call


def test_a_reply_that_is_as_it_should_be_is_kept(run):
    code, _, _, kept = run(Toy(stream=with_()))
    assert code == 0
    assert [output.ids for output in kept.arms["b"].outputs.values()] == [[10, 11]] * 6


@pytest.mark.parametrize(
    "reply",
    [
        with_({"token_ids": "ab"}),
        with_({"token_ids": [None, 1]}),
        with_({"token_ids": [1.5, 2]}),
        with_({"token_ids": [1 << 70, 2]}),
        with_({"token_ids": [-1, 2]}),
        with_().replace(b"token_id:9", b"token_id:9" + b"9" * 30),
        with_({"finish_reason": 5}),
        with_({"prompt_token_ids": "abc"}),
        with_({"text": 5}),
        with_(id=5),
        with_(choices=[1]),
        with_(choices=None),
        stream(WHOLE, {"choices": [], "usage": {"prompt_tokens": "3"}}),
        with_().replace(b"-3.0", b"NaN"),
        with_().replace(b"-3.0", b"-1e999"),
        with_().replace(b"-3.0", b"null"),
        b"data: 5\n\n",
        b"data: {oops\n\n",
        b'data: {"id": "\xff"}\n\n',
        b"",
    ],
)
def test_what_is_kept_of_a_malformed_reply_can_be_read_again(run, reply):
    code, said, _, kept = run(Toy(stream=reply))
    assert code == 3
    assert kept.notes == []  # of damaged lines
    assert len(kept.arms["b"].outputs) == 6
    assert all(output.error for output in kept.arms["b"].outputs.values())
    assert "  6 x " in said  # and the reason


def test_the_token_that_was_taken_is_known_even_where_it_was_not_among_the_likeliest():
    chat = {"token": "token_id:7", "logprob": -5.0, "top_logprobs": [{"token": "token_id:1", "logprob": -0.1}]}
    completion = {"tokens": ["token_id:7"], "token_logprobs": [-5.0], "top_logprobs": [{"token_id:1": -0.1}]}
    for logprobs in ({"content": [chat]}, completion):
        assert alternatives(logprobs) == [[(1, -0.1), (7, -5.0)]]


def test_tokens_spelled_as_text_are_said_to_be(run):
    _, said, _, _ = run(Toy(stream=with_().replace(b"token_id:9", b"hello")))
    assert "the server spells tokens as text (return_tokens_as_token_ids is not known to it)" in said


@pytest.mark.parametrize("models", [{"data": ["toy"]}, {"data": [{"id": 5}]}, {"data": [None]}, [1], "x"])
def test_a_list_of_models_that_is_none_is_said_in_words(capsys, models):
    with toy_serving(Toy(models=models)) as url:
        assert main(["single", "2", "--url", url, "--prompt", "x", "--quiet"]) == 2
    assert "/v1/models: not the reply of an OpenAI-compatible server" in capsys.readouterr().err


def test_what_a_server_says_does_not_reach_the_terminal_as_it_is(run, capsys):
    title = "\x1b]0;gone\x07"
    _, said, error, _ = run(Toy(refusal=(400, {"error": {"message": title}})), "--stop-after-errors", "1")
    assert "stopped" in error
    assert "\\u001b]0;gone" in error
    assert "\x1b" not in said + error
    with toy_serving(Toy(models={"data": [{"id": title}]})) as url:
        assert main(["single", "2", "--url", url, "--prompt", "x", "--model", "y", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "it serves: \\x1b]0;gone\\x07" in error
    assert "\x1b" not in error
    with toy_serving(Toy(stream=with_({"finish_reason": title}))) as url:
        assert main(["single", "2", "--url", url, "--prompt", "x", "--quiet"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_server_that_asks_to_be_spared_is(run):
    toy = Toy(refusal=(429, {"error": {"message": "slow down"}}))  # with Retry-After: 1
    code, _, error, _ = run(toy, "--stop-after-errors", "3")
    assert (code, "HTTP 429: slow down" in error) == (3, True)
    first, second, third = toy.refused_at
    assert min(second - first, third - second) >= 0.9


def test_a_key_that_a_server_quotes_is_not_written_down(run, monkeypatch):
    monkeypatch.setenv("SPARSEETY_VERIFY_API_KEY", "sk-secret")
    refusal = (401, {"error": {"message": "Incorrect API key provided: sk-secret"}})
    _, said, error, kept = run(Toy(refusal=refusal), "--stop-after-errors", "3")
    assert "Incorrect API key provided: ***" in error
    assert "sk-secret" not in said + error + str(kept)


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret ", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch, capsys, key):
    monkeypatch.setenv("SPARSEETY_VERIFY_API_KEY", key)
    assert main(["single", "2", "--url", "http://127.0.0.1:9", "--prompt", "x", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "SPARSEETY_VERIFY_API_KEY holds characters that no key has" in said
    assert key.strip() not in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://127.0.0.1:x", "http://x/?a=b", "x:1"])
def test_a_url_that_is_none_is_said_to_be(capsys, url):
    assert main(["single", "2", "--url", url, "--prompt", "x", "--quiet"]) == 2
    assert "is not a URL of a server; example: http://127.0.0.1:9000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gate", "p0=0"], "--gate p0"),
        (["--logs", "nowhere"], "nowhere: no such file or folder"),
        (["--html", "nowhere/page.html"], "cannot write nowhere/page.html: there is no such folder"),
        (["--junit", "."], "cannot write .: it is a folder"),
        (["--tokenizer", "nowhere"], "nowhere: no such tokenizer"),
        (["--show-text"], "give --tokenizer too"),
    ],
)
def test_what_would_spoil_the_end_is_said_before_the_first_request(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    toy = Toy()
    with toy_serving(toy) as url:
        assert main(["run", "--out", "run", "--quiet", "--candidate", url, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert toy.requests == []


def test_a_file_that_cannot_be_written_is_no_bug(run, tmp_path):
    run(Toy())
    (tmp_path / "run" / "b.jsonl").unlink()
    (tmp_path / "run" / "b.jsonl").mkdir()
    with pytest.raises(SparseetyError, match=r"b\.jsonl: Is a directory"):
        store.ArmWriter(tmp_path / "run", "b")


def test_processes_that_begin_a_run_at_once_begin_the_same_one(tmp_path):
    prompts = [Prompt(prompt="x")]
    plans = [
        Plan(name=str(n), prompts_sha256="", prompts=1, repeats=1, loads=[1], caches=["cold"], max_tokens=1, top=2,
             forced=0, seed=0)
        for n in range(8)
    ]  # fmt: skip
    for folder in (tmp_path / f"run {n}" for n in range(20)):
        begun: list[str] = []
        gate = threading.Barrier(len(plans))

        def begin(plan: Plan, folder: Path = folder, begun: list[str] = begun, gate: threading.Barrier = gate) -> None:
            gate.wait()
            begun.append(store.begin(folder, plan, prompts).name)

        threads = [threading.Thread(target=begin, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(begun) == len(plans)
        assert set(begun) == {store.load(folder).plan.name}
