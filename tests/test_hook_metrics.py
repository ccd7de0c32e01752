"""The plugin's numbers, as a scrape of vLLM's own /metrics would show them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sampler_hook import catalogue, metrics
from sparseety.metrics import Metric, most_series
from tests.hook_fakes import FAKE_VLLM, config, fake_vllm
from tests.logbook import until
from tests.test_hook_register import ROOT, SERVE

ON = {"metrics": True}


def scrape(folder: Path) -> dict[str, dict[str, float]]:
    """name -> labels as text -> value, from a folder of files that processes wrote."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return parse(generate_latest(registry).decode())


def families_in(folder: Path) -> dict[str, Any]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def parse(text: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.delenv(metrics.VLLMS_FOLDER, raising=False)
    monkeypatch.setenv(metrics.OUR_FOLDER, str(folder))
    return folder


def test_what_an_engine_did_is_published(tmp_path: Path, folder: Path) -> None:
    with fake_vllm(tmp_path / "logs", settings=ON) as engine:
        request = engine.add(prompt=list(range(100, 110)), max_tokens=5)
        request.num_cached_tokens = 4
        engine.step([20])
        request.spec_token_ids = [21, 99]
        engine.step([21, 22])
        engine.scheduler.preempt(request.request_id)
        engine.step([23])
        engine.step([24])
        engine.look_around()
        found = scrape(folder)
    both = "engine=0,model_name=m"
    assert found["sparseety_prompt_tokens_by_status_total"] == {
        f"{both},status=computed": 6,
        f"{both},status=reused_local": 4,
        f"{both},status=reused_external": 0,
    }
    assert found["sparseety_draft_tokens_total"] == {f"{both},outcome=accepted": 1, f"{both},outcome=rejected": 1}
    assert found["sparseety_kv_evicted_tokens_total"] == {f"{both},reason=preemption": 12}
    assert found["sparseety_draft_accepted_length_bucket"]["engine=0,le=0.0,model_name=m"] == 0
    assert found["sparseety_draft_accepted_length_bucket"]["engine=0,le=1.0,model_name=m"] == 1
    assert found["sparseety_draft_accepted_length_count"] == {both: 1}
    assert found["sparseety_plugin_step_overhead_seconds_count"] == {"engine=0": 4}
    assert found["sparseety_capture_records_total"]["kind=step,source=plugin"] == 4
    assert found["sparseety_capture_sampled_requests_total"]["decision=captured,source=plugin"] == 1
    assert found["sparseety_plugin_hooks"]["engine=0,site=Scheduler.update_from_output,state=fired"] == 1
    assert found["sparseety_capture_sampling_ratio"] == {"source=plugin": 1}
    assert found["sparseety_plugin_last_event_timestamp_seconds"]["engine=0"] > 1e9


def test_the_scrape_has_every_metric_of_the_engine_before_anything_happens_and_no_other(
    tmp_path: Path, folder: Path
) -> None:
    """Else its first event would be missed by increase(). Only what the model does not have is left out."""
    with fake_vllm(tmp_path / "logs", settings=ON) as engine:
        until_written(engine)
        engine.look_around()
        families = families_in(folder)
    expected = {metric.name: metric for metric in (*catalogue.ENGINES, *catalogue.WRITERS)}
    attention = {catalogue.CONTEXT.name, catalogue.ATTENDED.name}
    assert families.keys() == expected.keys() - attention
    for name, family in families.items():
        check_against(expected[name], family)


def test_what_attention_reads_is_there_at_0_where_the_model_says_how_it_reads(tmp_path: Path, folder: Path) -> None:
    model = config(hf_text_config=SimpleNamespace(num_hidden_layers=4, sliding_window=8))
    with fake_vllm(tmp_path / "logs", model, settings=ON) as engine:
        engine.look_around()
        before = scrape(folder)["sparseety_attention_attended_tokens_total"]
    assert before == {"engine=0,layer_type=sliding,model_name=m": 0}


def until_written(engine: Any) -> None:
    """The writer has given its first lines to the disk, and looked how much is free."""
    until(lambda: engine.hook._journals[0].writer.done.disk_free is not None)


def check_against(metric: Metric, family: Any) -> None:
    """A family of a scrape is what the definition says: kind, help, names and values of labels, bounds."""
    assert (family.type, family.documentation) == (metric.kind, metric.text)
    assert metric.text.startswith("ALPHA ")
    names = {label.name for label in metric.labels}
    for sample in family.samples:
        assert sample.labels.keys() - {"le"} == names, sample
        for label in metric.labels:
            assert not label.values or sample.labels[label.name] in label.values, sample
    bounds = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
    assert bounds == ({*map(str, map(float, metric.bounds)), "+Inf"} if metric.bounds else set())


def test_counters_go_on_where_capture_was_switched_off_and_on(tmp_path: Path, folder: Path) -> None:
    control = tmp_path / "control.json"
    with fake_vllm(tmp_path / "logs", settings=ON | {"control": control}) as engine:
        for on, token in (("true", 20), ("false", 21), ("true", 22)):
            control.write_text(f'{{"on": {on}}}')
            engine.look_around()
            request = engine.add(f"chatcmpl-{token}", max_tokens=1)
            engine.step([token])
            assert request.is_finished()
            engine.look_around()
            paused = scrape(folder)["sparseety_capture_paused"]
            assert paused["reason=operator,source=plugin"] == (on == "false")
        found = scrape(folder)
    assert found["sparseety_capture_sampled_requests_total"]["decision=captured,source=plugin"] == 2
    assert found["sparseety_prompt_tokens_by_status_total"]["engine=0,model_name=m,status=computed"] == 6
    assert found["sparseety_capture_records_total"]["kind=engine_start,source=plugin"] == 2
    assert found["sparseety_capture_segments_total"]["event=opened,source=plugin"] == 2


def test_a_fault_shows(tmp_path: Path, folder: Path) -> None:
    with fake_vllm(tmp_path / "logs", settings=ON) as engine:
        engine.add(lacking="stop")
        engine.look_around()
        found = scrape(folder)
    assert found["sparseety_plugin_errors_total"]["engine=0,site=tokens"] == 1
    assert found["sparseety_capture_paused"]["reason=errors,source=plugin"] == 1
    assert found["sparseety_plugin_hooks"]["engine=0,site=Scheduler.add_request,state=attached"] == 0
    assert found["sparseety_plugin_hooks"]["engine=0,site=Scheduler.add_request,state=expected"] == 1


def test_labels_come_from_closed_sets(tmp_path: Path, folder: Path) -> None:
    with fake_vllm(tmp_path / "logs", settings=ON) as engine:
        for number in range(50):
            engine.add(f"chatcmpl-{number}", max_tokens=1)
        engine.step(*([20 + number] for number in range(50)))
        engine.look_around()
        found = scrape(folder)
    assert "chatcmpl" not in str(found)
    assert sum(map(len, found.values())) <= most_series((*catalogue.ENGINES, *catalogue.WRITERS))


SCRAPE = """
import os, sys
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

def expose():  # as vLLM's API servers do: of their own registry, or of the files in a folder
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry).decode()

def work():
    scheduler = serve(end=False)
    import time
    time.sleep(1.5)  # the attendant looks around once a second

import multiprocessing
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
print(expose())
"""


@pytest.mark.parametrize("servers", ["one", "several"])
def test_an_api_server_publishes_what_its_engine_counts(tmp_path: Path, servers: str) -> None:
    environ: dict[str, Any] = {name: value for name, value in os.environ.items() if "PROMETHEUS" not in name}
    environ |= {"PYTHONPATH": f"{FAKE_VLLM}{os.pathsep}{ROOT}", "SPARSEETY_HOOK_DIR": str(tmp_path / "logs")}
    environ["TMPDIR"] = str(tmp_path)
    if servers == "several":
        environ["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SERVE + SCRAPE], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = parse(done.stdout.partition("\n")[2])
    assert found["sparseety_capture_records_total"]["kind=step,source=plugin"] == 1
    assert not list(tmp_path.glob("sparseety-metrics-*"))  # a folder of ours goes with the server


def test_with_metrics_off_nothing_is_published(tmp_path: Path, folder: Path) -> None:
    with fake_vllm(tmp_path / "logs") as engine:
        engine.look_around()
    assert list(folder.iterdir()) == []
