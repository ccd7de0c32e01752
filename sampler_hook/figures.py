"""Which numbers of an engine go into which metric. Definitions: catalogue.py."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import sparseety
from sampler_hook.catalogue import (
    ACCEPTED,
    ACCEPTED_BOUNDS,
    ATTENDED,
    CONTEXT,
    DRAFTS,
    ERRORS,
    EVENTS,
    EVICTED,
    HOOKS,
    LAST,
    PAUSED,
    PLUGIN_EVENTS,
    PROMPT,
    RATE,
    RECORDS,
    REQUESTS,
    STEPS,
    WRITER,
)
from sampler_hook.metrics import Sample
from sampler_hook.scribe import Counts
from sampler_hook.wrapping import Site
from sparseety.logwriter import LogWriter
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
    paused: dict[str, bool],
) -> Iterator[Sample]:
    """How complete the log is."""
    ours = {"source": "plugin"}
    yield from (total(REQUESTS, count, ours, decision=decision) for decision, count in requests.items())
    yield Sample(RATE, ours, rate)
    yield from (Sample(PAUSED, ours | {"reason": reason}, float(now)) for reason, now in paused.items())


def of_writers(writers: Sequence[LogWriter], records: Mapping[str, int]) -> Iterator[Sample]:
    """Of a process: its writers so far, the last one in use, and what was given to them, by event."""
    ours = {"source": "plugin"}
    done = [writer.done for writer in writers]
    yield from (total(RECORDS, count, ours, kind=kind) for kind, count in records.items())
    yield total(WRITER.written, sum(each.records for each in done), ours)
    yield total(WRITER.bytes, sum(each.bytes for each in done), ours)
    for reason in done[-1].dropped:
        yield total(WRITER.dropped, sum(each.dropped[reason] for each in done), ours, reason=reason)
    for event in done[-1].segments:
        yield total(WRITER.segments, sum(each.segments[event] for each in done), ours, event=event)
    flushes = [sum(column) for column in zip(*(each.flushes for each in done), strict=True)]
    yield from histogram(WRITER.flush, flushes, ours)
    queued, limit = writers[-1].queue
    yield Sample(WRITER.queue, ours, queued)
    yield Sample(WRITER.queue_limit, ours, limit)
    yield Sample(WRITER.failing, ours, float(not (writers[-1].healthy or writers[-1].closed)))
    if (last := max((each.last for each in done if each.last is not None), default=None)) is not None:
        yield Sample(WRITER.last_write, ours, last)
    if (free := done[-1].disk_free) is not None:
        yield Sample(WRITER.disk_free, {}, free)


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
