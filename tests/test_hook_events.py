"""What happens to the engine as a whole, and hooks that stay silent."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseety.records import EngineEvent, EngineStart, Step
from tests.hook_fakes import Engine, fake_vllm


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with fake_vllm(tmp_path / "logs") as engine:
        yield engine


def events(engine: Engine) -> list[tuple[str, str | None]]:
    return [(record.kind, record.detail) for record in engine.log() if isinstance(record, EngineEvent)]


def test_sleep_wake_and_cache_resets_stand_in_the_log_in_order(engine: Engine) -> None:
    engine.core.sleep(level=2)
    engine.core.wake_up(["weights"])
    engine.core.wake_up()
    engine.core.reset_mm_cache()
    assert events(engine) == [
        ("sleep", "level 2"),
        ("cache_reset", "prefix"),
        ("wake", "weights"),
        ("wake", None),
        ("cache_reset", "multi-modal"),
    ]


def test_a_change_of_the_weights_shows_in_the_steps_after_it(engine: Engine) -> None:
    engine.add()
    engine.step([20])
    engine.core.collective_rpc("update_weights", args=({},))
    engine.core.collective_rpc("compute_weight_checksums")
    engine.core.collective_rpc("profile")
    engine.core.set_weight_version("v2")
    engine.step([21])
    engine.step([22])
    assert events(engine) == [("weight_update", "update_weights"), ("weight_version", None)]
    assert [r.weight_version for r in engine.log() if isinstance(r, Step)] == [None, "v2", None]


def test_a_fault_of_ours_in_an_event_costs_the_events_only(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError

    engine.add()
    engine.core.sleep(Odd())
    engine.core.sleep(1)
    engine.step([20])
    assert [row.ids for row in engine.rows()] == [[20]]
    assert events(engine) == [("part_off", "events: ValueError")]
    assert len(caplog.records) == 1


def test_who_the_request_is_for_is_written(engine: Engine) -> None:
    class Adapter(SimpleNamespace): ...

    from vllm.v1 import request as module

    taken = module.Request(module.EngineCoreRequest("chatcmpl-a-0a1b2c3d", "chatcmpl-a", [1, 2]))
    taken.kv_transfer_params = {"do_remote_decode": True}
    taken.lora_request = Adapter(lora_name="sql")
    engine.scheduler.add_request(taken)
    (added,) = engine.added()
    assert (added.role, added.lora, added.attempt) == ("prefill", "sql", 1)


def test_an_external_id_that_comes_again_is_another_attempt(engine: Engine) -> None:
    for suffix in ("00000001", "00000002"):
        engine.add("chatcmpl-same", f"chatcmpl-same-{suffix}")
    engine.add("chatcmpl-same", "1_chatcmpl-same-00000002")
    assert [(record.child, record.attempt) for record in engine.added()] == [(0, 1), (0, 2), (1, 1)]


def test_a_hook_that_never_fires_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_vllm(tmp_path) as engine:
        engine.hook._sites[-1].fired = False
        request = engine.add(max_tokens=500)
        silent = next(site for site in engine.hook._sites if site.target.name == "from_engine_core_request")
        for token in range(100, 250):
            engine.step([token])
        silent.fired = False  # as where a vLLM makes its requests in some other way
        with caplog.at_level(logging.WARNING):
            engine.look_around()
            engine.look_around()
        engine.abort(request)
        assert events(engine) == [("hook_silent", "Request.from_engine_core_request")]
        assert len(caplog.records) == 1
        assert "without calling Request.from_engine_core_request" in caplog.text


def test_the_start_names_what_was_asked_for_and_what_is_attached(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings={"capture": frozenset({"tokens", "kv"})}) as engine:
        start = engine.log()[1]
        assert isinstance(start, EngineStart)
        assert start.capture == ["kv", "tokens"]
        assert {"BlockPool._maybe_evict_cached_block", "EngineCore.sleep"} <= set(start.hooks_attached)
        assert set(start.hooks_attached) == set(start.hooks_expected)


def test_workers_are_told_the_step_and_whom_to_leave_out(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"capture": frozenset({"tokens", "sparsity"}), "sample": 0.0, "near_zero": 0.5}
    with fake_vllm(tmp_path, settings=settings) as engine:
        skipped = engine.add("chatcmpl-a")
        first, second = engine.schedule(), engine.schedule()
        assert first._sparseety == {
            "step": 0,
            "skip": [skipped.request_id],
            "capture": ["sparsity", "tokens"],
            "near_zero": 0.5,
        }
        assert second._sparseety["step"] == 1
