"""The dashboards are what their tables say, ask only for what is published, and keep to one form."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import proxy.catalogue
import sampler_hook.catalogue
import verifier.catalogue
from deploy.grafana import generate
from deploy.grafana.panels import NEEDS
from tests.dashboard_lint import problems, sample_names
from tests.vllm_metrics import VLLM
from tests.vllm_server import vllm_environment

ROOT = Path(__file__).parent.parent
OURS = (*proxy.catalogue.METRICS, *sampler_hook.catalogue.METRICS, *verifier.catalogue.METRICS)
KNOWN = sample_names((*OURS, *VLLM))
RECORDED = {
    rule["record"]
    for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "record" in rule
}
FILES = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
UIDS = {path.stem for path in FILES}


def test_the_committed_dashboards_are_those_that_the_tables_make() -> None:
    assert {path.name: path.read_text() for path in FILES} == generate.files(), "python -m deploy.grafana.generate"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_there_is_and_keeps_to_the_form(path: Path) -> None:
    assert problems(json.loads(path.read_text()), KNOWN, RECORDED, UIDS) == []


def test_every_metric_of_ours_is_on_a_dashboard_but_for_those_that_others_there_say_already() -> None:
    shown = set(re.findall(r"sparseety_\w+", " ".join(path.read_text() for path in FILES)))
    shown |= {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert {metric.name for metric in OURS} - shown == {
        "sparseety_capture_records_written",  # records handed over, less those lost
        "sparseety_proxy_open_streams",  # requests in flight
        "sparseety_proxy_worker_restarts",  # workers that run
    }


def test_where_nobody_publishes_a_panel_says_who_would_have_to() -> None:
    for path in FILES:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                assert panel["fieldConfig"]["defaults"]["noValue"] in NEEDS.values()


def _first(dashboard: Any) -> Any:
    return next(panel for panel in dashboard["panels"] if panel["type"] != "row")


def _ask(query: str) -> Callable[[Any], None]:
    return lambda dashboard: _first(dashboard)["targets"][0].update(expr=query)


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no title": (lambda d: _first(d).update(title=""), "no title"),
    "no description": (lambda d: _first(d).update(description=""), "no description"),
    "no unit": (lambda d: _first(d)["fieldConfig"]["defaults"].update(unit=""), "no unit"),
    "no words without data": (lambda d: _first(d)["fieldConfig"]["defaults"].update(noValue=""), "no noValue"),
    "same id": (lambda d: _first(d).update(id=d["panels"][-1]["id"]), "two panels have the same id"),
    "overlap": (lambda d: _first(d)["gridPos"].update(h=20), "overlap"),
    "too wide": (lambda d: _first(d)["gridPos"].update(x=20), "too wide"),
    "fixed data source": (lambda d: _first(d)["targets"][0].update(datasource={"uid": "x"}), "data source"),
    "unknown metric": (_ask("sum(sparseety_nothing)"), "nobody publishes sparseety_nothing"),
    "unknown vLLM metric": (_ask("sum(vllm:nothing)"), "nobody publishes vllm:nothing"),
    "unknown rule": (_ask("model:sparseety_nothing:rate5m"), "no rule records"),
    "counter as it is": (_ask("sum(sparseety_proxy_requests_total{})"), "only grows"),
    "rate of a gauge": (_ask("rate(sparseety_upstream_up[$__rate_interval])"), "is a gauge"),
    "fixed window": (_ask("rate(sparseety_proxy_requests_total[7m])"), "is not $__rate_interval"),
    "unknown label": (_ask('sum(sparseety_upstream_up{engine="0"})'), "has no label engine"),
    "unknown value": (_ask('sum(rate(sparseety_proxy_requests_total{outcome="ok"}[5m]))'), "outcome is never ok"),
    "unknown group": (_ask("sum by (layer) (sparseety_upstream_up)"), "no metric of this query has the label layer"),
    "unknown variable": (_ask('sum(sparseety_upstream_up{upstream=~"$nothing"})'), "$nothing is not defined"),
    "link to nowhere": (
        lambda d: _first(d)["fieldConfig"]["defaults"].update(links=[{"url": "/d/nowhere?x"}]),
        "a link to nowhere",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_dashboard_is_found_out(fault: str) -> None:
    change, message = FAULTS[fault]
    dashboard = copy.deepcopy(json.loads(FILES[0].read_text()))
    change(dashboard)
    found = problems(dashboard, KNOWN, RECORDED, UIDS)
    assert any(message in problem for problem in found), found


def test_the_provisioned_data_source_scrapes_as_often_as_prometheus_does() -> None:
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert source["datasources"][0]["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get("SPARSEETY_TEST_VLLM"), reason="SPARSEETY_TEST_VLLM is not set")
def test_the_installed_vllm_has_the_metrics_that_are_asked_for() -> None:
    (package,) = vllm_environment().glob("lib/python3*/site-packages/vllm")
    source = "".join((package / part).read_text() for part in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"))
    for metric in VLLM:
        assert f'"{metric.name}"' in source, metric.name
