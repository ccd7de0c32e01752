"""What stands in the engine's log after a scheduler has worked, on a stand-in that treats ids as vLLM does."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparseety.records import EngineStart, Gap, LogClose, LogOpen, RequestAdded, RequestFinished, Row, Step
from tests.hook_fakes import Engine, config, fake_vllm, records


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with fake_vllm(tmp_path / "logs") as engine:
        yield engine


def test_a_log_tells_a_request_from_its_first_token_to_its_last(engine: Engine) -> None:
    engine.add(max_tokens=3)
    for token in (20, 21, 22):
        engine.step([token])
    kinds = [type(record) for record in engine.log()]
    assert kinds == [LogOpen, EngineStart, RequestAdded, Step, Step, Step, RequestFinished, LogClose]
    assert [(row.first_index, row.ids) for row in engine.rows()] == [(0, [20]), (1, [21]), (2, [22])]
    (finished,) = engine.finished()
    assert (finished.total_ids, finished.finish_reason, finished.stop_reason) == (3, "length", None)


def test_requests_of_one_step_keep_their_own_ids(engine: Engine) -> None:
    engine.add("chatcmpl-a")
    engine.add("chatcmpl-b")
    engine.step([20], [30])
    engine.step([21], [31])
    assert [record.external_id for record in engine.added()] == ["chatcmpl-a", "chatcmpl-b"]
    assert [(row.request, row.ids) for row in engine.rows()] == [(1, [20]), (2, [30]), (1, [21]), (2, [31])]


def test_ids_sampled_past_a_stop_are_no_text(engine: Engine) -> None:
    request = engine.add(max_tokens=3)
    engine.step([20])
    request.spec_token_ids = [21, 22, 23, 24]
    assert engine.step([21, 22, 23, 24, 25]) == [(request.request_id, [21, 22])]
    last = engine.rows()[-1]
    assert (last.ids, last.discarded, last.drafts, last.accepted) == ([21, 22], [23, 24, 25], 4, 4)
    assert engine.finished()[0].total_ids == 3


def test_rejected_drafts_are_counted_and_not_written_as_ids(engine: Engine) -> None:
    request = engine.add()
    engine.step([20])
    request.spec_token_ids = [21, 99, 98]
    engine.step([21, 22])
    row = engine.rows()[-1]
    assert (row.ids, row.discarded, row.drafts, row.accepted) == ([21, 22], [], 3, 1)


def test_drafts_that_a_grammar_ruled_out_were_not_proposed(engine: Engine) -> None:
    request = engine.add()
    engine.step([20])
    request.spec_token_ids = [21, -1, -1]
    scheduled = engine.schedule()
    scheduled.num_invalid_spec_tokens = {request.request_id: 2}
    engine.take(scheduled, [21, 22])
    assert (engine.rows()[-1].drafts, engine.rows()[-1].accepted) == (1, 1)


def test_what_was_on_its_way_when_the_client_left_is_written_as_discarded(engine: Engine) -> None:
    request = engine.add()
    engine.step([20])
    scheduled = engine.schedule()
    engine.abort(request)
    assert engine.take(scheduled, [21]) == {}
    *_, finished, late, _ = engine.log()
    assert isinstance(finished, RequestFinished)
    assert (finished.total_ids, finished.finish_reason) == (1, "abort")
    assert isinstance(late, Step)
    assert [(row.request, row.first_index, row.ids, row.discarded) for row in late.rows] == [(1, 1, [], [21])]


def test_a_stop_of_one_request_does_not_end_another(engine: Engine) -> None:
    first, second = engine.add("chatcmpl-a"), engine.add("chatcmpl-b")
    engine.step([20], [30])
    engine.abort(first)
    engine.step([31])
    assert [(record.request, record.finish_reason) for record in engine.finished()] == [(1, "abort")]
    assert second.output_token_ids == [30, 31] == [id_ for row in engine.rows() if row.request == 2 for id_ in row.ids]


def test_ending_all_requests_at_once_ends_each_in_the_log(engine: Engine) -> None:
    engine.add("chatcmpl-a")
    engine.add("chatcmpl-b")
    engine.scheduler.finish_requests(None, finished_status=6)
    assert {record.request for record in engine.finished()} == {1, 2}


@pytest.mark.parametrize("drop", [False, True])
def test_output_in_flight_at_a_preemption_is_text_only_if_the_scheduler_takes_it(engine: Engine, drop: bool) -> None:
    request = engine.add()
    engine.step([20])
    in_flight = engine.schedule()
    engine.scheduler.preempt(request.request_id, drop_stale_output=drop)
    engine.take(in_flight, [21])
    engine.step([22])
    ids = [(row.first_index, row.ids, row.discarded) for row in engine.rows()]
    assert ids[1:] == ([(1, [], [21]), (1, [22], [])] if drop else [(1, [21], []), (2, [22], [])])
    engine.abort(request)
    assert [id_ for row in engine.rows() for id_ in row.ids] == request.output_token_ids


def test_a_preempted_request_says_where_it_started_again(engine: Engine) -> None:
    request = engine.add(prompt=[1, 10, 11, 12])
    engine.step([20])
    engine.step([21])
    engine.scheduler.preempt(request.request_id)
    engine.step([22])
    engine.abort(request)
    # Where nothing stands, it is prompt_len + first_index - 1.
    assert [(row.phase, row.start) for row in engine.rows()] == [("prefill", 0), ("decode", None), ("recomputed", 0)]
    assert engine.finished()[0].preemptions == 1


def test_a_position_that_vllm_only_guesses_is_the_one_that_it_turns_out_to_be(engine: Engine) -> None:
    """Under async scheduling the next step is planned before it is known how many drafts were rejected."""
    request = engine.add(max_tokens=9)
    engine.step([20])
    request.spec_token_ids = [21, 99, 98]
    rejecting, ahead = engine.schedule(), engine.schedule()
    assert ahead.scheduled_cached_reqs.num_computed_tokens == [7]  # as if the drafts were accepted
    engine.take(rejecting, [21, 22])
    engine.take(ahead, [23])
    engine.step([24])
    engine.abort(request)
    assert [(row.first_index, row.start) for row in engine.rows()] == [(0, 0), (1, None), (3, None), (4, None)]
    assert engine.finished()[0].recomputed == 0


def test_a_prompt_computed_in_parts_has_no_row_before_its_first_token(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, max_tokens_per_step=4) as engine:
        engine.add(prompt=list(range(10)))
        engine.step([])
        engine.step([])
        engine.step([20])
        assert engine.rows() == [Row(request=1, first_index=0, ids=[20], start=8, phase="prefill")]
        assert [record.step for record in engine.log() if isinstance(record, Step)] == [2]


def test_prompt_tokens_from_the_cache_are_counted(engine: Engine) -> None:
    request = engine.add(max_tokens=2)
    request.num_cached_tokens, request.num_external_tokens = 2, 1
    engine.step([20])
    engine.step([21])
    (finished,) = engine.finished()
    assert (finished.cached_tokens, finished.external_tokens, finished.computed) == (2, 1, 1)


def test_cached_tokens_of_a_request_without_output_are_not_known(engine: Engine) -> None:
    engine.abort(engine.add())
    assert engine.finished()[0].cached_tokens is None


@pytest.mark.parametrize(
    ("external_id", "engine_id", "written"),
    [
        ("chatcmpl-x", "chatcmpl-x-0a1b2c3d", ("chatcmpl-x", 0)),
        ("chatcmpl-x", "1_chatcmpl-x-0a1b2c3d", ("chatcmpl-x", 1)),
        ("cmpl-x-3", "12_cmpl-x-3-0a1b2c3d", ("cmpl-x-3", 12)),
        ("1_1", "1_1-0a1b2c3d", ("1_1", 0)),  # a client's own id that looks like a child's
        ("1_1", "1_1_1-0a1b2c3d", ("1_1", 1)),
        ("chatcmpl-", "chatcmpl--0a1b2c3d", ("chatcmpl-", 0)),  # an empty X-Request-Id
        ("chatcmpl-x", "2_chatcmpl-x", ("chatcmpl-x", 2)),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        (None, "2_chatcmpl-x", ("chatcmpl-x", 2)),  # a vLLM that does not say the external id
        (None, "cmpl-x-0", ("cmpl-x-0", 0)),
        (None, "7_of_9", ("7_of_9", 0)),
    ],
)
def test_a_request_is_written_under_the_id_that_the_reply_has(
    engine: Engine, external_id: str | None, engine_id: str, written: tuple[str, int]
) -> None:
    engine.add(external_id, engine_id)
    (added,) = engine.added()
    assert (added.external_id, added.child, added.engine_id) == (*written, engine_id)


def test_what_decides_the_text_is_written(engine: Engine) -> None:
    engine.add(
        prompt=list(range(100, 140)),
        stop=["\n\n", "END"],
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        detokenize=False,
        max_tokens=9,
        min_tokens=4,
    )
    (added,) = engine.added()
    assert (added.prompt_len, added.prompt_tail) == (40, list(range(124, 140)))
    assert (added.stop, added.stop_token_ids, added.eos_ids) == (["\n\n", "END"], [7], [2])
    assert added.include_stop_str_in_output
    assert {added.skip_special_tokens, added.spaces_between_special_tokens, added.detokenize} == {False}
    assert (added.max_tokens, added.min_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("params", "eos_ids", "stop_token_ids"),
    [
        # vLLM has merged the generation config's ids into the user's before the engine sees them.
        ({"eos_token_id": 2, "stop_token_ids": [5, 7]}, [2, 5], [7]),
        ({"eos_token_id": None, "ignore_eos": True, "stop_token_ids": [5, 7]}, [], [5, 7]),
        ({"eos_token_id": None, "stop_token_ids": [7]}, [], [7]),
    ],
)
def test_end_ids_of_the_model_are_told_from_the_users_stop_ids(
    tmp_path: Path, params: dict[str, Any], eos_ids: list[int], stop_token_ids: list[int]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    with fake_vllm(tmp_path / "logs", config(str(model))) as engine:
        engine.add(**params)
        (added,) = engine.added()
        assert (added.eos_ids, added.stop_token_ids) == (eos_ids, stop_token_ids)


def test_a_stop_id_is_the_reason_that_the_engine_gives(engine: Engine) -> None:
    engine.add(stop_token_ids=[7])
    engine.step([7])
    assert (engine.finished()[0].finish_reason, engine.finished()[0].stop_reason) == ("stop", 7)


def test_ids_in_arrays_are_written_as_numbers(engine: Engine) -> None:
    class Array(list[int]):
        """As a runner's array: its items are not Python's integers, tolist's are."""

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("items of an array cannot be written as JSON")

        def tolist(self) -> list[int]:
            return [*self]

    engine.add()
    engine.step(Array([20]))
    assert [row.ids for row in engine.rows()] == [[20]]


