"""Publishes every metric of some definitions, every child, on a port of its own: counters that rise each second."""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler

from sparseety.metrics import Metric
from tests.in_thread import served

_OPEN = {"layer": ("0", "1"), "expert": ("0", "1"), "engine": ("0",), "model_name": ("m",)}


def exposition(metrics: Iterable[Metric], seconds: float) -> str:
    """As Prometheus reads it, so long after the start."""
    return "".join(line + "\n" for metric in metrics for line in _lines(metric, seconds))


@contextlib.contextmanager
def exporter(*metrics: Metric) -> Iterator[str]:
    """Its host and port."""
    start = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition(metrics, time.monotonic() - start).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(Handler) as address:
        yield address


def _lines(metric: Metric, seconds: float) -> Iterator[str]:
    yield f"# HELP {metric.wire_name} {metric.text}"
    yield f"# TYPE {metric.wire_name} {metric.kind}"
    for values in itertools.product(*(label.values or _OPEN.get(label.name, ("x",)) for label in metric.labels)):
        labels = [f'{label.name}="{value}"' for label, value in zip(metric.labels, values, strict=True)]
        if metric.kind == "histogram":
            below = len(metric.bounds) // 2
            for number, bound in enumerate((*metric.bounds, "+Inf")):
                inside = ",".join([*labels, f'le="{bound}"'])
                yield f"{metric.name}_bucket{{{inside}}} {seconds if number >= below else 0:.3f}"
            for ending in ("_sum", "_count"):
                yield f"{metric.name}{ending}{{{','.join(labels)}}} {seconds:.3f}"
        else:
            yield f"{metric.wire_name}{{{','.join(labels)}}} {_value(metric, seconds):.3f}"


def _value(metric: Metric, seconds: float) -> float:
    if metric.name.endswith("_timestamp_seconds"):
        return time.time()
    if metric.name.endswith("disk_free_bytes"):
        return 1e12 - 1e6 * seconds
    return seconds if metric.kind == "counter" else 1.0
