"""The accounts at a request's end: each position, and each draft, is counted once in one place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sampler_hook import attention
from sparseety.records import AttentionLayers, RequestFinished
from tests.hook_fakes import Engine, fake_vllm


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with fake_vllm(tmp_path / "logs") as engine:
        yield engine


def account(engine: Engine) -> RequestFinished:
    (finished,) = engine.finished()
    (added,) = engine.added()
    assert finished.cached_tokens is not None
    assert finished.computed is not None
    assert added.prompt_len == finished.cached_tokens + finished.computed
    assert finished.evicted == finished.reused_again + finished.recomputed
    assert finished.drafts == finished.drafts_accepted + finished.drafts_rejected
    return finished


def test_a_prompt_is_reused_or_computed(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, max_tokens_per_step=4) as engine:
        request = engine.add(prompt=list(range(100, 120)), max_tokens=3)
        request.num_cached_tokens = 8
        engine.step([])
        engine.step([])
        for token in (20, 21, 22):
            engine.step([token])
        finished = account(engine)
        assert (finished.cached_tokens, finished.computed, finished.recomputed) == (8, 12, 0)


def test_what_a_preemption_cost_is_shown_apart(engine: Engine) -> None:
    request = engine.add(prompt=list(range(100, 110)), max_tokens=4)
    engine.step([20])
    engine.step([21])
    engine.scheduler.preempt(request.request_id, found_again=8)
    engine.step([22])
    engine.step([23])
    finished = account(engine)
    assert (finished.computed, finished.preemptions) == (10, 1)
    assert (finished.evicted, finished.reused_again, finished.recomputed) == (11, 8, 3)


def test_a_request_preempted_while_it_recomputes_pays_twice(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, max_tokens_per_step=4) as engine:
        request = engine.add(prompt=list(range(100, 110)), max_tokens=2)
        for row in ([], [], [20]):
            engine.step(row)
        engine.scheduler.preempt(request.request_id)
        engine.step([])  # 4 of 11 positions
        engine.scheduler.preempt(request.request_id)
        for row in ([], [], [21]):
            engine.step(row)
        finished = account(engine)
        assert (finished.computed, finished.evicted, finished.recomputed) == (10, 14, 14)


def test_a_request_preempted_in_its_prompt_still_adds_up(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, max_tokens_per_step=4) as engine:
        request = engine.add(prompt=list(range(100, 110)), max_tokens=1)
        engine.step([])
        engine.scheduler.preempt(request.request_id)
        for row in ([], [], [20]):
            engine.step(row)
        finished = account(engine)
        assert (finished.computed, finished.evicted, finished.recomputed) == (10, 4, 4)


@pytest.mark.parametrize("drop", [False, True])
def test_a_step_on_its_way_at_a_preemption_does_not_upset_the_sum(engine: Engine, drop: bool) -> None:
    request = engine.add(prompt=list(range(100, 110)), max_tokens=4)
    engine.step([20])
    in_flight = engine.schedule()
    engine.scheduler.preempt(request.request_id, drop_stale_output=drop)
    engine.take(in_flight, [21])
    for token in (22, 23, 24)[: 3 if drop else 2]:
        engine.step([token])
    assert account(engine).recomputed == 11


def test_drafts_are_accepted_or_rejected(engine: Engine) -> None:
    request = engine.add(max_tokens=6)
    engine.step([20])
    request.spec_token_ids = [21, 99, 98]
    engine.step([21, 22])
    request.spec_token_ids = [23]
    engine.step([23, 24])
    engine.step([25])
    finished = account(engine)
    assert (finished.drafts, finished.drafts_accepted, finished.drafts_rejected) == (4, 2, 2)
    assert finished.recomputed == 0


def test_a_request_that_never_came_back_gave_up_what_it_had(engine: Engine) -> None:
    request = engine.add(prompt=list(range(100, 110)))
    engine.step([20])
    engine.scheduler.preempt(request.request_id)
    engine.abort(request)
    (finished,) = engine.finished()
    assert (finished.evicted, finished.reused_again, finished.recomputed) == (10, 0, 0)


def test_without_a_first_token_nothing_is_said_of_the_prompt(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, max_tokens_per_step=4) as engine:
        request = engine.add(prompt=list(range(100, 110)))
        engine.step([])
        engine.abort(request)
        assert engine.finished()[0].computed is None


@pytest.mark.parametrize("window", [1, 3, 7, 40])
@pytest.mark.parametrize("prompt_len", [1, 2, 6, 30])
@pytest.mark.parametrize("outputs", [0, 1, 2, 25])
def test_a_window_reads_what_it_reaches(window: int, prompt_len: int, outputs: int) -> None:
    contexts = [prompt_len + i for i in range(outputs)]
    sliding = AttentionLayers(layer_type="sliding", layers=1, window=window)
    chunked = AttentionLayers(layer_type="chunked", layers=1, window=window)
    assert attention.read(sliding, prompt_len, outputs) == (sum(min(c, window) for c in contexts), sum(contexts))
    assert attention.read(chunked, prompt_len, outputs) == (sum((c - 1) % window + 1 for c in contexts), sum(contexts))


def test_the_kinds_of_layers_are_read_off_the_configuration() -> None:
    from types import SimpleNamespace as Config

    def found(**fields: object) -> list[tuple[str, int, int | None]]:
        return [(kind.layer_type, kind.layers, kind.window) for kind in attention.layers(Config(**fields))]

    assert found(num_hidden_layers=4) == [("full", 4, None)]
    assert found(num_hidden_layers=4, sliding_window=128) == [("sliding", 4, 128)]
    assert found(num_hidden_layers=4, sliding_window=128, use_sliding_window=False) == [("full", 4, None)]
    mixed = ["sliding_attention", "sliding_attention", "full_attention"]
    assert found(num_hidden_layers=3, sliding_window=8, layer_types=mixed) == [("full", 1, None), ("sliding", 2, 8)]
    assert found(num_hidden_layers=1, layer_types=["chunked_attention"]) == []  # how long a chunk is, is not said
    assert found() == []
