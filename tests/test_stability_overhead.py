"""What a switch costs: the same requests in turns, off and on."""

import json
import os
from pathlib import Path

import pytest

from tests.toy_model_server import Toy, toy_serving
from verifier.stability import store
from verifier.stability.cli import main


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts-in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt number {number}"}) + "\n" for number in range(6)))
    return path


def overhead(tmp_path: Path, prompts: Path, off: str, on: str, *arguments: str) -> int:
    fixed = ["overhead", "--off", off, "--on", on, "--out", str(tmp_path / "run"), "--prompts", str(prompts)]
    return main([*fixed, "--max-tokens", "8", "--concurrency", "3", "--quiet", *arguments])


def test_a_slower_server_is_measured_as_slower_with_intervals(tmp_path, prompts, capsys):
    fast, slow = Toy(token_seconds=0.002), Toy(token_seconds=0.012)
    with toy_serving(fast) as off, toy_serving(slow) as on:
        arguments = ("--json", "--max-slowdown", "1.5", "--on-pid", str(os.getpid()))
        assert overhead(tmp_path, prompts, off, on, *arguments) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"]) == (2 * 6 * 6, 0)
    assert found["tpot"]["low"] > 1.5
    assert found["throughput"]["high"] < 1
    assert found["throughput"]["low"] <= found["throughput"]["value"] <= found["throughput"]["high"]
    assert found["same_ids"] == found["pairs"] == 36
    assert found["memory_on"] > 1 << 20
    assert found["memory_off"] is None  # neither a pid nor /metrics says it
    assert all("logprobs" not in request for request in fast.requests)  # they would be a cost of their own


def test_rounds_run_in_turns_each_time_the_other_one_first(tmp_path, prompts):
    off_toy, on_toy = Toy(), Toy()
    order: list[str] = []
    off_toy.requests, on_toy.requests = _Log("off", order), _Log("on", order)
    with toy_serving(off_toy) as off, toy_serving(on_toy) as on:
        assert overhead(tmp_path, prompts, off, on, "-n", "4") == 0
    after_warm_up = [name for name in order if name != "warm-up"]
    rounds = [set(after_warm_up[i : i + 6]) for i in range(0, len(after_warm_up), 6)]
    assert rounds == [{"off"}, {"on"}, {"on"}, {"off"}, {"off"}, {"on"}, {"on"}, {"off"}]


class _Log(list):
    """Notes the order over two servers."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self._name, self._order = name, order

    def append(self, request) -> None:
        super().append(request)
        self._order.append("warm-up" if "warm-up" in request["x_request_id"] else self._name)


def test_a_round_that_broke_off_is_run_again_as_a_whole(tmp_path, prompts, capsys):
    with toy_serving(Toy()) as off, toy_serving(Toy()) as on:
        assert overhead(tmp_path, prompts, off, on, "-n", "3", "--max-requests", "24") == 3
        assert "the limit of 24 requests is reached" in capsys.readouterr().err
        before = store.load(tmp_path / "run").arms["off"].rounds
        assert overhead(tmp_path, prompts, off, on, "-n", "3") == 0
    arms = store.load(tmp_path / "run").arms
    assert [each.number for each in arms["off"].rounds] == [0, 1, 2]
    assert [each.number for each in arms["on"].rounds] == [1, 0, 2] or len(arms["on"].rounds) == 3
    assert arms["off"].rounds[: len(before)] == before
    assert "throughput" in capsys.readouterr().out


def test_nothing_is_said_where_requests_failed(tmp_path, prompts):
    with toy_serving(Toy()) as off, toy_serving(Toy(die_after=20)) as on:
        assert overhead(tmp_path, prompts, off, on) == 3
