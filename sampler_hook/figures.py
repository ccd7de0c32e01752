"""Which numbers of an engine go into which metric. Definitions: catalogue.py."""

from collections import Counter
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
from sparseety.metrics import BUILD_INFO, OVERHEAD_SECONDS, Metric
from sparseety.records import FORMAT_VERSION


def of_counts(counts: Counts, model: str, engine: str) -> Iterator[Sample]:
    """What the engine did."""
    both = {"model_name": model, "engine": engine}
    yield from (_total(PROMPT, value, both, status=status) for status, value in counts.prompt.items())
    yield from (_total(EVICTED, value, both, reason=reason) for reason, value in counts.evicted.items())
    yield from (_total(DRAFTS, value, both, outcome=outcome) for outcome, value in counts.drafts.items())
    for layer_type, (read, before) in counts.attended.items():
        yield _total(ATTENDED, read, both, layer_type=layer_type)
        yield _total(CONTEXT, before, both, layer_type=layer_type)
    lengths = Counter(counts.accepted_lengths)
    values = [sum(n for size, n in lengths.items() if low < size <= bound) for low, bound in _between(ACCEPTED_BOUNDS)]
    values.append(sum(n for size, n in lengths.items() if size > ACCEPTED_BOUNDS[-1]))
    yield from _histogram(ACCEPTED, ACCEPTED_BOUNDS, values, sum(size * n for size, n in lengths.items()), both)
    one = {"engine": engine}
    yield from _histogram(STEPS, OVERHEAD_SECONDS, counts.overhead, counts.overhead_ns / 1e9, one)
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
    yield from (_total(REQUESTS, count, ours, decision=decision) for decision, count in requests.items())
    yield Sample(RATE, ours, rate)
    yield from (_total(RECORDS, records.get(kind, 0), ours, kind=kind) for kind in KINDS)
    yield _total(DROPPED, lost, ours, reason="other")
    yield from (Sample(PAUSED, ours | {"reason": reason}, float(now)) for reason, now in paused.items())


def of_events(events: Mapping[str, int], engine: str) -> Iterator[Sample]:
    """What happened to the engine as a whole."""
    yield from (_total(PLUGIN_EVENTS, events.get(kind, 0), {"engine": engine}, kind=kind) for kind in EVENTS)


def of_hooks(expected: Iterable[str], sites: Iterable[Site], errors: dict[str, int], engine: str) -> Iterator[Sample]:
    """Which hooks are there, by name."""
    there = {str(site.target): site for site in sites}
    for name in expected:
        site = there.get(name)
        states = {"expected": True, "attached": site is not None and site.attached, "fired": bool(site and site.fired)}
        for state, value in states.items():
            yield Sample(HOOKS, {"engine": engine, "site": name, "state": state}, float(value))
    yield from (_total(ERRORS, count, {"engine": engine}, site=part) for part, count in errors.items())


def _total(metric: Metric, value: float, labels: dict[str, str], **more: str) -> Sample:
    return Sample(metric, labels | more, value, "_total")


def _histogram(
    metric: Metric, bounds: tuple[float, ...], values: list[int], total: float, labels: dict[str, str]
) -> Iterator[Sample]:
    """values: observations up to each bound and past the one before; the last: past all. The collector adds them up."""
    for bound, value in zip([*map(str, map(float, bounds)), "+Inf"], values, strict=True):
        yield Sample(metric, labels | {"le": bound}, value, "_bucket")
    yield Sample(metric, labels, total, "_sum")


def _between(bounds: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    return zip((-1.0, *bounds), bounds, strict=False)
