"""A real Prometheus with the shipped configuration scrapes an exporter of every metric that is defined: each query of
each panel has an answer, so it asks for labels and values that exist. Wrong names alone: test_grafana_dashboards.py."""

from collections.abc import Iterator

import pytest

import proxy.catalogue
import sampler_hook.catalogue
import verifier.catalogue
from tests.prometheus_server import Prometheus, panel_queries, prometheus, until
from tests.synthetic_exporter import exporter
from tests.vllm_metrics import VLLM

pytestmark = pytest.mark.observability


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with (
        exporter(*proxy.catalogue.METRICS) as a_proxy,
        exporter(*sampler_hook.catalogue.METRICS, *VLLM) as vllm,
        exporter(*verifier.catalogue.METRICS) as a_verifier,
    ):
        targets = {"sparseety-proxy": [a_proxy], "vllm": [vllm], "sparseety-verifier": [a_verifier]}
        with prometheus(tmp_path_factory.mktemp("prometheus"), targets, faster=30) as running:
            until(lambda: (running.number("min(count_over_time(up[1m]))") or 0) >= 6, 40)
            yield running


# Time runs faster in the rules; "yesterday" is a moment ago here.
QUERIES = {
    title: [query.replace("offset 1d", "offset 2s") for query in asked] for title, asked in panel_queries("10s").items()
}


@pytest.mark.parametrize("title", QUERIES)
def test_each_query_of_a_panel_has_an_answer(title: str, server: Prometheus) -> None:
    for query in QUERIES[title]:
        # Who is not seen is 0 there; all are seen here.
        answers = server.ask(f"({query}) > 0" if query.endswith("or vector(0)") else query)
        assert answers, query


def test_each_rule_that_records_does(server: Prometheus) -> None:
    recorded = [rule["name"] for rule in server.rules() if rule["type"] == "recording"]
    assert recorded
    for name in recorded:
        assert server.ask(name), name


def test_no_rule_failed_to_be_evaluated(server: Prometheus) -> None:
    assert [rule["name"] for rule in server.rules() if rule.get("lastError")] == []
