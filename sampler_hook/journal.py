"""One engine's log: its writer, what follows the scheduler for it, and its published numbers."""

import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from sampler_hook import adapters, figures, identity
from sampler_hook.attention import layers
from sampler_hook.catalogue import ENGINE_KINDS
from sampler_hook.control import ControlFile
from sampler_hook.detail import series
from sampler_hook.engine import EngineCapture
from sampler_hook.kv import KvLedger
from sampler_hook.metrics import Publisher, Sample
from sampler_hook.scribe import Counts, Scribe
from sampler_hook.settings import HookSettings
from sampler_hook.wrapping import Site
from sparseety.clock import Clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, EngineEvent, Gap, Scope
from sparseety.sampling import key_id

log = logging.getLogger("vllm.sparseety")

# vLLM's default is to kill its engine at once after asking it to end; what is not written by then is lost.
_FLUSH_SECONDS = 0.01


class Journal:
    def __init__(
        self,
        settings: HookSettings,
        scheduler: Any,
        *,
        version: str,
        control: ControlFile,
        sites: Iterable[Site],
        parts: Collection[str],
        clock: Clock,
        before: "Journal | None" = None,
    ) -> None:
        """Open the log and begin to follow. before: this scheduler's last one, whose counts go on.

        Raises SparseetyError where the log cannot be written.
        """
        config = scheduler.vllm_config
        self._settings, self._control, self._clock = settings, control, clock
        self._scheduler = weakref.ref(scheduler)
        self._pid = os.getpid()  # whose it is: a fork's copy must not write a second ending into the file
        self.opened = time.monotonic()
        self.engine = str(adapters.data_parallel_rank(config))
        self._key = key_id(settings.sample_key)
        scope = Scope(sample=control.now.sample, sample_key=self._key if control.now.sample < 1.0 else None)
        self.writer = LogWriter(settings.folder, "engine", scope, clock=clock, flush_seconds=_FLUSH_SECONDS)
        self._writers: list[LogWriter] = [*(before._writers if before else ()), self.writer]  # counters go on
        self._kinds: Counter[str] = Counter() if before is None else before._kinds
        self._events: Counter[str] = Counter() if before is None else before._events
        try:
            self._put(
                identity.engine_start(
                    config,
                    version=version,
                    capture=control.now.capture,
                    expected=adapters.expected(parts),
                    attached=[str(site.target) for site in sites],
                    clock=clock,
                )
            )
            # Requests under way are not known, and whatever comes of them is not recorded.
            strangers = list(getattr(scheduler, "requests", ()))
            if strangers:
                self._put(Gap(ts=clock(), reason="under way when recording began", count=len(strangers)))
            self.model = adapters.served_as(config)
            self._publisher: Publisher = _publisher(settings, config) if before is None else before._publisher
            scribe = Scribe(
                self._put,
                clock,
                generation_eos=identity.generation_eos(config.model_config),
                attention=layers(adapters.text_config(config.model_config)),
                strangers=strangers,
                counts=None if before is None else before.counts,
            )
            self.counts: Counts = scribe.counts
            self.capture = EngineCapture(
                scribe,
                self._put,
                clock,
                wants=lambda external_id: control.now.wants(settings.sample_key, external_id),
                strangers=strangers,
            )
            self.follow(parts)
        except Exception as error:
            self.writer.put(Gap(ts=clock(), reason=f"capture could not begin: {type(error).__name__}", count=1))
            self.writer.close()
            raise

    @property
    def scheduler(self) -> Any:
        return self._scheduler()

    def _put(self, record: AnyRecord) -> bool:
        self._kinds[record.__struct_config__.tag] += 1  # type: ignore[index]
        if isinstance(record, EngineEvent):
            self._events[record.kind] += 1
        return self.writer.put(record)

    def follow(self, parts: Collection[str]) -> None:
        """Record what the control says from here on; parts: those whose hooks are on."""
        now, scribe = self._control.now, self.capture.scribe
        if "kv" not in parts:
            scribe.kv = None
        elif scribe.kv is None:
            scribe.kv = KvLedger(adapters.block_sizes(self.scheduler))
        self.capture.for_workers = {"capture": sorted(now.capture), "near_zero": now.near_zero}

    def obey(self, parts: Collection[str]) -> None:
        """The control has changed."""
        self.follow(parts)
        now = self._control.now
        self.capture.event(
            kind="control",
            detail=",".join(sorted(now.capture)),
            sample=now.sample,
            sample_key=self._key,
            near_zero=now.near_zero,
        )

    def leave(self, reason: str, requests: list[int] | None = None) -> None:
        """Say that nothing more is recorded of these requests; None: of any that is open now."""
        if requests is None or requests:
            # Not by _put, whose fault may be the reason.
            self.writer.put(Gap(ts=self._clock(), reason=reason, count=len(requests or [0]), requests=requests or []))
            self._kinds["gap"] += 1

    def close(self) -> None:
        if self._pid == os.getpid():
            self.writer.close()

    def end(self) -> None:
        """Close, and publish nothing more."""
        self.close()
        if self._pid == os.getpid():
            self._publisher.close()

    def publish(self, hooks: Iterable[Sample], paused: dict[str, bool]) -> None:
        """Bring the metrics up to date."""
        if self._pid != os.getpid():
            return
        counts = self.counts
        self._publisher.write(figures.of_counts(counts, self.model, self.engine))
        self._publisher.write(figures.of_events(self._events, self.engine))
        self._publisher.write(hooks)
        self._publisher.write(
            figures.of_capture(
                requests=counts.requests,
                rate=0.0 if any(paused.values()) else self._control.now.sample,
                paused=paused,
            )
        )
        self._publisher.write(figures.of_writers(self._writers, {kind: self._kinds[kind] for kind in ENGINE_KINDS}))


def _publisher(settings: HookSettings, config: Any) -> Publisher:
    most = series(engines=adapters.engines(config))
    if most <= settings.max_series:
        return Publisher(os.environ)
    log.warning(
        "sparseety: metrics may be %d series, more than SPARSEETY_HOOK_MAX_SERIES=%d: none are published",
        *(most, settings.max_series),
    )
    return Publisher({})
