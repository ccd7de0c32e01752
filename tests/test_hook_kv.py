"""KV blocks: which request they belong to, and which of its positions they hold. The stand-in's hold 4 tokens."""

from pathlib import Path

from sampler_hook.kv import KvLedger
from sparseety.records import EngineEvent, Kv, KvBlocks, RequestFinished
from tests.hook_fakes import Engine, config, fake_vllm

KV = {"capture": frozenset({"tokens", "kv"})}


def events(engine: Engine) -> list[KvBlocks]:
    return [blocks for record in engine.log() if isinstance(record, Kv) for blocks in record.events]


def test_blocks_are_recorded_with_the_positions_that_they_hold(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings=KV) as engine:
        engine.add(prompt=list(range(100, 107)))
        engine.step([20])
        engine.step([21])
        engine.step([22])
        assert events(engine) == [
            KvBlocks(kind="allocated", request=1, first=0, tokens=8, blocks=[1, 2]),
            KvBlocks(kind="allocated", request=1, first=8, tokens=4, blocks=[3]),
        ]


def test_what_the_prefix_cache_had_is_reused_and_the_rest_allocated(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings=KV) as engine:
        request = engine.add(prompt=list(range(100, 110)))
        request.num_cached_tokens = 8
        engine.step([20])
        kinds = [(blocks.kind, blocks.first, blocks.tokens) for blocks in events(engine)]
        assert kinds == [("reused", 0, 8), ("allocated", 8, 4)]


def test_evicted_blocks_name_the_request_whose_tokens_they_held(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings=KV, blocks=4) as engine:  # 3 of them are usable
        first = engine.add("chatcmpl-a", prompt=list(range(100, 107)), max_tokens=1)
        engine.step([20])
        assert first.is_finished()
        engine.add("chatcmpl-b", prompt=list(range(100, 107)), max_tokens=1)
        engine.step([30])
        evicted = [blocks for blocks in events(engine) if blocks.kind == "evicted"]
        assert [(blocks.request, blocks.first, blocks.tokens, blocks.blocks) for blocks in evicted] == [(1, 0, 4, [1])]


def test_a_preempted_request_gives_up_its_blocks(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings=KV) as engine:
        request = engine.add(prompt=list(range(100, 107)))
        engine.step([20])
        engine.scheduler.preempt(request.request_id, found_again=4)
        engine.step([21])
        kinds = [(blocks.kind, blocks.request, blocks.first, blocks.tokens) for blocks in events(engine)]
        assert kinds[1:] == [("preempted", 1, 0, 8), ("reused", 1, 0, 4), ("allocated", 1, 4, 4)]


def test_each_group_of_layers_has_a_table_of_its_own() -> None:
    ledger = KvLedger([4, 16])
    given = ledger.given(7, 0, ([1, 2], [3]), anew=True)
    assert [(blocks.group, blocks.tokens) for blocks in given] == [(0, 8), (1, 16)]
    assert [(blocks.group, blocks.first) for blocks in ledger.given(7, 8, ([4], []), anew=False)] == [(0, 8)]


def test_positions_that_a_window_has_left_behind_have_no_block() -> None:
    given = KvLedger([4]).given(7, 0, ([0, 0, 5, 6],), anew=True)
    assert given == [KvBlocks(kind="allocated", request=7, first=8, tokens=8, blocks=[5, 6])]


def test_blocks_of_requests_that_are_not_recorded_belong_to_nobody() -> None:
    assert [blocks.request for blocks in KvLedger([4]).evicted([9])] == [None]


def test_blocks_are_not_recorded_unless_asked_for(tmp_path: Path) -> None:
    with fake_vllm(tmp_path) as engine:
        engine.add()
        engine.step([20])
        assert events(engine) == []


def test_a_fault_in_following_blocks_costs_nothing_else(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings=KV) as engine:
        request = engine.add(max_tokens=3)
        engine.step([20])
        scheduled = engine.schedule()
        del scheduled.scheduled_cached_reqs.new_block_ids
        engine.take(scheduled, [21])
        engine.step([22])
        assert request.output_token_ids == [20, 21, 22]
        assert [row.ids for row in engine.rows()] == [[20], [21], [22]]
        (event,) = [record for record in engine.log() if isinstance(record, EngineEvent)]
        assert (event.kind, event.detail) == ("part_off", "kv: AttributeError")


def test_the_share_of_context_that_windows_read_is_derived_for_each_request(tmp_path: Path) -> None:
    from types import SimpleNamespace

    layers = SimpleNamespace(
        num_hidden_layers=2, sliding_window=2, layer_types=["full_attention", "sliding_attention"], eos_token_id=2
    )
    with fake_vllm(tmp_path, config(hf_config=layers), settings=KV) as engine:
        engine.add(prompt=[1, 10, 11], max_tokens=2)
        engine.step([20])
        engine.step([21])
        (finished,) = [record for record in engine.log() if isinstance(record, RequestFinished)]
        assert finished.attended == {"sliding": (4, 7)}