def test_the_tokens_of_a_step_come_before_the_failure_of_their_request(engine: Engine) -> None:
    request = engine.add()
    engine.scheduler.failing_requests.add(request.request_id)
    engine.step([20])
    *_, step, finished, _ = engine.log()
    assert isinstance(step, Step)
    assert step.rows[0].ids == [20]
    assert isinstance(finished, RequestFinished)
    assert (finished.total_ids, finished.finish_reason) == (1, "error")


def test_a_session_stays_one_request_over_its_turns(engine: Engine) -> None:
    request = engine.add(resumable=True, max_tokens=2)
    engine.step([20])
    engine.step([21])
    engine.scheduler.add_request(request)
    engine.step([22])
    engine.abort(request)
    assert len(engine.added()) == 1
    assert [(record.request, record.total_ids) for record in engine.finished()] == [(1, 3)]


def test_pooling_requests_have_no_tokens_and_are_not_written(engine: Engine) -> None:
    engine.add(pooling=True)
    assert engine.added() == []


def test_where_vllm_itself_fails_the_log_names_the_requests_and_the_error_goes_on(engine: Engine) -> None:
    class Broken(list[int]):
        def __iter__(self) -> Any:
            raise ZeroDivisionError

        def tolist(self) -> list[int]:
            return [20]

    engine.add("chatcmpl-a")
    engine.add("chatcmpl-b")
    with pytest.raises(ZeroDivisionError):
        engine.step([], Broken([20]))
    (gap,) = [record for record in engine.log() if isinstance(record, Gap)]
    assert (gap.requests, gap.reason) == ([2], "the scheduler failed on a step: ZeroDivisionError")


