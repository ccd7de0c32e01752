"""A real Prometheus with the shipped configuration scrapes a real proxy, a real vLLM with the plugin and a verifier on
watch, under traffic: each query of each panel has an answer, and the counters are the traffic sent, to the unit."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import proxy.catalogue
from tests import programs
from tests.in_thread import served
from tests.prometheus_binaries import binary
from tests.prometheus_server import Prometheus, free_port, panel_queries, prometheus, until
from tests.tiny_models import LAYERS
from tests.traffic import USAGE, Ask, Got, chat, completion, send_all
from tests.vllm_server import DRAFTS, serve, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.observability]

WIDTH, TOP_K = 256, 2  # of the tiny model: what goes into a down projection, and the experts of a token

# Panels that may be empty, and why.
BY_CHANCE = {
    "sparseety-capture: Disk full in",  # a disk that does not fill is never full
    "sparseety-verification: Findings of the run",  # of so few requests
}
NO_DRAFTS = {  # without speculative decoding, vLLM has no such metrics, and a mean of nothing is no number
    "sparseety-overview: Drafts accepted",
    "sparseety-sparsity: Accepted by position",
    "sparseety-sparsity: Tokens of a step",
}


NO_RUN = {  # of stability
    f"sparseety-verification: {title}"
    for title in (
        *("Gates of the last run", "Differences that no tie explains", "Outputs that are equal throughout"),
        *("First difference (token)", "Outputs to one prompt", "Requests of the run", "Age of the run"),
    )
}
WINDOW = {  # how experts are used is said of a minute
    "sparseety-overview: Least even layer of experts",
    "sparseety-sparsity: Evenness by layer",
    "sparseety-sparsity: Entropy of the routing by layer",
    "sparseety-sparsity: Idle experts by layer",
}


NO_EXPERTS = {
    *WINDOW,
    "sparseety-sparsity: Choices of an expert/s",
    "sparseety-sparsity: Ten busiest experts",
}


@dataclass(frozen=True)
class Setup:
    workers: int
    model: str
    arguments: tuple[str, ...]
    empty: set[str]


SETUPS = [
    pytest.param(Setup(1, "qwen-moe", (), BY_CHANCE | NO_DRAFTS | NO_RUN | WINDOW), id="1 worker, 1 API server"),
    pytest.param(
        Setup(
            4,
            "llama",  # vLLM for CPUs has no data parallelism for experts
            ("--data-parallel-size", "2", "--api-server-count", "2", "--speculative-config", DRAFTS),
            BY_CHANCE | NO_EXPERTS | NO_RUN,
        ),
        id="4 workers, 2 API servers, 2 engines, drafts",
        marks=pytest.mark.e2e_full,
    ),
]


def asks(number: int) -> list[Ask]:
    """Of each kind one; one choice each, and all say how many tokens there were."""
    name = f"round-{number}"
    return [
        chat(f"{name}-chat", "Why is the sky blue?", **USAGE),
        chat(f"{name}-ids", f"Count to {number}.", return_token_ids=True, **USAGE),
        chat(f"{name}-logprobs", "Say OK.", logprobs=True, **USAGE),
        chat(f"{name}-whole", "Tell me a story.", stream=False),
        completion(f"{name}-completion", "Once upon a time " * 20, **USAGE),
        completion(f"{name}-short", "The end.", max_tokens=2, **USAGE),
    ]


@dataclass
class Sent:
    """Traffic in a thread of its own, until it is told to stop."""

    url: str
    got: list[Got] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def _run(self) -> None:
        for number in range(200):
            self.got += asyncio.run(send_all(self.url, asks(number), at_once=3))
            if self._stop.wait(1):
                return

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def tokens(self, of: str) -> int:
        return sum(_usage(got)[of] for got in self.got)


def _usage(got: Got) -> Any:
    assert got.complete, got.ask.name
    assert got.status == 200, got.body
    if not got.ask.body["stream"]:
        return json.loads(got.body)["usage"]
    *_, last = [event for event in got.body.decode().split("\n\n") if event.startswith("data: {")]
    return json.loads(last.removeprefix("data: "))["usage"]


@dataclass
class Live:
    setup: Setup
    prometheus: Prometheus
    sent: Sent
    unanswered: set[str]  # panels with a query that has had no answer, while traffic went on
    pages: dict[str, str]  # what each program published at the end


@pytest.fixture(scope="module", params=SETUPS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    setup: Setup = request.param
    folder = tmp_path_factory.mktemp("live")
    logs, admin, listen, metrics = folder / "logs", free_port(), free_port(), free_port()
    hook = {
        "SPARSEETY_HOOK_CAPTURE": "tokens,sparsity,experts,weights",
        "SPARSEETY_HOOK_SPARSITY_GRAIN": "token",
        "SPARSEETY_HOOK_METRICS_DETAIL": "expert",
    }
    arguments = ("--enable-prompt-tokens-details", *setup.arguments)
    model = tiny_model(folder, setup.model)
    with contextlib.ExitStack() as stack:
        # The plugin of this checkout, not of the one that was installed with vLLM.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("PYTHONPATH", str(programs.ROOT))
        vllm = stack.enter_context(serve(folder, hook_dir=logs, hook=hook, model=model, arguments=arguments))
        parts = [
            programs.proxy(folder, listen, admin, vllm.port, "--workers", str(setup.workers)),
            programs.watch(folder, metrics, "--drift"),
        ]
        for part in parts:
            stack.callback(part.end)
            part.start()
        urls = {"sparseety-proxy": f"127.0.0.1:{admin}", "vllm": f"127.0.0.1:{vllm.port}"}
        urls["sparseety-verifier"] = f"127.0.0.1:{metrics}"
        targets = {job: [url] for job, url in urls.items()}
        targets["sparseety-verifier"].append(stack.enter_context(textfile(folder / "textfile")))
        server = stack.enter_context(prometheus(folder / "prometheus", targets, faster=30))
        sent = Sent(f"http://127.0.0.1:{listen}")
        with sent.running():
            until(lambda: len(sent.got) >= 12, 60)
            batch_run(logs, folder / "textfile/metrics")
            unanswered = ask_all(server, 40, setup.empty)
        settled(server, len(sent.got))
        pages = {job: page(url) for job, url in urls.items()}
        yield Live(setup, server, sent, unanswered, pages)


@contextlib.contextmanager
def textfile(folder: Path) -> Iterator[str]:
    """What a node exporter does with the file of a verifier's run."""
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(partial(Handler, directory=str(folder))) as address:
        yield address


