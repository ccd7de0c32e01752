"""What a healthy deployment publishes, as series of promtool's unit tests: two proxies, two vLLM with the plugin, one
verifier on watch. Made from the metrics' definitions, so that no rule is silent for want of a series."""

import itertools
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import proxy.catalogue
import sampler_hook.catalogue
import verifier.catalogue
from sparseety.metrics import Metric
from tests.prometheus_binaries import binary
from tests.vllm_metrics import VLLM

RULES = sorted((Path(__file__).parent.parent / "deploy/prometheus/rules").glob("*.yml"))
ALERTS = [path for path in RULES if path.stem != "recording"]  # alerts ask for nothing recorded
STEP = 30  # seconds between samples, and between evaluations

# Of these labels, some values are enough.
_SOME = {
    "layer": ("0", "1"),
    "model_name": ("m",),
    "engine": ("0",),
    "endpoint": ("chat",),
    "stream": ("true",),
    "code": ("DRIFT", "ALTERED_TEXT"),
    "severity": ("info", "error"),
    "phase": ("decode",),
    "finished_reason": ("stop",),
    "site": ("ffn_act", "tokens"),
}
_FALSE = {
    "sparseety_plugin_errors",
    "sparseety_capture_sequence_errors",
    "sparseety_capture_records_dropped",
    "vllm:num_preemptions",
}
_FAULTY_VALUES = {
    *("upstream_broken", "upstream_unreachable", "upstream_timeout", "shutdown", "internal_error"),
    *("connect", "tls", "read_timeout", "write_timeout", "reset", "protocol", "http_5xx"),
    *("paused", "failed", "fail", "incomplete", "DRIFT", "proxy_only", "plugin_only"),
}
_GAUGES = {
    **dict.fromkeys(("sparseety_proxy_workers", "sparseety_proxy_workers_alive", "sparseety_upstream_up"), "1"),
    **dict.fromkeys(("sparseety_plugin_hooks", "sparseety_capture_sampling_ratio"), "1"),
    "sparseety_capture_queue_bytes": "1000",
    "sparseety_capture_queue_limit_bytes": "67108864",
    "sparseety_capture_disk_free_bytes": "1000000000000",
    "sparseety_moe_load_balance_ratio": "0.8",
    "sparseety_stability_run_gate": "1",
}
_TIMES = re.compile("_timestamp_seconds$")

TARGETS = {
    ("sparseety-proxy", "proxy-a"): proxy.catalogue.METRICS,
    ("sparseety-proxy", "proxy-b"): proxy.catalogue.METRICS,
    ("vllm", "vllm-a"): (*sampler_hook.catalogue.METRICS, *VLLM),
    ("vllm", "vllm-b"): (*sampler_hook.catalogue.METRICS, *VLLM),
    ("sparseety-verifier", "verifier"): verifier.catalogue.WATCH,
    ("node", "host"): (*verifier.catalogue.RUN, *verifier.catalogue.STABILITY),
}


