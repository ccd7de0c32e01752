"""Which numbers of an engine go into which metric. Definitions: catalogue.py."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

import sparseety
from sampler_hook.catalogue import (
    ACCEPTED,
    ACCEPTED_BOUNDS,
    ATTENDED,
    CONTEXT,
    DRAFTS,
    DROPPED,
    ERRORS,
    EVENTS,
    EVICTED,
    HOOKS,
    KINDS,
    LAST,
    PAUSED,
    PLUGIN_EVENTS,
    PROMPT,
    RATE,
    RECORDS,
    REQUESTS,
    STEPS,
)
from sampler_hook.metrics import Sample
from sampler_hook.scribe import Counts
from sampler_hook.wrapping import Site
from sparseety.metrics import BUILD_INFO, Cell, Metric, new_cell
from sparseety.records import FORMAT_VERSION


def of_counts(counts: Counts, model: str, engine: str) -> Iterator[Sample]:
    """What the engine did."""
    both = {"model_name": model, "engine": engine}
    yield from (total(PROMPT, value, both, status=status) for status, value in counts.prompt.items())
    yield from (total(EVICTED, value, both, reason=reason) for reason, value in counts.evicted.items())
    yield from (total(DRAFTS, value, both, outcome=outcome) for outcome, value in counts.drafts.items())
    for layer_type, (read, before) in counts.attended.items():
        yield total(ATTENDED, read, both, layer_type=layer_type)
        yield total(CONTEXT, before, both, layer_type=layer_type)
    lengths = new_cell(ACCEPTED_BOUNDS)
    for size, rows in counts.accepted_lengths.items():
        lengths[bisect_left(ACCEPTED_BOUNDS, size)] += rows
        lengths[-1] += size * rows
    yield from histogram(ACCEPTED, lengths, both)
    one = {"engine": engine}
    yield from histogram(STEPS, counts.overhead, one)
    yield Sample(LAST, one, counts.last_event)
    yield Sample(BUILD_INFO, {"version": sparseety.__version__, "schema_version": str(FORMAT_VERSION)}, 1.0)


def of_capture(
    *,
    requests: dict[str, int],
    rate: float,
    records: Mapping[str, int],
    lost: int,
    paused: dict[str, bool],
) -> Iterator[Sample]:
    """How complete the log is."""
    ours = {"source": "plugin"}
    yield from (total(REQUESTS, count, ours, decision=decision) for decision, count in requests.items())
    yield Sample(RATE, ours, rate)
    yield from of_records({kind: records.get(kind, 0) for kind in KINDS})
    yield total(DROPPED, lost, ours, reason="other")
    yield from (Sample(PAUSED, ours | {"reason": reason}, float(now)) for reason, now in paused.items())


def of_records(records: Mapping[str, int]) -> Iterator[Sample]:
    """Those that a process gave to its writer, by event."""
    yield from (total(RECORDS, count, {"source": "plugin"}, kind=kind) for kind, count in records.items())


def of_events(events: Mapping[str, int], engine: str) -> Iterator[Sample]:
    """What happened to the engine as a whole."""
    yield from (total(PLUGIN_EVENTS, events.get(kind, 0), {"engine": engine}, kind=kind) for kind in EVENTS)


def of_hooks(expected: Iterable[str], sites: Iterable[Site], errors: dict[str, int], engine: str) -> Iterator[Sample]:
    """Which hooks are there, by name."""
    there = {str(site.target): site for site in sites}
    for name in expected:
        site = there.get(name)
        states = {"expected": True, "attached": site is not None and site.attached, "fired": bool(site and site.fired)}
        for state, value in states.items():
            yield Sample(HOOKS, {"engine": engine, "site": name, "state": state}, float(value))
    yield from (total(ERRORS, count, {"engine": engine}, site=part) for part, count in errors.items())


def total(metric: Metric, value: float, labels: dict[str, str], **more: str) -> Sample:
    return Sample(metric, labels | more, value, "_total")


def histogram(metric: Metric, cell: Cell, labels: dict[str, str]) -> Iterator[Sample]:
    """Each bucket has what is up to its bound and past the one before; the collector adds them up."""
    for bound, value in zip([*map(str, map(float, metric.bounds)), "+Inf"], cell[:-1], strict=True):
        yield Sample(metric, labels | {"le": bound}, value, "_bucket")
    yield Sample(metric, labels, cell[-1], "_sum")
