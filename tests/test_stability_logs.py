"""A stability run through the proxy: every stream is verified, and the engine's log says what happened to each."""

from pathlib import Path

import msgspec
import pytest

from deploy.demo.backend import Settings, serving
from deploy.demo.faults import parse_fault
from sparseety.logreader import find_logs
from sparseety.records import (
    AnyRecord,
    AttentionLayers,
    EngineEvent,
    EngineStart,
    LogOpen,
    RequestAdded,
    RequestFinished,
    Scope,
    Sparsity,
    TokenizerIdentity,
)
from tests.proxy_command import start_proxy
from verifier.stability import store
from verifier.stability.cli import main
from verifier.stability.model import Output
from verifier.stability.witness import look_up
from verifier.tokenizer import TokenizerShelf

TOKENIZER = Path(__file__).parent.parent / "deploy" / "demo" / "tokenizer" / "tokenizer.json"


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> Path:
    """A run against the demo backend behind the proxy, with a fault in one of five streams of arm b."""
    folder = tmp_path_factory.mktemp("stability")
    fixed = ["run", "--out", str(folder / "run"), "--first", "10", "--max-tokens", "16", "--quiet", "--gather"]
    for arm, fault in (("--baseline", None), ("--candidate", "alter")):
        settings = Settings(
            log_dir=folder / "logs", token_delay=0, fault=parse_fault(fault) if fault else None, fault_every=5
        )
        with serving(settings) as url:
            proxy = start_proxy(folder, url, folder / "logs")
            try:
                assert main([*fixed, arm, proxy.url, "--teacher-forcing", "0"]) == 0
            finally:
                proxy.stop()
    return folder


def test_every_stream_is_verified_by_its_own_logs(gathered):
    run = store.load(gathered / "run")
    outputs = [output for arm in run.arms.values() for output in arm.outputs.values()]
    evidence = look_up(outputs, find_logs([str(gathered / "logs")]), TokenizerShelf([TOKENIZER]), 1)
    assert len(evidence.checked) == len(outputs) == 30
    verdicts = {
        name: [evidence.checked[output.request_id].verdict for output in arm.outputs.values()]
        for name, arm in run.arms.items()
    }
    assert set(verdicts["a1"]) == set(verdicts["a2"]) == {"pass"}
    assert verdicts["b"].count("fail") >= 2
    assert verdicts["b"].count("pass") >= 6


def looked_up(run: store.Run, folder: Path, arm: str):
    outputs = run.arms[arm].outputs.values()
    return look_up(outputs, find_logs([str(folder / "logs")]), TokenizerShelf([TOKENIZER]), 1)


def test_the_engines_log_says_what_was_done_to_each_request(gathered):
    run = store.load(gathered / "run")
    evidence = looked_up(run, gathered, "a1")
    assert len(evidence.checked) == 10
    for checked in evidence.checked.values():
        assert checked.served is not None
        assert checked.served.zeros is None  # nothing was counted, which is not zero
    assert evidence.engines["a1"].vllm.startswith("0.32.0")
    assert evidence.engines["a1"].tokenizer_sha256
    [epoch] = {checked.epoch for checked in evidence.checked.values()}
    [other] = {checked.epoch for checked in looked_up(run, gathered, "b").checked.values()}
    assert other != epoch  # another engine


def output(number: int) -> Output:
    name = f"x-a1-p{number}-r0-cold"
    fields = {"prompt": number, "repeat": 0, "load": 1, "cache": "cold", "request_id": name}
    return Output(arm="a1", response_id=f"chatcmpl-{name}", ids=[1], **fields)


