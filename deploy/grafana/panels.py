"""Dashboards as tables: what a panel asks, how it is drawn. `dashboard_json` makes Grafana's classic JSON of them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deploy.grafana import drawing

Draw = Literal["lines", "stacked", "shares", "heatmap", "rows", "states", "stat", "table", "bars"]
Json = dict[str, Any]

SCHEMA_VERSION = 39  # classic, loaded by Grafana 10.4 and all later ones
FULL_WIDTH = 24

# Shorthand of the tables. A variable's "All" is ".*", which also fits series without the label.
_OURS = 'job=~"$job", instance=~"$instance"'
_ENGINE = 'model_name=~"$model_name", engine=~"$engine"'
_SELECTORS = {"S": _OURS, "M": f'{_OURS}, model_name=~"$model_name"', "E": _ENGINE, "N": 'model_name=~"$model_name"'}

# Who has to publish for a panel to have data, and what the panel says where nobody does. No data is not zero.
NEEDS = {
    "prometheus": "Not observed: Prometheus scrapes none of ours",
    "proxy": "Not observed: no proxy is scraped",
    "vllm": "Not observed: vLLM's /metrics is not scraped",
    "plugin": "Not observed: no plugin seen",
    "sparsity": "Not observed: the plugin does not count sparsity",
    "single tokens": "Not observed: the plugin does not count zeros token by token",
    "weights": "Not observed: the plugin does not count weights",
    "experts": "Not observed: the plugin counts no experts",
    "single experts": "Not observed: the plugin publishes no single experts",
    "drafts": "Not observed: no speculative decoding",
    "verifier": "Not observed: no verify-tokens --watch is scraped",
    "drift": "Not observed: no verify-tokens --watch --drift is scraped",
    "batch": "Not observed: no verify-tokens run was reported",
    "stability": "Not observed: no stability run was reported",
    "capture": "Not observed: neither proxy nor plugin is scraped",
}
NEEDS_HOW = {
    "prometheus": "a Prometheus that scrapes",
    "proxy": "the proxy",
    "vllm": "vLLM's own /metrics",
    "plugin": "the plugin in vLLM",
    "sparsity": "the plugin with SPARSEETY_HOOK_CAPTURE=tokens,sparsity",
    "single tokens": "the plugin with SPARSEETY_HOOK_SPARSITY_GRAIN=token",
    "weights": "the plugin with SPARSEETY_HOOK_CAPTURE=tokens,weights",
    "experts": "the plugin with SPARSEETY_HOOK_CAPTURE=tokens,experts, and a model with experts",
    "single experts": "the plugin with SPARSEETY_HOOK_METRICS_DETAIL=expert",
    "drafts": "vLLM with speculative decoding",
    "verifier": "verify-tokens --watch",
    "drift": "verify-tokens --watch --drift",
    "batch": "verify-tokens --prom-textfile and a node exporter",
    "stability": "sparseety stability compare --prom-textfile and a node exporter",
    "capture": "the proxy or the plugin",
}


@dataclass(frozen=True, slots=True)
class Link:
    """To another dashboard, with time and variables; `layer`: of the series that was clicked."""

    title: str
    uid: str
    layer: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    draw: Draw
    unit: str  # of Grafana
    needs: str  # of NEEDS
    says: str  # what it shows; the names of its metrics are added
    queries: tuple[tuple[str, str], ...]  # PromQL with the shorthand, legend
    width: int = 6
    bad_above: float | None = None  # drawn red
    good_above: float | None = None  # and red below
    words: tuple[tuple[float, str], ...] = ()  # shown instead of these values
    right: str = ""  # unit of the last query, on an axis of its own
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    says: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...]  # besides the data source


def expression(query: str) -> str:
    """PromQL of the tables' shorthand."""
    query = re.sub(r"\{([SMEN])(?=[,}])", lambda found: "{" + _SELECTORS[found[1]], query)
    return query.replace("[R]", "[$__rate_interval]")


def metric_names(query: str) -> list[str]:
    """Of a PromQL expression, in the order in which they stand, each once."""
    without = re.sub(r'"[^"]*"', '""', query)
    found = re.findall(r"(?<![\w:$])(?:sparseety_\w+|vllm:\w+|[a-z_]+:sparseety_[\w:]+|up)\b(?!\s*\()", without)
    return list(dict.fromkeys(found))


def dashboard_json(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": f"SparSEEty / {dashboard.title}",
        "description": dashboard.says,
        "tags": ["sparseety"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": drawing.annotations()},
        "links": [drawing.menu()],
        "templating": {"list": drawing.variables(dashboard.variables)},
        "panels": list(_placed(dashboard)),
    }


def _placed(dashboard: Dashboard) -> Iterator[Json]:
    """Rows and panels with ids and places: from left to right, a new line where the next one does not fit."""
    number = y = 0
    for row in dashboard.rows:
        number += 1
        yield drawing.row(number, row.title, y)
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > FULL_WIDTH:
                x, y = 0, y + drawing.HEIGHT
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": drawing.HEIGHT}
            yield {"id": number, "gridPos": place} | _panel(panel, dashboard.variables)
            x += panel.width
        y += drawing.HEIGHT


def _panel(panel: Panel, variables: tuple[str, ...]) -> Json:
    queries = [(expression(query), legend) for query, legend in panel.queries]
    names = list(dict.fromkeys(name for query, _ in queries for name in metric_names(query)))
    defaults: Json = {
        "unit": panel.unit,
        "noValue": NEEDS[panel.needs],
        "mappings": drawing.mappings(panel.words),
        "thresholds": drawing.thresholds(panel.bad_above, panel.good_above),
        "color": drawing.color(panel.draw, panel.bad_above is not None or panel.good_above is not None),
        "custom": drawing.custom(panel.draw),
    }
    if panel.unit == "percentunit":
        defaults |= {"min": 0}
    if panel.link:
        defaults["links"] = [drawing.data_link(panel.link.title, panel.link.uid, panel.link.layer, variables)]
    made: Json = {
        "type": drawing.TYPES[panel.draw],
        "title": panel.title,
        "description": f"{panel.says}\n\nNeeds {NEEDS_HOW[panel.needs]}. Metrics: {', '.join(f'`{n}`' for n in names)}",
        "datasource": drawing.DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": drawing.options(panel.draw, panel.unit),
        "targets": [drawing.target(n, query, legend, panel.draw) for n, (query, legend) in enumerate(queries)],
    }
    if panel.right:
        made["fieldConfig"]["overrides"] = [drawing.right_axis(panel.queries[-1][1], panel.right)]
    if panel.draw == "table":
        made["transformations"] = [drawing.without_time()]
    return made
