"""Each alert fires when it should, alone and in the words that it should have; none fires without traffic, in plain
operation, on restarts, or on traffic that one side alone sees by design. By promtool: `make test-observability`."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.prometheus_binaries import binary
from tests.prometheus_world import RULES, STEP, World, expect, firing, nothing_fires, rules

pytestmark = pytest.mark.observability

ROOT = Path(__file__).parent.parent
HOUR = 3600 // STEP  # samples

PROXY_A, PROXY_B = 'instance="proxy-a"', 'instance="proxy-b"'
VLLM_A, VLLM_B = 'instance="vllm-a"', 'instance="vllm-b"'

# ------------------------------------------------------------------------------------------------- when none may fire


def _proxy_killed() -> World:
    """kill -9: open requests break off, a line is torn, and what was open is incomplete."""
    world = World(2 * HOUR).down("proxy-a", 60, 2)
    burst = f"0x60 8x{2 * HOUR - 61}"
    world.set(r'sequence_errors_total\{.*kind="(torn_line|missing_end)"', burst)
    return world.set(r'verify_requests_total\{.*verdict="incomplete"', burst)


def _one_of_each_vllm_restarted() -> World:
    """A single proxy and a single vLLM, which is down for 90 s: all requests fail meanwhile."""
    world = World(2 * HOUR).drop(f"{PROXY_B}|{VLLM_B}").down("vllm-a", 60, 3)
    world.set("upstream_up", f"1x59 0x2 1x{2 * HOUR - 62}")
    world.set(r'upstream_errors_total\{.*error_type="connect"', f"0x59 50 100 150x{2 * HOUR - 62}")
    return world.set(r'proxy_requests_total\{.*outcome="upstream_unreachable"', f"0x59 5 10 15x{2 * HOUR - 62}")


def _canary() -> World:
    """vllm-b runs without the plugin, and is also called past the proxy: only one side sees that, by design."""
    world = World(2 * HOUR).drop(f"sparseety_.*{VLLM_B}")
    # Not to be checked for want of ids, so incomplete: 5 % of the traffic.
    return world.set(r'verify_requests_total\{.*verdict="incomplete"', f"0+1x{2 * HOUR}")


def _sampled() -> World:
    """One request in 1000 is recorded: long stretches without any."""
    world = World(2 * HOUR).set(r'sampling_ratio\{.*source="plugin"', f"0.001x{2 * HOUR}")
    return world.set("last_event_timestamp", f"0x{2 * HOUR}")


def _paused_by_the_operator() -> World:
    world = World(2 * HOUR).set(r'sampling_ratio\{.*source="plugin"', f"1x60 0x{2 * HOUR - 61}")
    world.set(r'capture_paused\{.*reason="operator"', f"0x60 1x{2 * HOUR - 61}")
    world.set(r'plugin_hooks\{.*state="attached"', f"1x60 0x{2 * HOUR - 61}")
    return world.set("last_event_timestamp", f"0+{STEP}x60 {60 * STEP}x{2 * HOUR - 61}")


def _after_an_idle_night() -> World:
    """The first requests after hours of nothing: what was written last is old, for a moment."""
    world, still = World(2 * HOUR), HOUR
    for series, values in World(2 * HOUR).values.items():
        start, plus, rise = values.split("x")[0].partition("+")
        if plus and float(rise):
            again = still * STEP if "_timestamp_" in series else start
            world.values[series] = f"{start}x{still - 1} {again}+{rise}x{HOUR}"
    return world


def _verifier_away_for_the_day() -> World:
    """Its series are gone for over an hour and come back anew. Nobody was told to watch it: no target."""
    world = World(4 * HOUR).down("verifier", HOUR, 2 * HOUR)
    return world.set(r'^up\{.*instance="verifier"', f"1x{HOUR - 1} stale _x{2 * HOUR - 1} 1x{HOUR}")


QUIET: dict[str, Callable[[], World]] = {
    "no traffic": lambda: World(2 * HOUR, traffic=False),
    "plain operation": lambda: World(2 * HOUR),
    "rolling restart of the proxies": lambda: World(2 * HOUR).down("proxy-a", 60, 4).down("proxy-b", 70, 4),
    "proxy killed": _proxy_killed,
    "one vLLM of two loads its model for eight minutes": lambda: (
        World(2 * HOUR).down("vllm-a", 60, 16).set(rf"upstream_up\{{.*{PROXY_A}", f"1x59 0x16 1x{2 * HOUR - 76}")
    ),
    "the only vLLM restarts": _one_of_each_vllm_restarted,
    "verifier restarts": lambda: World(2 * HOUR).down("verifier", 60, 4),
    "verifier away for hours": _verifier_away_for_the_day,
    "canary without the plugin": _canary,
    "proxy alone": lambda: World(2 * HOUR).drop('job="(vllm|sparseety-verifier|node)"'),
    "one request in a thousand is recorded": _sampled,
    "paused by the operator": _paused_by_the_operator,
    "first traffic after hours": _after_an_idle_night,
    "a burst of lost records": lambda: World(2 * HOUR).set("records_dropped_total", f"0x60 900x{2 * HOUR - 61}"),
    "traffic ends with experts in disorder": lambda: World(2 * HOUR, traffic=False).set(
        "load_balance", f"0.1x{2 * HOUR}"
    ),
    "an hour of drift in few requests": lambda: (
        World(2 * HOUR)
        .set("verify_requests_total", f"0+0.1x{2 * HOUR}")
        .set(r'verdict="(fail|incomplete)"', f"0x{2 * HOUR}")
        .set(r'findings_total\{.*code="DRIFT"', f"0+0.1x{2 * HOUR}")
    ),
}


@pytest.mark.parametrize("scenario", QUIET)
def test_no_alert_fires(scenario: str, tmp_path: Path) -> None:
    world = QUIET[scenario]()
    expect(world, tmp_path, nothing_fires(world))


# --------------------------------------------------------------------------------------------------- when each must


@dataclass(frozen=True)
class Fires:
    """After `samples` of a world that is healthy but for this."""

    world: Callable[[], World]
    labels: dict[str, str]
    summary: str
    besides: tuple[str, ...] = ()  # other alerts that tell of the same trouble


def _changed(pattern: str, values: str, samples: int = HOUR) -> Callable[[], World]:
    return lambda: World(samples).set(pattern, values.format(samples))


A_DAY = 24 * 3600

FIRES = {
    "SparSEEtyNoProxy": Fires(
        lambda: World(30).down("proxy-a", 20, 40).down("proxy-b", 20, 40),
        {"job": "sparseety-proxy"},
        "No capture proxy answers",
    ),
    "SparSEEtyProxyDown": Fires(
        lambda: World(60).down("proxy-a", 20, 60),
        {"job": "sparseety-proxy", "instance": "proxy-a"},
        "Capture proxy proxy-a does not answer",
    ),
    "SparSEEtyNoUpstream": Fires(
        _changed("upstream_up", "1x20 0x{}", 30),
        {"job": "sparseety-proxy", "upstream": "default"},
        "No proxy reaches the upstream default",
    ),
    "SparSEEtyUpstreamDown": Fires(
        _changed(f"upstream_up.*{PROXY_A}", "1x20 0x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a", "upstream": "default"},
        "Proxy proxy-a does not reach the upstream default",
    ),
    "SparSEEtyUpstreamErrors": Fires(
        _changed('upstream_errors_total.*error_type="http_5xx"', "0+2x{}"),
        {"job": "sparseety-proxy"},
        "The upstream fails 10% of the requests",
    ),
    "SparSEEtyProxyWorkersDown": Fires(
        _changed(f"workers_alive.*{PROXY_A}", "0x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a"},
        "1 workers of the proxy proxy-a are down or silent",
    ),
    "SparSEEtyProxyOverheadHigh": Fires(
        # Of ten a step, one takes over 5 ms.
        _changed(rf'overhead_seconds_bucket.*{PROXY_A}.*stage="chunk".*le="(0.0025|0.005)"', "0+9x{}"),
        {"instance": "proxy-a"},
        "Proxy proxy-a adds 9.5ms (p99) to each chunk",
    ),
    "SparSEEtyCaptureDropping": Fires(
        _changed(f'records_dropped_total.*{PROXY_A}.*reason="disk_low"', "0+3x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a", "source": "proxy", "reason": "disk_low"},
        "Capture on proxy-a drops records (proxy, disk_low)",
    ),
    "SparSEEtyCaptureQueueNearlyFull": Fires(
        _changed(f"queue_bytes.*{PROXY_A}", "60000000x{}", 20),
        {"job": "sparseety-proxy", "instance": "proxy-a", "source": "proxy"},
        "The capture's queue on proxy-a is 89.41% full (proxy)",
    ),
    "SparSEEtyCaptureStalled": Fires(
        _changed(f"last_write_timestamp.*{PROXY_A}", "0x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a", "source": "proxy"},
        "Requests are chosen for capture on proxy-a (proxy) and nothing is written",
    ),
    "SparSEEtyCapturePaused": Fires(
        _changed(f'capture_paused.*{PROXY_A}.*reason="latency"', "1x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a", "source": "proxy", "reason": "latency"},
        "Capture on proxy-a is paused (proxy, latency)",
    ),
    "SparSEEtyCaptureDiskLow": Fires(
        # 40 GB an hour, of 180 GB: 35 GB are left in four hours less the hour that has passed... and 5 GiB must stay.
        _changed(f"disk_free_bytes.*{PROXY_A}", "180000000000-333000000x{}"),
        {"job": "sparseety-proxy", "instance": "proxy-a"},
        "At this rate the capture on proxy-a stops within 4 h: the disk fills",
    ),
    "SparSEEtyStreamSequenceErrors": Fires(
        _changed('sequence_errors_total.*kind="gap"', "0+1x{}"),
        {"model_name": "m", "kind": "gap"},
        "10% of the requests to m have records out of order (gap)",
    ),
    "SparSEEtyPluginHooksMissing": Fires(
        _changed(f'plugin_hooks.*{VLLM_A}.*site="tokens".*state="attached"', "0x{}", 20),
        {"job": "vllm", "instance": "vllm-a", "engine": "0", "site": "tokens"},
        "Engine 0 on vllm-a lacks the hook tokens",
    ),
    "SparSEEtyPluginErrors": Fires(
        _changed(f'plugin_errors_total.*{VLLM_A}.*site="tokens"', "0x20 1x{}", 30),
        {"job": "vllm", "instance": "vllm-a", "engine": "0", "site": "tokens"},
        "A part of the plugin gave up: engine 0 on vllm-a, tokens",
    ),
    "SparSEEtyPluginSilent": Fires(
        _changed(f"last_event_timestamp.*{VLLM_A}", "0x{}"),
        {"job": "vllm", "instance": "vllm-a"},
        "vLLM on vllm-a serves requests and the plugin records none",
    ),
    "SparSEEtyPluginGone": Fires(
        _changed(f"sparseety_plugin.*{VLLM_A}", "1x20 stale"),
        {"job": "vllm", "instance": "vllm-a"},
        "vLLM on vllm-a came back without the plugin",
    ),
    "SparSEEtyVerifyFailure": Fires(
        # A counter that is not there before its first failure.
        _changed('verify_requests_total.*verdict="fail"', "_x20 1x{}", 30),
        {"model_name": "m"},
        "A client of m was given other text than was sampled",
    ),
    "SparSEEtyVerifyFailures": Fires(
        _changed('verify_requests_total.*verdict="fail"', "0+0.5x{}"),
        {"model_name": "m"},
        "4.762% of the clients of m are given other text than was sampled",
        besides=("SparSEEtyVerifyFailure",),
    ),
    "SparSEEtyCoverageLow": Fires(
        _changed('verify_requests_total.*verdict="incomplete"', "0+5x{}"),
        {"model_name": "m"},
        "33.33% of the requests to m cannot be checked",
    ),
    "SparSEEtyStreamJoinBroken": Fires(
        _changed('join_requests_total.*result="proxy_only"', "0+1x{}"),
        {"job": "sparseety-verifier"},
        "9.091% of the requests are in one log only",
    ),
    "SparSEEtyVerifierDown": Fires(
        lambda: World(60).down("verifier", 20, 60),
        {"job": "sparseety-verifier", "instance": "verifier"},
        "The verifier verifier does not answer",
    ),
    "SparSEEtyVerifierBehind": Fires(
        _changed("backlog_requests", "0+100x{}"),
        {"job": "sparseety-verifier", "instance": "verifier"},
        "The verifier verifier is 9000 requests behind",
    ),
    "SparSEEtyDriftRateChanged": Fires(
        lambda: _long(A_DAY + 4 * 3600).set(
            r'findings_total\{.*code="DRIFT", severity="info"', f"0+0.1x{A_DAY // 240} {0.1 * A_DAY // 240:g}+2x60"
        ),
        {"model_name": "m"},
        "20% of the texts of m tokenize anew into other ids, over three times as many as before",
    ),
    "SparSEEtyVerifyStale": Fires(
        lambda: _long(27 * 3600).set("completion_timestamp", f"0x{27 * 15}"),
        {},
        "No verify-tokens run has ended for 1d 3h 0m 0s",
    ),
    "SparSEEtyStabilityGateFailed": Fires(
        _changed("stability_run_gate", "0x{}", 10),
        {"model_name": "m", "gate": "x"},
        "The stability run of m was rejected: x",
    ),
    "SparSEEtyActivationSparsityShift": Fires(
        lambda: _long(A_DAY + 4 * 3600).set(
            r'zero_elements_total\{.*layer="1".*zero_kind="exact"',
            f"0+10000000x{A_DAY // 240} {10000000 * (A_DAY // 240)}+30000000x60",
        ),
        {"model_name": "m", "layer": "1"},
        "Layer 1 of m: the share of zeros moved by 20% since yesterday",
    ),
    "SparSEEtyMoEImbalance": Fires(
        _changed(r'load_balance_ratio\{.*layer="1"', "0.1x{}", 100),
        {"model_name": "m", "layer": "1"},
        "Layer 1 of m: the busiest expert has over 4 times the mean load",
    ),
    "SparSEEtyDraftAcceptanceLow": Fires(
        _changed("num_accepted_tokens_total", "0+3x{}", 100),
        {"model_name": "m"},
        "30% of the drafts for m are accepted: they may cost more than they save",
    ),
}


def _long(seconds: int) -> World:
    """A day or more, by fewer samples."""
    return World(seconds // 240, step=240)


@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_alone_and_in_its_words(alert: str, tmp_path: Path) -> None:
    case, rule = FIRES[alert], rules()[alert]
    world = case.world()
    end = world.samples * world.step
    words = {
        "alertname": alert,
        "eval_time": f"{end}s",
        "exp_alerts": [
            {
                "exp_labels": case.labels | rule["labels"],
                "exp_annotations": rule["annotations"] | {"summary": case.summary},
            }
        ],
    }
    expect(world, tmp_path, words, firing(end, alert, *case.besides))


def test_torn_lines_that_are_of_no_known_model_are_seen(tmp_path: Path) -> None:
    world = World(HOUR)
    world.values[
        'sparseety_capture_sequence_errors_total{job="sparseety-verifier", instance="verifier", '
        'model_name="other", kind="torn_line"}'
    ] = f"0+1x{HOUR}"
    expect(world, tmp_path, firing(HOUR * STEP, "SparSEEtyStreamSequenceErrors"))


def test_no_proxy_left_is_seen_where_discovery_forgets_a_target_with_its_pod(tmp_path: Path) -> None:
    world = World(HOUR)
    for proxy in ("proxy-a", "proxy-b"):
        world.drop(f'^sparseety_.*instance="{proxy}"').set(f'^up.*instance="{proxy}"', "1x20 stale")
    expect(world, tmp_path, firing(30 * STEP, "SparSEEtyNoProxy"))


def test_rules_record_what_they_are_named_for(tmp_path: Path) -> None:
    def records(name: str, value: float, **labels: str) -> dict[str, Any]:
        inside = ", ".join(f'{label}="{each}"' for label, each in labels.items())
        samples = [{"labels": f"{{{inside}}}", "value": value}]
        return {
            "expr": f"round(sum by ({', '.join(labels)}) ({name}{{{inside}}}), 0.001)",
            "eval_time": "30m",
            "exp_samples": samples,
        }

    world = World(HOUR).set('zero_elements_total.*layer="0".*zero_kind="exact"', f"0+25000000x{HOUR}")
    expect(
        world,
        tmp_path,
        records("model_endpoint:sparseety_requests:rate5m", 1.333, model_name="m", endpoint="chat"),
        records("model:sparseety_tokens_per_minute:rate5m", 160, model_name="m"),
        # All between 0.75 and 1 s, the first bound of those that rise.
        records("model:sparseety_ttft_seconds:p99_5m", 0.998, model_name="m"),
        records(
            "model_layer_phase:sparseety_activation_zero:ratio_rate5m", 0.25, model_name="m", layer="0", phase="decode"
        ),
        rule_files=RULES,
    )


def test_every_alert_is_among_those_that_are_made_to_fire() -> None:
    assert set(FIRES) == set(rules())


def test_rules_and_configuration_are_free_of_lint() -> None:
    promtool = binary("promtool")
    subprocess.run([promtool, "check", "rules", "--lint=all", *map(str, RULES)], check=True, capture_output=True)
    # Not whether a file with the admin token is here.
    config = str(ROOT / "deploy/prometheus/prometheus.yml")
    subprocess.run([promtool, "check", "config", "--syntax-only", config], check=True)


def test_every_alert_has_a_page_of_what_to_do() -> None:
    page = (ROOT / "docs/alerts.md").read_text()
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
