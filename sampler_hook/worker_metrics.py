"""A worker's numbers on vLLM's /metrics: added up and published beside its own thread, at most once a second."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from sampler_hook import adapters, figures
from sampler_hook.catalogue import WORKER_KINDS
from sampler_hook.counting import Counting
from sampler_hook.detail import affordable
from sampler_hook.metrics import Publisher, Sample
from sampler_hook.settings import HookSettings
from sampler_hook.tally import Tally, Windows
from sampler_hook.worker_figures import WorkerFigures
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, SparsityStart

log = logging.getLogger("vllm.sparseety")

_ALL_SECONDS = 10.0  # windows of experts end where nothing comes, too
_SAMPLES_AT_ONCE = 32  # written before the interpreter's lock is offered to the model's thread


class WorkerMetrics:
    """Of one worker, from its start on: its counters go on where counting is paused and resumed."""

    def __init__(
        self, publisher: Publisher, worker_figures: WorkerFigures, tally: Tally, counting: Counting, now: Clock
    ) -> None:
        self._publisher, self._figures, self._counting = publisher, worker_figures, counting
        self._tally, self._threshold = tally, counting.start.threshold
        self._windows = Windows(len(tally.routers), now())
        self._now = now
        self._all_at = now()
        self._records: deque[AnyRecord] = deque()  # not added up yet
        self._kinds: Counter[str] = Counter()

    def note(self, record: AnyRecord) -> None:
        """In the worker's own thread, between two steps: it goes to the log, too."""
        self._records.append(record)

    def publish(self, writers: Sequence[LogWriter], faults: int) -> None:
        """Bring the metrics up to date. In one thread at a time. writers: all so far. Raises OSError."""
        now = self._now()
        if self._records or now >= self._all_at:
            self._all_at = now + _ALL_SECONDS
            self._write(self._sums(now))
        self._write(
            [
                *self._figures.health(self._counting.hooks(), faults),
                *figures.of_writers(writers, {kind: self._kinds[kind] for kind in WORKER_KINDS}),
            ]
        )

    def _sums(self, now: float) -> list[Sample]:
        while self._records:
            record = self._records.popleft()
            self._kinds[str(record.__struct_config__.tag)] += 1
            if isinstance(record, SparsityStart):
                self._threshold = record.threshold
            self._tally.add(record)
            time.sleep(0)  # a step may want to begin
        self._windows.look(self._tally.all_loads(), now)
        return [
            *self._figures.activations(self._tally),
            *self._figures.routing(self._tally, self._windows.latest),
            *self._figures.weights(self._tally),
            *self._figures.config(self._threshold, self._tally),
        ]

    def _write(self, samples: list[Sample]) -> None:
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            self._publisher.write(samples[first : first + _SAMPLES_AT_ONCE])
            time.sleep(0)

    def close(self) -> None:
        """What was published stays."""
        self._publisher.close()


def metrics_of(
    hook: HookSettings, environ: Any, config: Any, counting: Counting, now: Clock = time.monotonic
) -> WorkerMetrics | None:
    """now: in seconds that never go back.

    None: nothing is to be published, or nowhere, or it would be too many series even as totals.
    """
    publisher = Publisher(environ)
    if not hook.metrics or not publisher.folder:
        return None
    start = counting.start
    detail = affordable(
        hook.detail,
        hook.max_series,
        layers=_layers(config, start),
        experts=max((router.experts for router in start.routers), default=0),
        engines=adapters.engines(config),
    )
    first_rank = start.tensor_parallel_rank == 0
    if detail != hook.detail and first_rank:
        log.warning(
            "sparseety: metrics of sparsity with detail=%s may be more than SPARSEETY_HOOK_MAX_SERIES=%d: %s",
            *(hook.detail, hook.max_series, f"published with detail={detail}" if detail else "none are published"),
        )
    if detail is None:
        return None
    worker_figures = WorkerFigures(adapters.served_as(config), str(start.data_parallel_rank), detail, first_rank)
    tally = Tally(start, whole=adapters.workers(config) == 1)
    return WorkerMetrics(publisher, worker_figures, tally, counting, now)


def _layers(config: Any, start: SparsityStart) -> int:
    """Values of the label at most. The same on all ranks, which have to come to the same detail."""
    seen = {site.layer for site in start.sites} | {router.layer for router in start.routers}
    return 1 + (adapters.layers(config) or len(seen))  # one for modules that are of no layer
