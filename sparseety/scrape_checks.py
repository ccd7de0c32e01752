"""Checks of the server behind, of its page of metrics, and of Prometheus."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from sparseety.asking import Answer, NoAnswer, ask
from sparseety.checks import Result, Subject, fail, ok, unknown, warn

# As Prometheus 2 asks, and as 3 does. With prometheus_client 0.23 and later, who does not say that it takes UTF-8 in
# names gets "vllm:x" as "vllm_x" (client_python issue 1177).
AS_PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
AS_PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5"
_WITH_COLON, _WITHOUT = re.compile(r"^vllm:\w", re.M), re.compile(r"^vllm_\w", re.M)

RELABEL = "the relabel rule of deploy/prometheus/prometheus.yml; docs/doctor.md#the-colon"


def look(subject: Subject) -> Iterator[Result]:
    """Ask the server behind who it is, for all other checks."""
    url, seconds = subject.upstream, subject.seconds
    try:
        health = ask(f"{url}/health", seconds=seconds, certificates=subject.upstream_ca)
    except NoAnswer as error:
        yield fail("upstream.reachable", f"{url}: {error}", "start vLLM, or name the one that runs: --upstream URL")
        return
    if health.status >= 500:
        yield fail(
            "upstream.reachable", f"{url}/health says {health.status}", "see vLLM's output; its engine may be dead"
        )
        return
    version = _json(subject, f"{url}/version").get("version")
    subject.upstream_version = version if isinstance(version, str) else None
    named = f"vLLM {version}" if subject.upstream_version else "it does not say which version of vLLM it is"
    models = [str(model.get("id")) for model in _objects(_json(subject, f"{url}/v1/models").get("data"))]
    serves = f", serves {', '.join(models[:5])}" if models else ""  # without: it may want a key
    yield ok("upstream.reachable", f"{url} answers: {named}{serves}")
    yield from _metrics(subject)


def _json(subject: Subject, url: str) -> dict[str, Any]:
    try:
        found = json.loads(ask(url, seconds=subject.seconds, certificates=subject.upstream_ca).text)
    except (NoAnswer, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _objects(found: object) -> list[dict[str, Any]]:
    """Those of a list, where it is one: not every server is vLLM."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _metrics(subject: Subject) -> Iterator[Result]:
    name, url = "upstream.metrics", f"{subject.upstream}/metrics"
    try:
        as_2, as_3 = (
            ask(url, seconds=subject.seconds, certificates=subject.upstream_ca, accept=accept)
            for accept in (AS_PROMETHEUS_2, AS_PROMETHEUS_3)
        )
    except NoAnswer as error:
        yield fail(name, f"{url}: {error}", "see vLLM's output")
        return
    if as_3.status != 200:
        fix = "is it vLLM? --disable-log-stats takes its metrics away; a server of another kind has others"
        yield warn(name, f"{url} says {as_3.status}: nothing of the engine in Prometheus", fix)
        return
    subject.upstream_metrics = as_3.text
    yield _spelling(name, url, as_2, as_3)


def _spelling(name: str, url: str, as_2: Answer, as_3: Answer) -> Result:
    if not _WITH_COLON.search(as_3.text) and not _WITHOUT.search(as_3.text):
        fix = "is it vLLM? With --disable-log-stats it publishes none"
        return warn(name, f"{url} has no metric of vLLM's, in either spelling (vllm:…, vllm_…)", fix)
    if not _WITH_COLON.search(as_3.text):
        return warn(name, f"metrics at {url} arrive as vllm_… only, without the colon", RELABEL)
    if not _WITH_COLON.search(as_2.text):
        text = f"metrics at {url} arrive as vllm_… where a Prometheus 2 asks, as vllm:… where a Prometheus 3 does"
        return warn(name, text, f"with Prometheus 2: {RELABEL}")
    return ok(name, f"{url} has vLLM's metrics, spelled vllm:… for Prometheus 2 and 3")


# ------------------------------------------------------------------------------------------------- Prometheus

_JOBS = {"sparseety-proxy": "the proxy", "vllm": "vLLM", "sparseety-verifier": "the verifier"}


def prometheus(subject: Subject) -> Iterator[Result]:
    """Nothing, where none was named."""
    if subject.prometheus is None:
        return
    name, url = "prometheus.reachable", subject.prometheus.rstrip("/")
    try:
        ready = ask(f"{url}/-/ready", seconds=subject.seconds)
        targets = _api(subject, f"{url}/api/v1/targets?state=active")
    except (NoAnswer, ValueError) as error:
        yield fail(name, f"{url}: {error}", "start it, or name the one that runs: --prometheus URL")
        return
    if ready.status != 200:
        yield fail(name, f"{url} is not ready: {ready.status}", "see its output")
        return
    yield ok(name, f"{url} is ready")
    yield from _targets(_objects(targets.get("activeTargets")))
    yield from _names(subject, url)


def _targets(targets: list[dict[str, Any]]) -> Iterator[Result]:
    name = "prometheus.targets"
    for job, what in _JOBS.items():
        ours = [target for target in targets if target.get("labels", {}).get("job") == job]
        if not ours:
            fix = "deploy/prometheus/prometheus.yml has it; the rules and dashboards go by the names of the jobs"
            yield warn(name, f'Prometheus scrapes no job "{job}": nothing is known of {what}', fix)
        for target in ours:
            place = target.get("scrapeUrl")
            match target.get("health"):
                case "up":
                    yield ok(name, f"Prometheus scrapes {what} at {place}")
                case "down":
                    fix = "of the proxy, 401 is a token that is missing (credentials_file) or another one"
                    yield fail(name, f"Prometheus cannot scrape {what} at {place}: {target.get('lastError')}", fix)
                case _:
                    yield unknown(name, f"Prometheus has not scraped {what} at {place} yet", "try again in a minute")


def _names(subject: Subject, url: str) -> Iterator[Result]:
    """How vLLM's metrics are called in there."""
    try:
        lost, kept = (
            _api(subject, f"{url}/api/v1/query?" + urlencode({"query": f'count({{__name__=~"{pattern}.+"}})'}))
            for pattern in ("vllm_", "vllm:")
        )
    except (NoAnswer, ValueError) as error:
        yield unknown("prometheus.names", f"{url} does not say what it has: {error}")
        return
    if lost.get("result"):
        yield fail(
            "prometheus.names", "Prometheus has vllm_… in it: no panel or rule will find that", f"give it {RELABEL}"
        )
    elif kept.get("result"):
        yield ok("prometheus.names", "Prometheus has vLLM's metrics, spelled vllm:…")


def _api(subject: Subject, url: str) -> dict[str, Any]:
    """Raises NoAnswer, and ValueError where it is not Prometheus that answers."""
    answer = json.loads(ask(url, seconds=subject.seconds).text)
    if not isinstance(answer, dict) or not isinstance(data := answer.get("data"), dict):
        raise ValueError("it does not answer as Prometheus does")
    return data
