"""What an operator changes while vLLM runs, by one small file."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sampler_hook.control import ControlFile
from sampler_hook.settings import HookSettings
from sparseety.errors import SparseetyError
from sparseety.records import EngineEvent, Gap, LogClose, LogOpen, RequestAdded, Step
from sparseety.sampling import key_id
from tests.hook_fakes import Engine, fake_vllm, logs, records


def write(path: Path, **content: Any) -> None:
    whole = path.with_suffix(".new")  # the hook looks by itself too, and must not find half a file
    whole.write_text(json.dumps(content))
    whole.replace(path)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control.json"


@pytest.fixture
def engine(tmp_path: Path, control: Path) -> Iterator[Engine]:
    with fake_vllm(tmp_path / "logs", settings={"control": control, "sample_key": b"key"}) as engine:
        yield engine


def test_switched_off_vllm_has_its_own_methods_and_serves_on(engine: Engine, control: Path) -> None:
    request = engine.add()
    engine.step([20])
    write(control, on=False)
    engine.look_around()
    assert engine.unwrapped
    engine.step([21])
    assert request.output_token_ids == [20, 21]
    *_, gap, closed = records(engine.folder)
    assert isinstance(gap, Gap)
    assert (gap.reason, gap.requests) == ("switched off by the operator", [1])
    assert isinstance(closed, LogClose)


def test_switched_on_again_it_records_what_comes_from_then_on(engine: Engine, control: Path) -> None:
    before = engine.add("chatcmpl-before")
    engine.step([20])
    write(control, on=False)
    engine.look_around()
    engine.add("chatcmpl-while-off")
    engine.step([21], [30])
    write(control, on=True)
    engine.look_around()
    engine.add("chatcmpl-after")
    engine.step([22], [31], [40])
    engine.abort(before)
    assert not engine.unwrapped
    engine.scheduler.shutdown()
    first, second = logs(engine.folder)
    assert isinstance(first[-1], LogClose)
    assert [record.external_id for record in second if isinstance(record, RequestAdded)] == ["chatcmpl-after"]
    assert [row.ids for record in second if isinstance(record, Step) for row in record.rows] == [[40]]
    # A witness says what it was not obliged to see: requests under way then are excused, and no others.
    assert [(gap.reason, gap.count) for gap in second if isinstance(gap, Gap)] == [
        ("under way when recording began", 2)
    ]


def test_switched_off_before_vllm_starts_it_records_nothing_until_it_is_told_to(tmp_path: Path, control: Path) -> None:
    write(control, on=False)
    with fake_vllm(tmp_path / "logs", settings={"control": control}) as engine:
        engine.add("chatcmpl-a")
        engine.step([20])
        assert engine.unwrapped
        assert logs(engine.folder) == []
        control.unlink()  # without the file, what the environment says
        engine.look_around()
        engine.add("chatcmpl-b")
        engine.step([21], [30])
        assert [row.ids for row in engine.rows()] == [[30]]


def test_what_a_fault_switched_off_the_operator_can_switch_on(engine: Engine, control: Path) -> None:
    engine.add("chatcmpl-a", lacking="stop")
    engine.settle()
    assert engine.unwrapped
    for on in (False, True):
        write(control, on=on)
        engine.look_around()
    engine.add("chatcmpl-b")
    engine.step([20], [30])
    engine.scheduler.shutdown()
    assert [row.ids for record in logs(engine.folder)[-1] if isinstance(record, Step) for row in record.rows] == [[30]]


def test_kv_blocks_are_recorded_from_when_they_are_asked_for(engine: Engine, control: Path) -> None:
    engine.add()
    engine.step([20])
    write(control, capture=["kv"])
    engine.look_around()
    engine.step([21])
    engine.step([22])
    write(control, capture=[])
    engine.look_around()
    engine.step([23])
    kinds = [record.__struct_config__.tag for record in engine.log()]
    assert kinds.count("step") == 4
    assert kinds.count("kv") == 1
    (on, off) = [record for record in records(engine.folder) if isinstance(record, EngineEvent)]
    assert (on.kind, on.detail, off.detail) == ("control", "kv,tokens", "tokens")


def test_the_rate_in_force_stands_in_the_log_and_forced_requests_are_recorded_whatever_it_is(
    engine: Engine, control: Path
) -> None:
    write(control, sample=0.0, force=["wanted", "chatcmpl-too"])
    engine.look_around()
    for name in ("chatcmpl-unwanted", "chatcmpl-wanted", "chatcmpl-too"):
        engine.add(name)
    engine.step([20], [30], [40])
    assert [record.external_id for record in engine.added()] == ["chatcmpl-wanted", "chatcmpl-too"]
    assert [row.ids for row in engine.rows()] == [[30], [40]]
    (event,) = [record for record in engine.log() if isinstance(record, EngineEvent)]
    assert (event.kind, event.sample, event.sample_key) == ("control", 0.0, key_id(b"key"))
    assert not any(isinstance(record, Gap) for record in engine.log())


def test_a_rate_from_the_start_stands_in_the_scope(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, settings={"sample": 0.5, "sample_key": b"key"}) as engine:
        names = [f"chatcmpl-{n}" for n in range(200)]
        for name in names:
            engine.add(name)
        added = [record.external_id for record in engine.added()]
        assert 60 < len(added) < 140
        opening = engine.log()[0]
        assert isinstance(opening, LogOpen)
        assert opening.scope.sample == 0.5
        assert opening.scope.sample_key


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"sample": 2}', "$.sample"),
        ('{"sample": "all"}', "$.sample"),
        ('{"smaple": 1}', "smaple"),
        ('{"capture": ["everything"]}', "everything is not one of"),
        ('{"near_zero": -1}', "$.near_zero"),
        ("\xff", "alformed"),
    ],
)
def test_bad_content_is_said_once_in_one_line_and_changes_nothing(
    engine: Engine, control: Path, content: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(control, sample=0.25)
    engine.look_around()
    control.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        engine.look_around()
        engine.look_around()
    (line,) = caplog.messages
    assert line.startswith(f"sparseety: {control}: ")
    assert said in line
    assert line.endswith("; what held before holds on")
    assert "\n" not in line
    assert engine.hook._control.now.sample == 0.25


def test_a_control_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "control.json").mkdir()
    file = ControlFile(HookSettings(tmp_path, sample=0.5, control=tmp_path / "control.json"))
    with pytest.raises(SparseetyError, match="Is a directory"):
        file.changed()
    assert file.now.sample == 0.5