@dataclass
class World:
    """Values of each series, in promtool's notation or as a function of the sample's number; None is no sample."""

    samples: int
    traffic: bool = True
    step: int = STEP
    values: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (job, instance), metrics in TARGETS.items():
            where = {"job": job, "instance": instance}
            self.values[_series("up", where)] = f"1x{self.samples}"
            for metric in metrics:
                for name, labels in _children(metric):
                    if name in _asked_for():
                        self.values[_series(name, where | labels)] = self._healthy(metric, name, labels)

    def _healthy(self, metric: Metric, name: str, labels: dict[str, str]) -> str:
        rises = self.traffic and metric.name not in _FALSE and not _FAULTY_VALUES & set(labels.values())
        if metric.kind == "counter":
            scale = 100_000_000 if "elements" in name else 10
            return f"{1000 * rises}+{scale * rises}x{self.samples}"
        if metric.kind == "histogram":
            below = labels.get("le") and float(labels["le"]) < metric.bounds[len(metric.bounds) // 2]
            return f"0+{10 * (rises and not below)}x{self.samples}"
        if _TIMES.search(name):
            return f"0+{self.step * self.traffic}x{self.samples}"
        return f"{_GAUGES.get(name, '0')}x{self.samples}"

    def matching(self, pattern: str) -> list[str]:
        """Series by a regular expression; there must be some."""
        found = [series for series in self.values if re.search(pattern, series)]
        assert found, f"no series like {pattern}"
        return found

    def set(self, pattern: str, values: str) -> "World":
        """Other values for the series like this."""
        self.values |= dict.fromkeys(self.matching(pattern), values)
        return self

    def drop(self, pattern: str) -> "World":
        for series in self.matching(pattern):
            del self.values[series]
        return self

    def down(self, instance: str, at: int, samples: int) -> "World":
        """Its target does not answer for some samples, which may reach to the end; its counters begin anew then."""
        for series in self.matching(f'instance="{instance}"'):
            before = self.values[series]
            start, rise = re.match(r"([^+x]+)(?:\+([^x]+))?", before).groups()  # type: ignore[union-attr]
            rest = max(0, self.samples - at - samples)
            if series.startswith("up{"):
                self.values[series] = f"1x{at - 1} 0x{samples - 1} 1x{rest}"
            elif _TIMES.search(series.split("{")[0]):
                again = (at + samples) * self.step
                self.values[series] = f"{start}+{rise}x{at - 1} stale _x{samples - 1} {again}+{rise}x{rest}"
            elif rise:
                self.values[series] = f"{start}+{rise}x{at - 1} stale _x{samples - 1} 0+{rise}x{rest}"
            else:
                self.values[series] = f"{start}x{at - 1} stale _x{samples - 1} {start}x{rest}"
        return self


def expect(world: World, folder: Path, *tests: dict[str, Any], rule_files: Sequence[Path] = ()) -> None:
    """Run promtool's unit tests on this world. Each of `tests` goes into the group as it is."""
    group: dict[str, Any] = {
        "interval": f"{world.step}s",
        "input_series": [{"series": series, "values": values} for series, values in world.values.items()],
        "alert_rule_test": [test for test in tests if "alertname" in test],
        "promql_expr_test": [test for test in tests if "expr" in test],
    }
    file = folder / "promtool.yml"
    content = {
        "rule_files": list(map(str, rule_files or ALERTS)),
        "evaluation_interval": f"{world.step}s",
        "tests": [group],
    }
    file.write_text(yaml.safe_dump(content))
    ran = subprocess.run([binary("promtool"), "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def nothing_fires(world: World) -> dict[str, Any]:
    """At no moment until the end."""
    end = world.samples * world.step
    expression = f'count_over_time(ALERTS{{alertstate="firing"}}[{end}s])'
    return {"expr": expression, "eval_time": f"{end}s", "exp_samples": []}


def firing(seconds: int, *alerts: str) -> dict[str, Any]:
    """These, and no others, fire at this moment."""
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]
    expression = 'group by (alertname) (ALERTS{alertstate="firing"})'
    return {"expr": expression, "eval_time": f"{seconds}s", "exp_samples": samples}


def rules() -> dict[str, dict[str, Any]]:
    """Alerting rules by name."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def _asked_for() -> set[str]:
    """Names in any rule."""
    text = " ".join(path.read_text() for path in RULES)
    return set(re.findall(r"(?:sparseety_|vllm:)\w+", text))


def _children(metric: Metric) -> Iterator[tuple[str, dict[str, str]]]:
    for values in itertools.product(*(_SOME.get(label.name) or label.values or ("x",) for label in metric.labels)):
        labels = {label.name: value for label, value in zip(metric.labels, values, strict=True)}
        if metric.kind == "histogram":
            for bound in (*metric.bounds, "+Inf"):
                yield f"{metric.name}_bucket", labels | {"le": str(bound)}
        else:
            yield metric.wire_name, labels


def _series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