def batch_run(logs: Path, file: Path) -> None:
    command = [sys.executable, "-m", "verifier.cli", str(logs), "--prom-textfile", str(file), "--jobs", "1"]
    subprocess.run(command, cwd=programs.ROOT, capture_output=True, timeout=60, check=False)  # some requests are open
    assert file.exists()


def ask_all(server: Prometheus, seconds: float, empty: set[str]) -> set[str]:
    """Panels that had no answer to one of their queries in all that time."""
    pending = {(title, query) for title, queries in panel_queries("10s").items() for query in queries}

    def all_answered() -> bool:
        for title, query in list(pending):
            now = query.replace("offset 1d", "offset 2s")  # there is no yesterday
            if server.ask(f"({now}) > 0" if now.endswith("or vector(0)") else now):
                pending.discard((title, query))
        return {title for title, _ in pending} <= empty

    with contextlib.suppress(AssertionError):
        until(all_answered, seconds)
    return {title for title, _ in pending}


def settled(server: Prometheus, requests: int) -> None:
    """Everything sent is judged, and was scraped since."""
    judged = "sum(sparseety_verify_requests_total)"
    behind = "sparseety_verify_backlog_requests"
    until(lambda: server.number(judged) == requests, 60, lambda: (server.ask(judged), server.ask(behind), requests))
    scraped = server.number("min(count_over_time(up[10m]))") or 0
    until(lambda: (server.number("min(count_over_time(up[10m]))") or 0) >= scraped + 3, 20)