def engine_log(
    folder: Path,
    pid: int,
    start: float,
    requests: list[tuple[int, float]],
    *more: AnyRecord,
    attention: list[AttentionLayers] | None = None,
    attended: dict[str, tuple[int, int]] | None = None,
) -> None:
    """One engine's log: it starts, takes requests (number, when), and whatever else happens."""
    opening = LogOpen(
        ts=start, format=1, source="engine", host="h", pid=pid, start=start, program="sparseety", scope=Scope()
    )
    tokenizer = TokenizerIdentity(name="t")
    started = EngineStart(ts=start, vllm="0.32.0", model="m", tokenizer=tokenizer, attention=attention or [])
    lines: list[AnyRecord] = [opening, started]
    for place, (number, ts) in enumerate(requests, 1):
        name = f"chatcmpl-x-a1-p{number}-r0-cold"
        added = RequestAdded(ts=ts, request=place, external_id=name, engine_id=f"{name}-0a", prompt_len=3)
        lines += [added, RequestFinished(ts=ts, request=place, total_ids=1, attended=attended or {})]
    lines = [lines[0], *sorted([*lines[1:], *more], key=lambda record: record.ts)]
    (folder / f"engine-{pid}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def epochs(folder: Path) -> list[str | None]:
    evidence = look_up([output(n) for n in range(4)], find_logs([str(folder)]), TokenizerShelf([TOKENIZER]), 1)
    return [evidence.checked[output(n).request_id].epoch for n in range(4)]


def test_zeros_are_summed_over_layers_and_phases_but_not_what_was_computed_again(tmp_path):
    engine_log(tmp_path, 1, 10.0, [(0, 20.0)])
    opening = LogOpen(ts=1.0, format=1, source="worker", host="h", pid=2, start=1.0, program="s", scope=Scope())
    name = "chatcmpl-x-a1-p0-r0-cold-0a"
    counts = [("prefill", [3, 4], [10, 10]), ("decode", [1, 0], [5, 5]), ("recomputed", [9, 9], [10, 10])]
    lines = [
        Sparsity(ts=20.0, engine_id=name, phase=phase, tokens=1, zeros=zeros, near=zeros, elements=elements)
        for phase, zeros, elements in counts
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in [opening, *lines])
    (tmp_path / "worker-2.jsonl").write_bytes(data)
    evidence = look_up([output(0)], find_logs([str(tmp_path)]), TokenizerShelf([TOKENIZER]), 1)
    served = evidence.checked[output(0).request_id].served
    assert (served.zeros, served.elements) == (8, 30)


def test_attention_is_summed_over_the_layers_of_each_kind(tmp_path):
    kinds = [AttentionLayers(layer_type="sliding", layers=4, window=8), AttentionLayers(layer_type="full", layers=2)]
    engine_log(tmp_path, 1, 10.0, [(0, 20.0)], attention=kinds, attended={"sliding": (30, 100)})
    evidence = look_up([output(0)], find_logs([str(tmp_path)]), TokenizerShelf([TOKENIZER]), 1)
    checked = evidence.checked[output(0).request_id]
    assert (checked.served.attended, checked.served.context) == (4 * 30 + 2 * 100, 6 * 100)
    assert evidence.engines["a1"].attention == ["4 sliding (8)", "2 full"]


def test_engines_that_run_side_by_side_are_one_server(tmp_path):
    engine_log(tmp_path, 1, 10.0, [(0, 20.0), (2, 22.0)])
    engine_log(tmp_path, 2, 11.0, [(1, 21.0), (3, 23.0)])
    assert len(set(epochs(tmp_path))) == 1


def test_a_restart_or_a_sleep_midway_makes_two_states_of_one_server(tmp_path):
    engine_log(tmp_path, 1, 10.0, [(0, 20.0), (1, 21.0)])
    engine_log(tmp_path, 2, 21.5, [(2, 22.0), (3, 23.0)])
    first, second, third, fourth = epochs(tmp_path)
    assert first == second != third == fourth
    (tmp_path / "engine-2.jsonl").unlink()
    sleep = EngineEvent(ts=20.5, kind="sleep", detail="2")
    engine_log(tmp_path, 1, 10.0, [(0, 20.0), (1, 21.0), (2, 22.0), (3, 23.0)], sleep)
    first, second, third, fourth = epochs(tmp_path)
    assert first != second == third == fourth
