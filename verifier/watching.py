"""The loop of `verify-tokens --watch`: prints, sums up, serves metrics, ends on a signal."""

import json
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from sparseety.logreader import find_logs
from verifier import output
from verifier.executor import collect_seldom
from verifier.findings import RequestVerdict
from verifier.known import Waivers
from verifier.metrics import Metrics
from verifier.options import JudgeOptions
from verifier.run import executor_for
from verifier.tokenizer import TokenizerShelf
from verifier.watch import Watch

_POLL_SECONDS = 0.5
_LAST_SECONDS = 5.0  # to read what has come until the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    paths: list[str]
    checkpoint: Path | None
    jobs: int | None
    metrics_host: str
    metrics_port: int | None
    summary_seconds: float
    min_coverage: float
    json: bool
    verbose: bool
    quiet: bool
    show_text: bool


def run(settings: Settings, shelf: TokenizerShelf, options: JudgeOptions, known: Waivers | None) -> int:
    """known: faults that are counted apart. Returns the exit code of what was found. Raises SparseetyError."""
    collect_seldom()
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    executor = executor_for(find_logs(settings.paths), settings.jobs)
    try:
        checkpoint = settings.checkpoint or _beside(settings.paths)
        with closing(Watch(settings.paths, shelf, executor, checkpoint, options, known)) as watch:
            return _follow(settings, watch, stop, Metrics(drift=options.drift))
    finally:
        executor.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(settings: Settings, watch: Watch, stop: threading.Event, metrics: Metrics) -> int:
    watch.save()  # fails now, not in five seconds
    where = f"checkpoint {watch.path}"
    if settings.metrics_port is not None:
        port = metrics.serve(settings.metrics_host, settings.metrics_port)
        where += f", metrics at http://{settings.metrics_host}:{port}/metrics"
    _say([f"watching {' '.join(settings.paths)}: {where}"])
    summed_up = time.monotonic()
    while True:
        last = stop.is_set()  # then once more, for what came in the meantime
        stopping = partial(_is_after, time.monotonic() + _LAST_SECONDS) if last else stop.is_set
        for verdict in watch.poll(stopping):
            metrics.judged(verdict, engines=bool(watch.logs.engine_logs))
            _tell(verdict, settings)
        metrics.waiting(watch.logs.pending.backlog())
        metrics.served(name for log in watch.logs.engine_logs if log.engine for name in log.engine.served_names)
        metrics.unusable(watch.logs.problems.torn)
        _say([f"note: {note}" for note in watch.take_notes()])
        if last:
            break
        if settings.summary_seconds and time.monotonic() - summed_up >= settings.summary_seconds:
            summed_up = time.monotonic()
            _say([*watch.totals.lines()[:1], f"{watch.open} requests open"])
        stop.wait(_POLL_SECONDS)
    watch.save()
    exit_code = watch.exit_code(settings.min_coverage)
    _say([f"note: {note}" for note in watch.last_notes()])
    if settings.json:
        print(json.dumps(output.totals_json(watch.totals, exit_code)))
    else:
        print("\n".join(map(output.printable, watch.totals.lines())))
    return exit_code


def _is_after(moment: float) -> bool:
    return time.monotonic() > moment


def _tell(verdict: RequestVerdict, settings: Settings) -> None:
    lines = output.request_lines(verdict, settings.show_text, settings.verbose)
    if settings.json:
        # What does not pass, like the text; -v: everything.
        shown = bool(list(lines)) and not settings.quiet
        lines = iter([json.dumps(output.request_json(verdict, settings.show_text))] if shown else [])
    elif settings.quiet:
        return
    for line in lines:
        print(output.printable(line))
    sys.stdout.flush()


def _say(lines: list[str]) -> None:
    with suppress(OSError):  # nobody listens any more
        for line in lines:
            print(output.printable(line), file=sys.stderr, flush=True)


def _beside(paths: list[str]) -> Path:
    first = Path(paths[0])
    return (first if first.is_dir() else first.parent) / "verify-tokens.checkpoint"
