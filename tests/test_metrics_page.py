"""docs/metrics.md says what the catalogues say. Run as a program, this rewrites its tables."""

import re
from collections.abc import Iterable
from pathlib import Path

import proxy.catalogue
import sampler_hook.catalogue
import verifier.catalogue
from sampler_hook.detail import series
from sparseety import metrics
from sparseety.metrics import Label, Metric, most_series

PAGE = Path(__file__).parent.parent / "docs/metrics.md"

PROGRAMS = {
    "proxy": proxy.catalogue.METRICS,
    "plugin": sampler_hook.catalogue.METRICS,
    "watch": verifier.catalogue.WATCH,
    "run": verifier.catalogue.RUN,
    "stability": verifier.catalogue.STABILITY,
}
LAYERS = ("service", "token", "sparsity", "verification", "capture")
FAMILIES = {
    tuple(value): name
    for name, value in {**vars(metrics), **vars(sampler_hook.catalogue)}.items()
    if name.endswith(("_SECONDS", "_BOUNDS")) and isinstance(value, tuple)
} | {metrics.steps_1_2_5(most): f"1-2-5 to {most:,}" for most in (200_000, 1_000_000)}


def by_name(layer: str) -> dict[str, dict[str, Metric]]:
    """Name on the wire -> program -> its definition."""
    found: dict[str, dict[str, Metric]] = {}
    for program, defined in PROGRAMS.items():
        for metric in defined:
            if metric.layer == layer:
                found.setdefault(metric.wire_name, {})[program] = metric
    return found


def table(layer: str) -> str:
    rows = ["| metric | type | labels | meaning | by | absent |", "|---|---|---|---|---|---|"]
    for name, programs in by_name(layer).items():
        each = list(programs.values())
        first = each[0]
        unit = "" if first.unit in ("1", "") else f", {first.unit}"
        bounds = f"; bounds {_bounds(first)}" if first.bounds else ""
        meaning = each[0].help
        if len({metric.help for metric in each}) > 1:
            meaning = "<br>".join(f"*{program}:* {metric.help}" for program, metric in programs.items())
        absent = "; ".join(dict.fromkeys(metric.absent for metric in each if metric.absent))
        cells = f"`{name}`", f"{first.kind}{unit}{bounds}", _labels(each), meaning, ", ".join(programs), absent
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _bounds(metric: Metric) -> str:
    family = FAMILIES.get(tuple(metric.bounds))
    return family if family and family[0].isdigit() else f"`{family}`" if family else _numbers(metric.bounds)


def _numbers(bounds: Iterable[float]) -> str:
    return " ".join(f"{bound:g}" for bound in bounds)


def _labels(each: list[Metric]) -> str:
    labels: dict[str, list[Label]] = {}
    for metric in each:
        for label in metric.labels:
            labels.setdefault(label.name, []).append(label)
    return "<br>".join(f"`{name}`{_values(those)}" for name, those in labels.items())


def _values(labels: list[Label]) -> str:
    values = list(dict.fromkeys(value for label in labels for value in label.values))
    if labels[0].name in ("code", "kind", "site") and len(values) > 12:
        return {"code": ": see [verdicts.md](verdicts.md)", "kind": ": the record's `event`"}.get(
            labels[0].name, f": {', '.join(values[-2:])}, or a method of vLLM's that is wrapped"
        )
    return f": {', '.join(values)}" if values else ""


def families() -> str:
    rows = ["| bounds | |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {_numbers(value)} |" for value, name in FAMILIES.items() if name.isupper()])


def bounds_on_series() -> str:
    """Worked out from the definitions: so many, and no more, whatever clients send."""
    models = proxy.catalogue.MODELS
    plugin = {
        "plugin, an engine, no sparsity": series(engines=1),
        "plugin, 8 engines, no sparsity": series(engines=8),
        "plugin, an engine, sparsity of 32 layers": series("layer", layers=33, engines=1),
        "plugin, an engine, sparsity of 80 layers": series("layer", layers=81, engines=1),
        "plugin, 8 engines, sparsity of 80 layers": series("layer", layers=81, engines=8),
        "the same as totals": series("totals", engines=8),
        "plugin, an engine, 32 layers of 128 experts, each expert": series("expert", layers=33, experts=128, engines=1),
    }
    rows = {
        f"proxy, {models} names of models (`metrics_models`)": proxy.catalogue.series_bound(models),
        **plugin,
        f"watch, {verifier.catalogue.MODELS} names of models": most_series(verifier.catalogue.WATCH),
        "run's text file, the same": most_series(verifier.catalogue.RUN),
    }
    return "\n".join(
        ["| | series at most |", "|---|---|", *(f"| {what} | {number:,} |" for what, number in rows.items())]
    )


def tables() -> dict[str, str]:
    return {layer: table(layer) for layer in LAYERS} | {"bounds": families(), "series": bounds_on_series()}


def written(page: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL))


def test_the_page_has_the_tables_that_the_definitions_make() -> None:
    assert written(PAGE.read_text()) == tables(), "python tests/test_metrics_page.py rewrites them"


def test_every_metric_stands_on_the_page_in_the_chapter_of_its_layer() -> None:
    names = {metric.wire_name for defined in PROGRAMS.values() for metric in defined}
    assert {name for layer in LAYERS for name in by_name(layer)} == names


def test_programs_that_publish_one_name_mean_one_kind_of_thing() -> None:
    for layer in LAYERS:
        for name, programs in by_name(layer).items():
            each = list(programs.values())
            assert len({(metric.kind, metric.unit, tuple(metric.bounds)) for metric in each}) == 1, name
            assert len({tuple(label.name for label in metric.labels) for metric in each}) == 1, name


def test_names_follow_the_rules_of_the_field() -> None:
    for defined in PROGRAMS.values():
        assert len({metric.name for metric in defined}) == len(defined)
        for metric in defined:
            assert re.fullmatch(r"sparseety_[a-z0-9_]*[a-z0-9]", metric.name), metric.name  # so no colon
            assert not metric.name.endswith("_total")
            assert (metric.kind == "histogram") == bool(metric.bounds), metric.name
            assert list(metric.bounds) == sorted(set(metric.bounds))
            if metric.unit in ("seconds", "bytes", "ratio"):
                assert metric.name.endswith(f"_{metric.unit}"), metric.name
            for label in metric.labels:
                assert label.values or label.limit, f"{metric.name}: {label.name} is not bounded"


if __name__ == "__main__":
    text = PAGE.read_text()
    for mark, made in tables().items():
        begin = text.index(f"<!-- {mark} -->") + len(f"<!-- {mark} -->")
        text = f"{text[:begin]}\n{made}\n{text[text.index('<!-- end -->', begin) :]}"
    PAGE.write_text(text)
