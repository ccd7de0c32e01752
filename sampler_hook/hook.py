"""The switch: wraps vLLM's methods, opens the log in the process that has a scheduler, and gets out at the first fault.

A wrapper always calls vLLM's own method, with the arguments it got. What we do besides happens in `_safely`: anything
it raises takes the wrappers of its part off again, is logged once and stands in the log; generation goes on.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from typing import Any

from sampler_hook import adapters, figures, metrics
from sampler_hook.control import ControlFile
from sampler_hook.journal import Journal
from sampler_hook.settings import WORKER_KINDS, HookSettings
from sampler_hook.taps import CAPTURE, tap
from sampler_hook.wrapping import OURS, Site, Tap, attach, detach
from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError

# vLLM gives handlers to the "vllm" logger alone; only below that name do our lines appear where its own do.
log = logging.getLogger("vllm.sparseety")

_LOOK_SECONDS = 1.0  # between looks at the control file, and between publications of metrics
_GATHER_SECONDS = 0.005  # after a step, before its records are made: by then the engine waits for its workers again
# Hooks that must have fired by the time that these have: without them nothing, or not everything, is recorded.
_SILENT_AFTER_STEPS, _SILENT_AFTER_SECONDS = 100, 60.0
_MUST_FIRE = ("Scheduler.add_request", "Scheduler.update_from_output", "Request.from_engine_core_request")


def install(settings: HookSettings) -> None:
    """Wrap the methods of this process's vLLM. Raises SparseetyError; then nothing is wrapped."""
    vllm = adapters.probe(untested=settings.untested)
    if any(hasattr(getattr(target.owner, target.name), OURS) for target in vllm.targets):
        return  # by another copy of this module
    if settings.metrics:
        metrics.publish_here(os.environ)
    Hook(settings, vllm).attach()


