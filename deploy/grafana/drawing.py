"""The parts of Grafana's classic JSON that look the same on every panel."""

from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = 8
TYPES = {
    "lines": "timeseries",
    "stacked": "timeseries",
    "shares": "timeseries",
    "heatmap": "heatmap",
    "rows": "status-history",
    "states": "state-timeline",
    "stat": "stat",
    "table": "table",
    "bars": "bargauge",
}
_INSTANT = ("table", "bars")

# Programs of ours, whichever run: each has one of these at every scrape.
_OF_OURS = '{__name__=~"sparseety_build_info|sparseety_plugin_hooks|sparseety_verify_backlog_requests"}'
_VARIABLES = {
    "job": f"label_values({_OF_OURS}, job)",
    "instance": f'label_values({_OF_OURS.replace("}", ", job=~")}"$job"}}, instance)',
    "model_name": 'label_values({__name__=~"sparseety_proxy_requests_total|vllm:generation_tokens_total"}, model_name)',
    "engine": "label_values(vllm:num_requests_running, engine)",
    "layer": "label_values(sparseety_activation_elements_total, layer)",
    "phase": "label_values(sparseety_activation_elements_total, phase)",
}


def variables(names: tuple[str, ...]) -> list[Json]:
    """The data source, then one list for each label, all of it chosen."""
    source: Json = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "default", "value": "default"},
        "hide": 0,
    }
    return [source, *(_variable(name) for name in names)]


def _variable(name: str) -> Json:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": _VARIABLES[name],
        "query": {"query": _VARIABLES[name], "refId": "variable"},
        "refresh": 2,  # when the time range changes: instances come and go
        "sort": 3 if name == "layer" else 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def annotations() -> list[Json]:
    """Where a program starts, or starts again in another version."""
    build = "count by (job, instance, version) (sparseety_build_info)"
    query = f"{build} unless count by (job, instance, version) (sparseety_build_info offset 5m)"
    return [
        {
            "name": "SparSEEty started",
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": "blue",
            "expr": query,
            "step": "60s",
            "titleFormat": "{{job}} {{version}}",
            "textFormat": "{{instance}}",
        }
    ]


def menu() -> Json:
    """From each of our dashboards to all of them."""
    return {
        "title": "SparSEEty",
        "type": "dashboards",
        "tags": ["sparseety"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "",
        "tooltip": "",
        "url": "",
    }


def data_link(title: str, uid: str, layer: bool, names: tuple[str, ...]) -> Json:
    """layer: instead of the layers chosen, that of the series which was clicked. names: the page's variables."""
    kept = [
        "__url_time_range",
        *(f"{name}:queryparam" for name in ("datasource", *names) if not (layer and name == "layer")),
    ]
    url = f"/d/{uid}?" + "&".join(f"${{{name}}}" for name in kept)
    return {"title": title, "url": url + ("&var-layer=${__field.labels.layer}" if layer else ""), "targetBlank": False}


def row(number: int, title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"id": number, "gridPos": place, "type": "row", "title": title, "collapsed": False, "panels": []}


def target(number: int, query: str, legend: str, draw: str) -> Json:
    form = {"heatmap": "heatmap", "table": "table"}.get(draw, "time_series")
    instant = draw in _INSTANT
    return {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "expr": query,
        "legendFormat": legend or "__auto",
        "format": form,
        "instant": instant,
        "range": not instant,
    }


def mappings(words: tuple[tuple[float, str], ...]) -> list[Json]:
    """A ratio of nothing is NaN: no traffic. (No series at all is another thing: see noValue.)"""
    named = {f"{value:g}": {"text": text, "index": n} for n, (value, text) in enumerate(words)}
    empty = {"type": "special", "options": {"match": "null+nan", "result": {"text": "No traffic", "index": len(words)}}}
    return [*([{"type": "value", "options": named}] if named else []), empty]


def thresholds(bad_above: float | None, good_above: float | None) -> Json:
    steps: list[Json] = [{"color": "red" if good_above is not None else "green", "value": None}]
    if good_above is not None:
        steps.append({"color": "green", "value": good_above})
    if bad_above is not None:
        steps.append({"color": "red", "value": bad_above})
    return {"mode": "absolute", "steps": steps}


def color(draw: str, judged: bool) -> Json:
    if draw == "rows":
        return {"mode": "continuous-BlYlRd"}
    return {"mode": "thresholds" if judged or draw in ("states", "bars") else "palette-classic"}


def custom(draw: str) -> Json:
    if draw in ("lines", "stacked", "shares"):
        mode = {"lines": "none", "stacked": "normal", "shares": "percent"}[draw]
        fill = 0 if draw == "lines" else 30
        return {"lineWidth": 1, "fillOpacity": fill, "showPoints": "auto", "stacking": {"mode": mode, "group": "A"}}
    return {"fillOpacity": 80} if draw in ("rows", "states") else {}


def options(draw: str, unit: str) -> Json:
    if draw in ("lines", "stacked", "shares"):
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if draw == "heatmap":
        return {"calculate": False, "yAxis": {"unit": unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    if draw == "stat":
        return {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["last"]}, "textMode": "auto"}
    if draw == "bars":
        return {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["last"]}}
    if draw in ("rows", "states"):
        return {"showValue": "never" if draw == "rows" else "auto", "rowHeight": 0.9}
    return {"showHeader": True}


def right_axis(legend: str, unit: str) -> Json:
    properties = [{"id": "unit", "value": unit}, {"id": "custom.axisPlacement", "value": "right"}]
    return {"matcher": {"id": "byName", "options": legend}, "properties": properties}


def without_time() -> Json:
    return {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {}}}
