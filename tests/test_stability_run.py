"""Gathering a stability run: every reply is kept as it came, a run that broke off goes on, and a server is spared."""

import io
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.toy_model_server import Toy, tokens, toy_serving
from verifier.stability import store
from verifier.stability.cli import main
from verifier.stability.plan import Key
from verifier.stability.progress import StageProgress

PROMPTS = [
    {"messages": [{"role": "user", "content": "one two three"}]},
    {"prompt": "four five"},
    {"messages": [{"role": "system", "content": "six"}, {"role": "user", "content": "seven"}]},
    *({"prompt": f"prompt number {number}"} for number in range(9)),
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts-in.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def run(tmp_path: Path, prompts: Path):
    def call(*arguments: str, out: str = "run", gather: bool = True) -> int:
        fixed = ["run", "--out", str(tmp_path / out), "--prompts", str(prompts), "--max-tokens", "12", "--quiet"]
        return main([*fixed, *(["--gather"] if gather else []), *arguments])

    return call


def test_every_output_is_kept_with_its_ids_and_alternatives_as_the_server_has_them(tmp_path, run):
    toy = Toy(noise=0.3)
    with toy_serving(toy) as url:
        assert run("--baseline", url, "--candidate", url, "--concurrency", "3") == 0
    loaded = store.load(tmp_path / "run")
    assert sorted(loaded.arms) == ["a1", "a2", "b"]
    for name, arm in loaded.arms.items():
        assert sorted(arm.outputs) == [Key(number, 0, "cold") for number in range(len(PROMPTS))]
        assert arm.fingerprint.model == "toy"
        for output in arm.outputs.values():
            expected = toy.generate(arm.inputs[output.prompt], 12, output.request_id)
            assert output.ids == [top[0][0] for top in expected], name
            assert [[id_ for id_, _ in top] for top in output.top] == [[i for i, _ in top[:5]] for top in expected]
            assert output.top[3][0][1] == pytest.approx(expected[3][0][1], abs=1e-5)
            assert (output.finish, output.error) == ("length", None)
            assert 0 < output.ttft < 60
            assert output.tpot >= 0
    assert loaded.arms["a1"].inputs[1] == tokens("four five")


def test_the_baselines_second_run_meets_each_repeat_at_another_load(tmp_path, run):
    toy = Toy(token_seconds=0.002)
    with toy_serving(toy) as url:
        assert run("--baseline", url, "-n", "2", "--concurrency", "1,4", "--teacher-forcing", "0") == 0
    arms = store.load(tmp_path / "run").arms
    assert arms["a1"].outputs.keys() == arms["a2"].outputs.keys()
    assert len(arms["a1"].outputs) == 2 * 2 * len(PROMPTS)
    for key, output in arms["a1"].outputs.items():
        assert {output.load, arms["a2"].outputs[key].load} == {1, 4}
    at_once = {"a1": {1: 0, 4: 0}, "a2": {1: 0, 4: 0}}
    loads = {o.request_id: (name, o.load) for name, arm in arms.items() for o in arm.outputs.values()}
    for request in toy.requests:
        if found := loads.get(request["x_request_id"]):
            at_once[found[0]][found[1]] = max(at_once[found[0]][found[1]], request["running"])
    assert at_once == {"a1": {1: 1, 4: 4}, "a2": {1: 1, 4: 4}}


def test_a_cold_request_shares_its_cache_with_none_and_a_warm_one_finds_its_prompt_there(run):
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--cache", "cold,warm", "--teacher-forcing", "0") == 0
    cold = [request["cache_salt"] for request in toy.requests if request["x_request_id"].endswith("-cold")]
    warm = [request for request in toy.requests if request["cache_salt"].endswith("-warm")]
    assert len(set(cold)) == len(cold) == len(PROMPTS)
    first = [request["max_tokens"] for request in warm[: len(PROMPTS)]]
    assert first == [1] * len(PROMPTS)  # the warm-up, whose replies are not kept
    assert len(warm) == 2 * len(PROMPTS)
    assert len({request["cache_salt"] for request in warm}) == 1


def test_a_server_that_dies_midway_stops_the_run_and_what_came_is_kept(tmp_path, run, capsys):
    with toy_serving(Toy(die_after=12)) as url:
        assert run("--candidate", url, "--concurrency", "2", "--stop-after-errors", "3") == 3
    said = capsys.readouterr().err
    assert "stopped: 3 requests in a row failed" in said
    assert "the same command goes on" in said
    outputs = store.load(tmp_path / "run").arms["b"].outputs
    assert 4 <= sum(output.error is None for output in outputs.values()) < len(PROMPTS)
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--concurrency", "2") == 0
    after = store.load(tmp_path / "run").arms["b"].outputs
    assert len(after) == len(PROMPTS)
    assert all(output.error is None for output in after.values())
    sent = {request["x_request_id"] for request in toy.requests}
    for key, output in outputs.items():
        assert (output.request_id in sent) is False
        assert (after[key] == output) is (output.error is None)  # only what was missing was asked for again


def test_a_run_goes_on_behind_a_line_that_was_torn(tmp_path, run):
    with toy_serving(Toy()) as url:
        assert run("--candidate", url, "--max-requests", "9") == 3
        file = tmp_path / "run" / "b.jsonl"
        before = file.read_bytes()
        file.write_bytes(before + b'{"output":{"arm":"b","prompt":')
        kept = store.load(tmp_path / "run").arms["b"].outputs
        assert len(kept) == 9 - 4  # less the warm-up
        assert run("--candidate", url) == 0
    assert file.read_bytes().startswith(before)
    loaded = store.load(tmp_path / "run")
    assert loaded.notes == []
    assert len(loaded.arms["b"].outputs) == len(PROMPTS)


def test_what_was_under_way_when_a_run_was_killed_is_asked_again_under_another_name(tmp_path, run):
    """Else the logs hold two requests of one name, and a cold one finds the prefix that its predecessor left."""
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--max-requests", "9") == 3
        file = tmp_path / "run" / "b.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:-4]))  # were answered, but not yet written
        assert run("--candidate", url) == 0
    for name in ("x_request_id", "cache_salt"):
        sent = [each[name] for each in toy.requests if each["x_request_id"].rpartition("-")[2] != "start"]
        cold = [each for each in sent if "cold" in each]
        assert len(set(cold)) == len(cold) > len(PROMPTS)


def test_a_run_that_is_interrupted_keeps_what_came(tmp_path, prompts):
    toy = Toy(token_seconds=0.01)
    with toy_serving(toy) as url:
        command = [sys.executable, "-m", "verifier.stability.cli", "run", "--out", str(tmp_path / "run"), "--gather"]
        command += ["--prompts", str(prompts), "--max-tokens", "12", "--concurrency", "2", "--candidate", url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while len(toy.requests) < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    outputs = store.load(tmp_path / "run").arms["b"].outputs
    assert 2 <= len(outputs) < len(PROMPTS)
    assert all(output.error is None for output in outputs.values())


def test_a_run_does_not_go_on_with_another_plan_or_another_server(run, capsys):
    with toy_serving(Toy()) as url:
        assert run("--candidate", url, "--max-requests", "6") == 3
        assert run("--candidate", url, "--max-tokens", "13") == 2
        assert "begun with another plan (max_tokens 12 -> 13)" in capsys.readouterr().err
    with toy_serving(Toy(weights="two")) as url:
        assert run("--candidate", url) == 2
        assert "arm b was begun on another server (root toy/one -> toy/two)" in capsys.readouterr().err


def test_two_processes_do_not_write_one_arm(tmp_path, run, capsys):
    with toy_serving(Toy()) as url:
        assert run("--candidate", url, "--max-requests", "6") == 3
        with store.ArmWriter(tmp_path / "run", "b"):
            assert run("--candidate", url) == 2
    assert "another process is running this arm" in capsys.readouterr().err


def test_arms_may_run_one_at_a_time_since_two_servers_may_not_fit_one_machine(tmp_path, run):
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--teacher-forcing", "3") == 0  # before the baseline: nothing to be forced yet
        assert run("--baseline", url, "--candidate", url, "--only", "a1,a2", "--teacher-forcing", "3") == 0
        before = len(toy.requests)
        assert run("--candidate", url, "--teacher-forcing", "3") == 0
        assert len(toy.requests) == before + 3  # what was left: the teacher forcing
        assert run("--baseline", url, "--candidate", url, "--teacher-forcing", "3") == 0
        assert len(toy.requests) == before + 3  # nothing is left
    arms = store.load(tmp_path / "run").arms
    references = {output.request_id: output for output in arms["a1"].outputs.values()}
    for name in ("a1", "a2", "b"):
        assert len(arms[name].forced) == 3
        for reference, forced in arms[name].forced.items():
            assert forced.ids == references[reference].ids
            assert [top[0][0] for top in forced.top] == forced.ids  # the same model, and no noise


def test_a_server_without_prompt_logprobs_is_not_asked_on_and_does_not_end_the_run(tmp_path, run):
    toy = Toy(forced=False)
    with toy_serving(toy) as url:
        assert run("--baseline", url) == 0
    arms = store.load(tmp_path / "run").arms
    assert [forced.error for forced in arms["a1"].forced.values()] == ["HTTP 400: prompt_logprobs is not supported"] * 2
    assert len(arms["a2"].outputs) == len(PROMPTS)


def test_a_server_that_names_no_ids_is_said_to_be_of_no_use(run, capsys):
    with toy_serving(Toy(ids=False)) as url:
        assert run("--candidate", url) == 3
    assert "no token ids in the stream (return_token_ids: vLLM 0.10.2 or newer)" in capsys.readouterr().err


def test_a_server_that_leaves_ids_out_is_not_compared_by_the_rest(run, capsys):
    with toy_serving(Toy(hidden=3)) as url:
        assert run("--candidate", url) == 3
    assert "9 token ids of 12 tokens: does a parser leave some out?" in capsys.readouterr().err


def test_requests_are_begun_no_faster_than_asked_for_and_timed_from_when_they_are(tmp_path, run):
    begin = time.monotonic()
    with toy_serving(Toy()) as url:
        assert run("--candidate", url, "--rate", "10", "--concurrency", "8", "--teacher-forcing", "0") == 0
    assert time.monotonic() - begin >= (len(PROMPTS) + 4 - 1) / 10
    outputs = store.load(tmp_path / "run").arms["b"].outputs.values()
    assert statistics.median(output.ttft for output in outputs) < 0.4  # most waited for 0.8 s


def test_as_many_requests_are_sent_as_were_allowed_though_some_wait_for_their_turn(run):
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--rate", "50", "--concurrency", "8", "--max-requests", "9") == 3
    assert len(toy.requests) == 9


def test_more_at_once_than_the_limit_is_refused_before_anything_is_sent(run, capsys):
    toy = Toy()
    with toy_serving(toy) as url:
        assert run("--candidate", url, "--concurrency", "99") == 2
    assert toy.requests == []
    assert "99 requests at once are more than --max-concurrency 64" in capsys.readouterr().err


def test_what_opens_a_server_is_sent_and_never_written(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setenv("SPARSEETY_VERIFY_API_KEY", "sk-secret")
    with toy_serving(Toy()) as url:
        assert run("--candidate", url.replace("//", "//user:pa55@")) == 0
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir())
    assert b"sk-secret" not in written
    assert b"pa55" not in written
    assert "pa55" not in capsys.readouterr().err
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "run", *(tmp_path / "run").iterdir()])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no server to ask"),
        (("--candidate", "localhost:8000"), '"localhost:8000" is not a URL'),
        (("--candidate", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer"),
        (("--only", "b", "--baseline", "http://127.0.0.1:9"), "--only b: no URL is given for it"),
        (("--yardstick", "b=http://x", "--candidate", "http://x"), 'the arm "b" is named twice'),
    ],
)
def test_wrong_use_is_said_in_words(run, capsys, arguments, said):
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_reply_without_an_end_is_given_up(run, capsys):
    with toy_serving(Toy(token_seconds=0.1)) as url:
        assert run("--candidate", url, "--timeout", "0.4", "--stop-after-errors", "2") == 3
    assert "no end within 0.4 s" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_for_a_person_and_plain_lines_for_a_log():
    bar, plain, quiet = Terminal(), io.StringIO(), io.StringIO()
    for stream, wanted in ((bar, True), (plain, True), (quiet, False)):
        progress = StageProgress(stream, wanted=wanted)
        for done in range(41):
            progress("a1 at 8, cold", done, 40, 1)
    assert bar.getvalue().startswith("\r  a1 at 8, cold            ░░░░░░░░░░░░░░░░░░░░ 0/40")
    assert bar.getvalue().endswith("████████████████████ 40/40   1 errors\x1b[K\n")
    assert plain.getvalue() == "a1 at 8, cold: 40/40   1 errors\n"
    assert quiet.getvalue() == ""
