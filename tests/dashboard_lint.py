"""What must hold of a dashboard, whatever it shows: the rules of Grafana's dashboard linter that are of use here, and
that what is asked for exists."""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from sparseety.metrics import Metric

Json = dict[str, Any]

_TARGET_LABELS = {"job", "instance", "le"}  # Prometheus adds the first two
_RECORDED = re.compile(r"[a-z_]+:sparseety_\w+:\w+")
_NAME = re.compile(r"(?<![\w:$])(?:sparseety_\w+|vllm:\w+|[a-z_]+:sparseety_\w+:\w+)")
_DURATION = r"\[(\$__rate_interval|\d+[smhd])\]"


def sample_names(metrics: tuple[Metric, ...]) -> dict[str, Metric]:
    """The metric of each name that a sample can have."""
    found: dict[str, Metric] = {}
    for metric in metrics:
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.wire_name + ending: metric for ending in endings}
    return found


def problems(dashboard: Json, known: Mapping[str, Metric], recorded: set[str], uids: set[str]) -> list[str]:
    """known: by the names of their samples; recorded: names made by rules; uids: of all dashboards."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    found = [*_of_the_whole(dashboard, panels)]
    for panel in panels:
        title = panel.get("title") or f"panel {panel['id']}"
        found += [f"{title}: {problem}" for problem in _of_a_panel(panel, uids)]
        for target in panel["targets"]:
            found += [f"{title}: {problem}" for problem in of_a_query(target["expr"], known, recorded)]
            found += [f"{title}: {problem}" for problem in _of_its_window(target["expr"], title)]
    return found


def _of_the_whole(dashboard: Json, panels: list[Json]) -> Iterator[str]:
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(ids) != len(set(ids)):
        yield "two panels have the same id"
    for one, other in combinations(dashboard["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        if not apart and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
            yield f"{one['title']} and {other['title']} overlap"
    defined = {each["name"] for each in dashboard["templating"]["list"]}
    if "datasource" not in defined:
        yield "no variable datasource"
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    text += " ".join(str(each.get("definition", "")) for each in dashboard["templating"]["list"])
    used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
    yield from (f"${name} is not defined" for name in sorted(used - defined))
    yield from (f"${name} is not used" for name in sorted(defined - used - {"datasource"}))
    links = " ".join(link["url"] for panel in panels for link in panel["fieldConfig"]["defaults"].get("links", []))
    passed_on = set(re.findall(r"\$\{(\w+):queryparam\}", links))
    yield from (f"a link passes on ${name}, which is not defined" for name in sorted(passed_on - defined))


def _of_a_panel(panel: Json, uids: set[str]) -> Iterator[str]:
    if not panel.get("title"):
        yield "no title"
    if len(panel.get("description", "").split("\n\n")[0]) < 10:
        yield "no description"
    defaults = panel["fieldConfig"]["defaults"]
    for what in ("unit", "noValue"):
        if not defaults.get(what):
            yield f"no {what}"
    if not any(each["type"] == "special" for each in defaults.get("mappings", [])):
        yield "no words for a NaN"
    place = panel["gridPos"]
    if place["x"] + place["w"] > 24 or place["w"] < 3:
        yield "too wide or too narrow"
    for link in defaults.get("links", []):
        if link["url"].split("?")[0].removeprefix("/d/") not in uids:
            yield f"a link to nowhere: {link['url']}"
    if not panel["targets"]:
        yield "no query"
    for holder in (panel, *panel["targets"]):
        if holder.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
            yield "another data source than the variable's"


def of_a_query(query: str, known: Mapping[str, Metric], recorded: set[str]) -> Iterator[str]:
    """Every name is known, every label is one of its metric's, every counter is under a rate."""
    asked = list(_NAME.finditer(re.sub(r'"[^"]*"', lambda text: " " * len(text[0]), query)))
    labels = set(_TARGET_LABELS)
    for found in asked:
        name = found[0]
        if _RECORDED.fullmatch(name):
            if name not in recorded:
                yield f"no rule records {name}"
            labels |= set(name.split(":")[0].replace("model", "model_name").split("_")) | {"model_name"}
            continue
        metric = known.get(name)
        if metric is None:
            yield f"nobody publishes {name}"
            continue
        labels |= {label.name for label in metric.labels}
        yield from _of_matchers(query[found.end() :], metric)
        before, after = query[: found.start()], query[found.end() :]
        rated = re.search(r"(rate|increase)\($", before) and re.match(r"(\{[^}]*\})?\[", after)
        of_one_run = name.startswith("sparseety_stability_")  # from a file that is written once
        if metric.kind != "gauge" and not rated and not of_one_run:
            yield f"{name} only grows, and is not under rate or increase"
        if metric.kind == "gauge" and re.search(r"(?<!\w)(rate|increase)\($", before):
            yield f"{name} is a gauge, and is under rate or increase"
    for group in re.findall(r"(?:by|on) \(([^)]*)\)", query):
        for label in filter(None, group.split(", ")):
            if label not in labels:
                yield f"no metric of this query has the label {label}"


def _of_matchers(after: str, metric: Metric) -> Iterator[str]:
    """after: what follows the metric's name."""
    matchers = re.match(r"\{([^}]*)\}", after)
    for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', matchers[1] if matchers else ""):
        if label in _TARGET_LABELS:
            continue
        defined = {each.name: each for each in metric.labels}
        if label not in defined:
            yield f"{metric.name} has no label {label}"
        elif defined[label].values and "$" not in value:
            for each in value.split("|") if "~" in operator else [value]:
                if each not in defined[label].values:
                    yield f"{metric.name}: {label} is never {each}"


def _of_its_window(query: str, title: str) -> Iterator[str]:
    for function, window in re.findall(r"(\w+)\([^()]*?" + _DURATION, query):
        named = f"({window[:-1]} {window[-1]})"
        if window != "$__rate_interval" and named not in title and function != "deriv":
            yield f"[{window}] is not $__rate_interval, and the title does not say {named}"