def page(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as reply:
        return str(reply.read().decode())


def test_each_query_of_each_panel_has_an_answer_but_for_what_is_not_enabled(live: Live) -> None:
    assert live.unanswered <= live.setup.empty


def test_the_counters_are_the_traffic_sent_to_the_unit(live: Live) -> None:
    sent, asked = live.sent, live.prometheus.number
    requests, prompt, output = len(sent.got), sent.tokens("prompt_tokens"), sent.tokens("completion_tokens")
    streams = [got for got in sent.got if got.ask.body["stream"]]
    print(f"\n{requests} requests, {prompt} tokens in, {output} tokens out")
    expected = {
        'sum(sparseety_proxy_requests_total{endpoint!="other", outcome="complete"})': requests,
        "sum(sparseety_proxy_requests_total)": requests,
        'sum(sparseety_proxy_requests_total{stream="true"})': len(streams),
        'sum(sparseety_proxy_request_duration_seconds_count{model_name="m"})': requests,
        "sum(sparseety_time_to_first_token_seconds_count)": len(streams),
        "sum(sparseety_prompt_tokens_total)": prompt,
        "sum(sparseety_generation_tokens_total)": output,
        'sum(sparseety_capture_sampled_requests_total{source="proxy", decision="captured"})': requests,
        "sum(vllm:generation_tokens_total)": output,
        "sum(vllm:request_success_total)": requests,
        'sum(sparseety_capture_sampled_requests_total{source="plugin", decision="captured"})': requests,
        "sum(sparseety_prompt_tokens_by_status_total)": prompt,
        'sum(sparseety_verify_requests_total{verdict="pass"})': requests,
        'sum(sparseety_verify_tokens_total{result=~"match|drift"})': output,
        'sum(sparseety_join_requests_total{result="both"})': requests,
        "sum(sparseety_join_requests_total)": requests,
        "sum(sparseety_capture_records_dropped_total)": 0,
        "sum(sparseety_requests_uncounted_total)": 0,
        "sum(sparseety_upstream_errors_total)": 0,
    }
    assert {query: asked(query) for query in expected} == expected


def test_zeros_and_experts_are_counted_over_every_token_that_was_computed(live: Live) -> None:
    if "--speculative-config" in live.setup.arguments:
        pytest.skip("with drafts, the tokens computed are more than those that were sent")
    asked = live.prometheus.number
    computed = asked('sum(sparseety_prompt_tokens_by_status_total{status="computed"})')
    assert computed
    decoded = live.sent.tokens("completion_tokens") - len(live.sent.got)  # the last one is never computed on
    for phase, tokens in (("prefill", computed), ("decode", decoded)):
        elements = asked(f'sum(sparseety_activation_elements_total{{phase="{phase}"}})')
        assert elements == tokens * WIDTH * LAYERS, phase
        assert asked(f'sum(sparseety_moe_tokens_routed_total{{phase="{phase}"}})') == tokens * TOP_K * LAYERS, phase


def test_nothing_fires(live: Live) -> None:
    """But that so many prompts, made by chance, are no basis for what changed since yesterday."""
    assert live.prometheus.fired(600) - {"SparSEEtyDriftRateChanged", "SparSEEtyDraftAcceptanceLow"} == set()


@pytest.mark.parametrize("job", ["sparseety-proxy", "vllm", "sparseety-verifier"])
def test_what_is_published_is_free_of_lint(job: str, live: Live) -> None:
    """Of vLLM's page, our part."""
    ours = [line for line in live.pages[job].splitlines() if "sparseety_" in line]
    assert len(ours) > 50
    checked = subprocess.run(
        [binary("promtool"), "check", "metrics"],
        input="\n".join(ours) + "\n",
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_hostile_requests_make_no_more_series_than_the_bound(live: Live) -> None:
    async def attack() -> None:
        odd = [chat(f"odd-{n}", "x", model=f"model-{n}") for n in range(60)]
        odd += [Ask(f"path-{n}", f"/v1/path-{n}", {"max_tokens": 1, "stream": True}) for n in range(60)]
        await send_all(live.sent.url, odd, at_once=10)

    before = live.prometheus.number("sum(sparseety_proxy_requests_total)") or 0
    asyncio.run(attack())
    until(lambda: live.prometheus.number("sum(sparseety_proxy_requests_total)") == before + 120, 30)
    series = live.prometheus.number('count({__name__=~"sparseety_.+", job="sparseety-proxy"})')
    assert series
    print(f"\n{series:.0f} series of the proxy")
    assert series <= proxy.catalogue.series_bound(proxy.catalogue.MODELS)