def test_a_fault_of_ours_ends_the_capture_and_nothing_else(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    request = engine.add("chatcmpl-a")
    engine.step([20])
    with caplog.at_level(logging.INFO):
        unusual = engine.add("chatcmpl-b", lacking="stop")  # as in some vLLM that nobody has seen yet
        replies = [engine.step([21], [30])]
        engine.settle()
        replies.append(engine.step([22], [31]))
    assert replies == [
        [(request.request_id, [21]), (unusual.request_id, [30])],
        [(request.request_id, [22]), (unusual.request_id, [31])],
    ]
    assert len(caplog.records) == 1
    assert "switched itself off; vLLM serves on, uncaptured" in caplog.text
    assert engine.unwrapped
    gap, closed = wait_for_the_end(engine.folder)[-2:]
    assert isinstance(gap, Gap)
    assert (gap.reason, gap.requests, gap.captures) == ("capture switched itself off: AttributeError", [], [])
    assert isinstance(closed, LogClose)


def test_a_fault_while_a_step_is_taken_leaves_the_step_to_vllm(engine: Engine) -> None:
    request = engine.add()
    scheduled = engine.schedule()
    del scheduled.scheduled_new_reqs
    engine.take(scheduled, [20])
    engine.settle()
    engine.step([21])
    assert request.output_token_ids == [20, 21]
    assert engine.unwrapped
    assert isinstance(wait_for_the_end(engine.folder)[-2], Gap)


def test_a_fault_at_the_start_leaves_vllm_without_us(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = config()
    del broken.model_config.tokenizer
    with fake_vllm(tmp_path, broken) as engine:
        request = engine.add()
        engine.step([20])
        assert request.output_token_ids == [20]
        assert engine.unwrapped
        assert len(caplog.records) == 1
        assert [type(record) for record in wait_for_the_end(tmp_path)] == [LogOpen, Gap, LogClose]


def test_a_folder_that_cannot_be_written_leaves_vllm_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with fake_vllm(tmp_path / "file" / "logs") as engine:
        request = engine.add()
        engine.step([20])
        assert request.output_token_ids == [20]
        assert engine.unwrapped
    (line,) = caplog.messages
    assert line.startswith(f"sparseety: cannot write logs in {tmp_path}/file/logs/: ")
    assert line.endswith("; vLLM serves, nothing is captured")


def test_a_wrapper_that_someone_put_over_ours_is_left_alone(engine: Engine) -> None:
    scheduler_class = type(engine.scheduler)
    ours = scheduler_class.add_request
    calls = []

    def theirs(scheduler: Any, request: Any) -> None:
        calls.append(request)
        ours(scheduler, request)

    scheduler_class.add_request = theirs
    engine.hook.detach()
    assert scheduler_class.add_request is theirs
    assert engine.add() in calls
    assert engine.added() == []


def test_a_scheduler_of_another_class_is_followed_where_it_calls_vllms_methods(engine: Engine) -> None:
    class Mine(type(engine.scheduler)):  # type: ignore[misc]
        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            return super().update_from_output(*args, **kwargs)

    engine.hook.close()
    for path in engine.folder.iterdir():
        path.unlink()
    engine.scheduler = Mine(config())
    engine.add()
    engine.step([20])
    assert [row.ids for row in engine.rows()] == [[20]]


def test_nothing_is_written_after_the_shutdown(engine: Engine) -> None:
    engine.add()
    engine.scheduler.shutdown()
    engine.step([20])
    assert engine.scheduler.stopped
    assert [type(record) for record in engine.log()][-1] is LogClose
    assert engine.rows() == []


def test_the_log_is_closed_before_the_engine_sees_to_its_workers(engine: Engine) -> None:
    """vLLM kills an engine that is not gone at once, and the workers take their time."""
    engine.core.end_workers = lambda: seen.append(records(engine.folder)[-1])
    seen: list[Any] = []
    engine.add()
    engine.core.shutdown()
    assert [type(record) for record in seen] == [LogClose]
    assert engine.scheduler.stopped


def test_the_start_says_which_engine_it_is(tmp_path: Path) -> None:
    vllm_config = config(served_model_name=["m", "alias"])
    vllm_config.parallel_config.data_parallel_index = 3
    vllm_config.structured_outputs_config.reasoning_parser = "qwen3"
    with fake_vllm(tmp_path, vllm_config) as engine:
        start = engine.log()[1]
        assert isinstance(start, EngineStart)
        assert (start.vllm, start.model, start.served_names) == ("0.32.0", "a/model", ["m", "alias"])
        assert (start.tokenizer.name, start.tokenizer.vocab_size, start.max_model_len) == ("a/model", 49152, 2048)
        assert (start.reasoning_parser, start.data_parallel_rank) == ("qwen3", 3)
        assert start.hooks_attached == start.hooks_expected
        assert (start.dtype, start.batch_invariant) == ("bfloat16", False)


def wait_for_the_end(folder: Path) -> list[Any]:
    """The records of a log that is being closed by a thread of its own."""
    import threading

    for thread in threading.enumerate():
        if thread.name == "sparseety-log-closing":
            thread.join(10)
    return list(records(folder))
