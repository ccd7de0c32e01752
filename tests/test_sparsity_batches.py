"""How a worker reads what the scheduler sends it, on stand-ins for vLLM's objects."""

from types import SimpleNamespace
from typing import Any

import pytest

from sampler_hook.ledger import Rows
from sampler_hook.worker_adapters import (
    BatchReader,
    batch_order,
    keep_out_of_the_compile_cache,
    language_model,
    rows_are_not_the_batch,
    without,
)


def new(engine_id: str, prompt: list[int] | None, computed: int = 0, embeds: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=engine_id, prompt_token_ids=prompt, prompt_embeds=embeds, num_computed_tokens=computed
    )


def output(counts: dict[str, int], *news: Any, cached: dict[str, int] | None = None, **drafts: list[int]) -> Any:
    cached = cached or {}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_new_reqs=list(news),
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        scheduled_spec_decode_tokens=drafts,
    )


def config(*, speculative: bool = False, asynchronous: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=object() if speculative else None,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
    )


def test_rows_come_in_the_order_of_the_batch_and_not_of_the_schedule() -> None:
    reader = BatchReader(config())
    first = reader.rows(output({"a": 3, "b": 2}, new("a", [1, 2, 3]), new("b", [1, 2, 3, 4], 2)), ["b", "a"])
    assert first == [Rows("b", 2, start=2, prompt_len=4), Rows("a", 3, start=0, prompt_len=3)]
    second = reader.rows(output({"a": 1, "b": 3}, cached={"a": 3, "b": 4}, b=[8, 9]), ["a", "b"])
    assert second == [Rows("a", 1, start=3, prompt_len=3), Rows("b", 3, start=4, prompt_len=4, drafts=2)]


def test_a_request_of_the_batch_that_computes_nothing_has_no_rows() -> None:
    assert BatchReader(config()).rows(output({"a": 1}, new("a", [1])), ["idle", "a"]) == [
        Rows("a", 1, start=0, prompt_len=1)
    ]


def test_a_prompt_of_embeddings_has_a_length_too() -> None:
    (rows,) = BatchReader(config()).rows(output({"a": 2}, new("a", None, embeds=[[0.1], [0.2]])), ["a"])
    assert rows.prompt_len == 2


@pytest.mark.parametrize(
    ("speculative", "asynchronous", "exact"),
    [(False, False, True), (True, False, True), (False, True, True), (True, True, False)],
)
def test_positions_are_not_exact_where_drafts_are_planned_over(
    speculative: bool, asynchronous: bool, exact: bool
) -> None:
    reader = BatchReader(config(speculative=speculative, asynchronous=asynchronous))
    (rows,) = reader.rows(output({"a": 1}, new("a", [1])), ["a"])
    assert rows.exact is exact


def test_what_the_engine_says_to_skip_leaves_the_rows_of_the_others() -> None:
    rows = [Rows(name, count, start=0, prompt_len=9) for name, count in (("a", 2), ("b", 3), ("c", 1))]
    assert without(rows, []) == (rows, None)
    assert without(rows, ["b"]) == ([rows[0], rows[2]], [0, 1, 5])
    assert without(rows, ["a", "b", "c"]) == ([], [])


def test_the_batch_is_read_from_either_of_vllms_runners() -> None:
    batch = SimpleNamespace(req_ids=["a", "b"])
    assert list(batch_order(SimpleNamespace(input_batch=batch))) == ["a", "b"]
    assert list(batch_order(SimpleNamespace(input_batch=batch, execute_model_state=("no batch in here",)))) == [
        "a",
        "b",
    ]
    second = SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=SimpleNamespace(req_ids=["c"])))
    assert list(batch_order(second)) == ["c"]


def test_where_rows_are_no_batch_it_says_why() -> None:
    plain = config()
    assert rows_are_not_the_batch(plain) is None
    plain.parallel_config.use_ubatching = True
    assert "--enable-dbo" in (rows_are_not_the_batch(plain) or "")
    fast = config()
    fast.cache_config.kv_sharing_fast_prefill = True
    assert "--kv-sharing-fast-prefill" in (rows_are_not_the_batch(fast) or "")


def test_of_a_model_with_eyes_the_language_part_is_counted() -> None:
    text = object()
    seeing = SimpleNamespace(get_language_model=lambda: text)
    assert language_model(SimpleNamespace(get_model=lambda: seeing)) is text
    assert language_model(SimpleNamespace(get_model=lambda: text)) is text


def test_a_compiled_graph_is_not_cached_unless_the_operator_decided() -> None:
    environ: dict[str, str] = {}
    keep_out_of_the_compile_cache(environ)
    assert environ == {"VLLM_DISABLE_COMPILE_CACHE": "1"}
    decided = {"VLLM_DISABLE_COMPILE_CACHE": "0"}
    keep_out_of_the_compile_cache(decided)
    assert decided == {"VLLM_DISABLE_COMPILE_CACHE": "0"}