class Hook:
    """The wrappers of one process, and the logs of its schedulers (one, as a rule)."""

    def __init__(self, settings: HookSettings, vllm: adapters.Vllm) -> None:
        self._settings, self._vllm = settings, vllm
        self._clock = monotonic_clock()
        self._control = ControlFile(settings)
        self._sites: list[Site] = []
        self._journals: list[Journal] = []  # open ones
        self._latest: list[Journal] = []  # of each scheduler, open or not
        self._schedulers: list[weakref.ref[Any]] = []  # all that there are
        self._failed: dict[str, int] = {}  # parts that a fault has ended -> how many faults
        self._on = True  # wanted by the operator
        self._switching = threading.RLock()
        self._looking = threading.Lock()
        self._waking = threading.Event()
        self._attendant: threading.Thread | None = None
        self._closing = False
        self._pid = os.getpid()
        self._silent: set[str] = set()  # hooks that were reported

    # ------------------------------------------------------------------------------------- putting on, taking off

    def attach(self) -> None:
        """Wrap what this process has; where it makes no scheduler, no wrapper will ever find one."""
        self._put_on(self._vllm.targets)

    def _parts(self) -> set[str]:
        """Of adapters.POINTS, those that are wanted and have not failed."""
        wanted = {"tokens", "events"} | (self._control.now.capture & {"kv"})
        if self._settings.capture & WORKER_KINDS:
            wanted.add("workers")
        return wanted - self._failed.keys()

    def _put_on(self, targets: list[adapters.Target]) -> None:
        there = {str(site.target) for site in self._sites}
        for target in targets:
            if target.part in self._parts() and str(target) not in there:
                self._sites.append(attach(target, tap(target) or self._own_taps()[str(target)], self._safely))

    def _own_taps(self) -> dict[str, Tap]:
        """Those that open and close a log."""
        itself: Callable[[Any], Any] = lambda instance: instance  # noqa: E731
        close: Callable[..., None] = lambda scheduler, args, kwargs: self._close_journal(scheduler)  # noqa: E731
        return {
            "Scheduler.__init__": Tap(itself, after=lambda scheduler, _, args, kwargs: self._meet(scheduler)),
            # First: nothing is sampled from here on, and vLLM's own may hang.
            "Scheduler.shutdown": Tap(itself, before=close),
            "EngineCore.shutdown": Tap(lambda core: getattr(core, "scheduler", None), before=close),
        }

    def detach(self, parts: set[str] | None = None) -> None:
        """Give vLLM its own methods back: all, or those of some parts."""
        for site in [site for site in self._sites if parts is None or site.target.part in parts]:
            detach(site)
            self._sites.remove(site)

    def _safely(self, site: Site, action: Callable[..., object], *args: Any) -> None:
        if site.target.part in self._failed:
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 -- whatever we did wrong, the request being served must not notice
            self._fault(site.target.part, error)

    def _fault(self, part: str, error: Exception) -> None:
        with self._switching:
            first = part not in self._failed
            self._failed[part] = self._failed.get(part, 0) + 1
            if not first:
                return
            if part != "tokens":
                self.detach({part})
                log.error(
                    "sparseety: recording %s failed and switched itself off; vLLM serves on", part, exc_info=error
                )
                for journal in self._latest:
                    journal.capture.event(kind="part_off", detail=f"{part}: {type(error).__name__}")
                return
            self.detach()
            journals, self._journals = self._journals, []
        log.error("sparseety: capture failed and switched itself off; vLLM serves on, uncaptured", exc_info=error)
        reason = f"capture switched itself off: {type(error).__name__}"
        for journal in journals:
            journal.leave(reason)
        # Closed, the log says that nothing after this was going to be recorded. Closing waits for the disk: not here.
        threading.Thread(target=_close, args=(journals,), name="sparseety-log-closing").start()

    # --------------------------------------------------------------------------------------------------- the logs

    def _meet(self, scheduler: Any) -> None:
        """A scheduler has been made."""
        if any(known() is scheduler for known in self._schedulers):  # its class calls __init__ twice
            return
        self._schedulers.append(weakref.ref(scheduler))
        if self._attendant is None or self._pid != os.getpid():
            self._pid = os.getpid()
            atexit.register(self.close)
            multiprocessing_util.Finalize(None, self.close, exitpriority=0)  # its children end without atexit
            self._attendant = threading.Thread(target=self._attend, name="sparseety-attendant", daemon=True)
            self._attendant.start()
        self._look_at_control()
        self._on = self._control.now.on
        if self._on:
            self._open_journal(scheduler)
        else:
            self.detach()
            log.info("sparseety: switched off by %s", self._settings.control)

    def _open_journal(self, scheduler: Any) -> None:
        self._put_on([*self._vllm.targets, *adapters.in_engine()])
        before = next((journal for journal in self._latest if journal.scheduler is scheduler), None)
        try:
            journal = Journal(
                self._settings,
                scheduler,
                version=self._vllm.version,
                control=self._control,
                sites=self._sites,
                parts=self._parts(),
                clock=self._clock,
                before=before,
            )
        except SparseetyError as error:
            self.detach()
            log.error("sparseety: %s; vLLM serves, nothing is captured", error)
            return
        except Exception:
            self.detach()
            raise
        journal.capture.wake = self._waking.set
        journal.capture.scribe.fault = self._fault
        self._journals.append(journal)
        self._latest = [*(other for other in self._latest if other is not before), journal]
        setattr(scheduler, CAPTURE, journal.capture)
        if (pool := adapters.block_pool(scheduler)) is not None:
            setattr(pool, CAPTURE, journal.capture)
        log.info("sparseety: capturing sampled tokens, which are content, into %s", journal.writer.path)

    def _close_journal(self, scheduler: Any) -> None:
        for journal in [journal for journal in self._journals if journal.scheduler is scheduler]:
            self._journals.remove(journal)
            setattr(scheduler, CAPTURE, None)
            self._drain(journal)
            journal.close()

    def close(self) -> None:
        """End it all: the process ends."""
        if self._pid != os.getpid():  # a fork's copy: none of this is its own, and its locks may be held for ever
            return
        self._closing = True
        self._waking.set()
        if self._attendant is not None and self._attendant is not threading.current_thread():
            self._attendant.join(_LOOK_SECONDS)  # it may be publishing into a folder that is about to go
        for journal in list(self._journals):
            self._drain(journal)
        self._journals = []
        latest, self._latest = self._latest, []
        for journal in latest:
            journal.end()

    # ---------------------------------------------------------------------------------------------- the attendant

    def _attend(self) -> None:
        """Make records of what the engine's thread has queued; once a second look around."""
        look_at = 0.0
        said: set[type[Exception]] = set()
        while not self._closing:
            if self._waking.wait(_LOOK_SECONDS):
                time.sleep(_GATHER_SECONDS)
                self._waking.clear()
            for journal in list(self._journals):
                self._drain(journal)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_SECONDS
                try:
                    self.look_around()
                except Exception as error:
                    if type(error) not in said:  # each kind once: this may come every second
                        said.add(type(error))
                        log.exception("sparseety: a bug beside the capture; capture goes on")

    def _drain(self, journal: Journal) -> None:
        try:
            while journal.capture.drain(1):
                time.sleep(0)  # between steps the interpreter's lock is free for the engine
        except Exception as error:  # noqa: BLE001 -- as in _safely
            self._fault("tokens", error)

    def look_around(self) -> None:
        """What is due once a second."""
        with self._looking:
            if self._closing:
                return
            if self._look_at_control():
                self._obey()
            for journal in list(self._journals):
                self._report_silent(journal)
            if self._settings.metrics:
                self._publish()

    def _look_at_control(self) -> bool:
        try:
            return self._control.changed()
        except SparseetyError as error:
            log.error("sparseety: %s", error)
            return False

    def _obey(self) -> None:
        """The control file says something new."""
        now = self._control.now
        with self._switching:
            if now.on and not self._on:
                self._on = True
                self._failed.clear()
                log.info("sparseety: switched on")
                for scheduler in [known() for known in self._schedulers]:
                    if scheduler is not None:
                        self._open_journal(scheduler)
            elif not now.on and self._on:
                self._on = False
                self.detach()
                log.info("sparseety: switched off; vLLM has its own methods back")
                journals, self._journals = self._journals, []
                for journal in journals:
                    self._drain(journal)
                    journal.leave("switched off by the operator", journal.capture.scribe.open_requests())
                _close(journals)
            elif now.on:
                self.detach({"kv"} - self._parts())
                self._put_on([*self._vllm.targets, *adapters.in_engine()])
                for journal in self._journals:
                    journal.obey(self._parts())

    def _report_silent(self, journal: Journal) -> None:
        """A hook that never fires is a hole in the record that looks like peace."""
        fired = {str(site.target): site.fired for site in self._sites}
        steps, age = journal.counts.steps, time.monotonic() - journal.opened
        added = fired.get("Scheduler.add_request", False)
        if not (steps >= _SILENT_AFTER_STEPS or (added and age > _SILENT_AFTER_SECONDS)):
            return
        for name in _MUST_FIRE:
            if fired.get(name) is False and name not in self._silent:
                self._silent.add(name)
                journal.capture.event(kind="hook_silent", detail=name)
                log.warning(
                    "sparseety: vLLM has served requests without calling %s; what hangs on it is not recorded", name
                )

    def _publish(self) -> None:
        expected = adapters.expected(self._parts() | self._failed.keys())
        errors = {part: self._failed.get(part, 0) for part in adapters.PARTS}
        paused = {"operator": not self._on, "errors": "tokens" in self._failed}
        for journal in self._latest:
            journal.publish(figures.of_hooks(expected, self._sites, errors, journal.engine), paused)


def _close(journals: list[Journal]) -> None:
    for journal in journals:
        journal.close()
