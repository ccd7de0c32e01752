"""Which numbers of an engine are published, and under which names. docs/vllm-plugin.md lists the same."""

from collections import Counter
from collections.abc import Iterable, Iterator

from sampler_hook.metrics import Metric, Sample
from sampler_hook.scribe import OVERHEAD_BOUNDS, Counts
from sampler_hook.wrapping import Site

ACCEPTED_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

PROMPT = Metric("sparseety_prompt_tokens_by_status", "counter", "ALPHA Prompt tokens by how their KV came to be.")
EVICTED = Metric(
    "sparseety_kv_evicted_tokens",
    "counter",
    "ALPHA KV token slots given up: by preemption of their request; by capacity, where KV blocks are recorded.",
)
CONTEXT = Metric(
    "sparseety_attention_context_tokens", "counter", "ALPHA Positions full attention would have read. Derived."
)
ATTENDED = Metric(
    "sparseety_attention_attended_tokens",
    "counter",
    "ALPHA Positions read in a layer of this type, by the model's configuration. Derived, output tokens only.",
)
DRAFTS = Metric("sparseety_draft_tokens", "counter", "ALPHA Speculative tokens by outcome.")
ACCEPTED = Metric("sparseety_draft_accepted_length", "histogram", "ALPHA Accepted draft tokens of a row that had any.")
REQUESTS = Metric("sparseety_capture_sampled_requests", "counter", "ALPHA Requests by whether they are recorded.")
RATE = Metric("sparseety_capture_sampling_ratio", "gauge", "ALPHA Share of requests recorded now, 0..1.")
RECORDS = Metric("sparseety_capture_records", "counter", "ALPHA Records handed to the writer, by event.")
DROPPED = Metric("sparseety_capture_records_dropped", "counter", "ALPHA Records that could not be written.")
PAUSED = Metric("sparseety_capture_paused", "gauge", "ALPHA 1 while nothing is recorded, by operator or errors.")
HOOKS = Metric("sparseety_plugin_hooks", "gauge", "ALPHA Hooks expected, attached, and fired at least once.")
STEPS = Metric("sparseety_plugin_step_overhead_seconds", "histogram", "ALPHA Time added to an engine step.")
ERRORS = Metric("sparseety_plugin_errors", "counter", "ALPHA Faults of the plugin, each of which ended a part of it.")
LAST = Metric("sparseety_plugin_last_event_timestamp_seconds", "gauge", "ALPHA Unix time of the last step recorded.")

ALL = (
    PROMPT, EVICTED, CONTEXT, ATTENDED, DRAFTS, ACCEPTED, REQUESTS, RATE, RECORDS,
    DROPPED, PAUSED, HOOKS, STEPS, ERRORS, LAST,
)  # fmt: skip


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
    yield from _histogram(STEPS, OVERHEAD_BOUNDS, counts.overhead, counts.overhead_ns / 1e9, one)
    yield Sample(LAST, one, counts.last_event)


def of_capture(
    *,
    requests: dict[str, int],
    rate: float,
    records: dict[str, int],
    lost: int,
    paused: dict[str, bool],
) -> Iterator[Sample]:
    """How complete the log is."""
    ours = {"source": "plugin"}
    yield from (_total(REQUESTS, count, ours, decision=decision) for decision, count in requests.items())
    yield Sample(RATE, ours, rate)
    yield from (_total(RECORDS, count, ours, kind=kind) for kind, count in records.items())
    yield _total(DROPPED, lost, ours, reason="other")
    yield from (Sample(PAUSED, ours | {"reason": reason}, float(now)) for reason, now in paused.items())


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
