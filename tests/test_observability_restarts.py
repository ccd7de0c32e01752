"""Proxy, model server and verifier are killed and started again in turn, under traffic, before a real Prometheus with
the shipped rules. Time runs 60 times faster in a copy of them: every `for`, window and age is divided by that."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests import programs
from tests.programs import Program, Traffic
from tests.prometheus_server import Prometheus, free_port, prometheus, until

pytestmark = pytest.mark.observability

PAGES = {"SparSEEtyNoProxy", "SparSEEtyNoUpstream", "SparSEEtyUpstreamErrors", "SparSEEtyVerifyFailures"}


@dataclass
class Deployment:
    parts: dict[str, Program]
    prometheus: Prometheus
    traffic: Traffic

    def fires(self, alert: str) -> None:
        until(lambda: alert in self.prometheus.firing(), 60, self.prometheus.firing)

    def calms(self) -> None:
        """Within the time that rates need to forget."""
        until(lambda: not self.prometheus.firing(), 60, self.prometheus.firing)

    def up(self, job: str) -> float | None:
        """What the page Capture health shows of it."""
        return self.prometheus.number(f'min by (job) (up{{job="{job}"}})')


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    upstream, listen, admin, metrics = (free_port() for _ in range(4))
    parts = {
        "backend": programs.backend(folder, upstream),
        "proxy": programs.proxy(folder, listen, admin, upstream),
        "verifier": programs.watch(folder, metrics, "--tokenizer", str(programs.TOKENIZER)),
    }
    targets = {"sparseety-proxy": [f"127.0.0.1:{admin}"], "sparseety-verifier": [f"127.0.0.1:{metrics}"]}
    try:
        for part in parts.values():
            part.start()
        with (
            prometheus(folder / "prometheus", targets, faster=60) as server,
            Traffic(listen, "SmolLM2-135M-Instruct").running() as traffic,
        ):
            judged = 'sum(sparseety_verify_requests_total{verdict="pass"})'
            until(lambda: (server.number(judged) or 0) > 5, 60)
            yield Deployment(parts, server, traffic)
    finally:
        for part in parts.values():
            part.end(signal.SIGKILL)


def test_in_plain_operation_nothing_fires(deployment: Deployment) -> None:
    assert deployment.prometheus.fired(60) == set()


@pytest.mark.parametrize("name", ["proxy", "verifier", "backend"])
def test_a_quick_restart_wakes_nobody(name: str, deployment: Deployment) -> None:
    """Some two seconds, which are two minutes here: as long as what pages may be so."""
    before = deployment.traffic.sent
    deployment.parts[name].end()
    deployment.parts[name].start()
    until(lambda: deployment.traffic.sent > before + 20, 30)
    assert deployment.prometheus.fired(30) & PAGES == set()
    deployment.calms()


def test_a_killed_proxy_is_seen_and_told(deployment: Deployment) -> None:
    deployment.parts["proxy"].end(signal.SIGKILL)
    deployment.fires("SparSEEtyNoProxy")
    assert deployment.up("sparseety-proxy") == 0
    assert deployment.prometheus.ask("sparseety_upstream_up") == []  # not known any more, and not drawn as it was
    deployment.parts["proxy"].start()
    deployment.calms()
    assert deployment.up("sparseety-proxy") == 1
    assert deployment.prometheus.number("sparseety_upstream_up") == 1


def test_a_killed_server_is_seen_and_told(deployment: Deployment) -> None:
    deployment.parts["backend"].end(signal.SIGKILL)
    deployment.fires("SparSEEtyNoUpstream")
    deployment.fires("SparSEEtyUpstreamErrors")
    assert deployment.prometheus.number("sparseety_upstream_up") == 0
    assert deployment.up("sparseety-proxy") == 1
    deployment.parts["backend"].start()
    deployment.calms()
    assert deployment.prometheus.number("sparseety_upstream_up") == 1


def test_a_killed_verifier_is_seen_and_told(deployment: Deployment) -> None:
    deployment.parts["verifier"].end(signal.SIGKILL)
    deployment.fires("SparSEEtyVerifierDown")
    assert deployment.up("sparseety-verifier") == 0
    assert deployment.prometheus.firing() == {"SparSEEtyVerifierDown"}  # a warning: it wakes nobody
    deployment.parts["verifier"].start()
    deployment.calms()
    judged = 'sum(rate(sparseety_verify_requests_total{verdict="pass"}[5s]))'
    until(lambda: (deployment.prometheus.number(judged) or 0) > 0, 30)
