"""Several workers, each a process with a log file of its own; the parent starts them, adds up, and ends them.

Parent and worker talk over a socket pair, in frames: four bytes of length, then a message in MessagePack. A worker says
how it is once a second and whenever it is asked. When the pair breaks, the parent is gone, and the worker drains.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from itertools import count

import msgspec
import uvloop

from proxy.config import ProxyConfig
from proxy.counters import Counters, LiveStream, ModelNames, Overview, Report
from proxy.serving import CLOSING_SECONDS, rest_collector
from proxy.worker import LOG_CLOSING_SECONDS, Summary, Worker
from sparseety.clock import monotonic_clock
from sparseety.errors import SparseetyError

log = logging.getLogger("sparseety.proxy")

TELL_SECONDS = 1.0
ASK_SECONDS = 1.0  # how long a scrape waits for a worker that is busy or stuck
SILENT_SECONDS = 10.0  # a worker that says nothing for so long hangs
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # before a worker that died is replaced; doubled each time
LASTING_SECONDS = 60.0  # a worker that lived so long starts the delays anew

# ----------------------------------------------------------------------------------------------------- messages


class Setup(msgspec.Struct, tag=True):
    config: str  # ProxyConfig as JSON, without the admin token


class Ask(msgspec.Struct, tag=True):
    serial: int
    streams: bool


class Stop(msgspec.Struct, tag=True):
    pass


class Hurry(msgspec.Struct, tag=True):
    pass


class Listening(msgspec.Struct, tag=True):
    pass


class Refused(msgspec.Struct, tag=True):
    message: str  # why this worker cannot start, for the user


class Told(msgspec.Struct, tag=True):
    serial: int  # of the question; 0: unasked
    report: Report


class Ended(msgspec.Struct, tag=True):
    summary: Summary


Order = Setup | Ask | Stop | Hurry
News = Listening | Refused | Told | Ended

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_news = msgspec.msgpack.Decoder(News).decode


def _send(writer: asyncio.StreamWriter, message: Order | News) -> None:
    if not writer.is_closing():
        data = _encode(message)
        writer.write(len(data).to_bytes(4, "big") + data)


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    """None: the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# --------------------------------------------------------------------------------------------------- the parent


class _Slot:
    """One worker's place: its socket outlives it, so that connections which wait there go to its successor."""

    def __init__(self, number: int, opened: socket.socket) -> None:
        self.number, self.socket = number, opened
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.report: Report | None = None
        self.heard = 0.0  # when it last said how it is, on the monotonic clock
        self.listening = False
        self.refused: str | None = None
        self.summary: Summary | None = None
        self.questions: dict[int, asyncio.Future[None]] = {}

    def send(self, order: Order) -> None:
        if self.writer:
            _send(self.writer, order)


class Fleet:
    """A `Relaying` of several processes."""

    def __init__(self, config: ProxyConfig, sockets: list[socket.socket]) -> None:
        self._config = config
        self._slots = [_Slot(number, opened) for number, opened in enumerate(sockets, start=1)]
        self._gone = Counters()  # the sums of workers that have ended
        self._names = ModelNames(config.metrics_models)
        self._restarts = 0
        self._serials = count(1)
        self._stopping = asyncio.Event()
        self._all_listen = asyncio.Event()
        self._hurried = False

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, listening: asyncio.Event) -> Summary:
        self._all_listen = listening
        keeping = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stopped, *keeping), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self._tell_all(Stop())
            for slot in self._slots:
                slot.socket.close()  # or connections would wait here for nobody
            await self._drained(keeping, hurry)
        finally:
            stopped.cancel()
            await self._kill_all(keeping)
        for task in keeping:
            task.result()  # raises what kept the first workers from starting
        return self._summary()

    async def look(self, *, streams: bool = False) -> Overview:
        questions = [self._ask(slot, streams) for slot in self._slots if slot.report is not None]
        if questions:
            await asyncio.wait(questions, timeout=ASK_SECONDS)
        return self.overview()

    def overview(self) -> Overview:
        reports = [slot.report for slot in self._slots if slot.report is not None]
        latest = time.monotonic() - SILENT_SECONDS
        silent = sum(slot.report is not None and slot.heard < latest for slot in self._slots)
        return Overview(reports, self._gone, self._names, len(self._slots), self._restarts, silent)

    def _ask(self, slot: _Slot, streams: bool) -> asyncio.Future[None]:
        serial = next(self._serials)
        question = slot.questions[serial] = asyncio.get_running_loop().create_future()
        slot.send(Ask(serial, streams))
        return question

    def _tell_all(self, order: Order) -> None:
        for slot in self._slots:
            slot.send(order)

    async def _drained(self, keeping: list[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Until all workers have ended, or should have."""
        patience = 2 * CLOSING_SECONDS + LOG_CLOSING_SECONDS + 1
        ended = asyncio.gather(*keeping, return_exceptions=True)
        hurried = asyncio.create_task(hurry.wait())
        seconds = self._config.drain_seconds + patience
        await asyncio.wait((ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            self._tell_all(Hurry())
            await asyncio.wait((ended,), timeout=patience)
        hurried.cancel()

    async def _kill_all(self, keeping: list[asyncio.Task[None]]) -> None:
        for slot in self._slots:
            if slot.process and slot.process.returncode is None:
                log.error("worker %d (pid %d) does not end and is killed", slot.number, slot.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    slot.process.kill()
        self._stopping.set()
        await asyncio.gather(*keeping, return_exceptions=True)

    def _summary(self) -> Summary:
        summaries = [slot.summary for slot in self._slots]
        broken: list[LiveStream] = [stream for summary in summaries if summary for stream in summary.broken]
        # A worker that died while draining has said nothing at its end: its log is not closed.
        closed = all(summary is not None and summary.log_closed for summary in summaries)
        return Summary(self._gone, broken, closed)

    async def _keep(self, slot: _Slot) -> None:
        """Keep one place filled. Raises SparseetyError where the very first worker cannot start."""
        delay = FIRST_DELAY
        while not self._stopping.is_set():
            begun = time.monotonic()
            how = await self._live(slot)
            if self._stopping.is_set():
                return
            if not self._all_listen.is_set():
                raise SparseetyError(slot.refused or f"worker {slot.number} could not start: {how}")
            if time.monotonic() - begun > LASTING_SECONDS:
                delay = FIRST_DELAY
            log.error("worker %d %s; its requests are broken off; another starts in %g s", slot.number, how, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(LONGEST_DELAY, 2 * delay)
            self._restarts += 1

    async def _live(self, slot: _Slot) -> str:
        """One worker's life; returns how it ended, for people."""
        try:
            slot.process, reader, slot.writer = await self._start(slot)
        except OSError as error:  # no memory, no processes, no descriptors: perhaps later
            return f"could not be started ({error.strerror})"
        slot.send(Setup(self._config.model_dump_json(exclude={"admin_token"})))
        if self._stopping.is_set():
            slot.send(Stop())
        while (frame := await _receive(reader)) is not None:
            self._news(slot, _decode_news(frame))
        code = await slot.process.wait()
        self._bury(slot)
        how = slot.refused or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        return f"(pid {slot.process.pid}) has died ({how})"

    async def _start(
        self, slot: _Slot
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        slot.refused = slot.summary = None
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), slot.socket.fileno())
            try:
                # -P: the folder it is started in may hold modules of the same names. The path is this process's own.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "proxy.workers", *map(str, descriptors)),
                    pass_fds=descriptors,
                    stdin=asyncio.subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return process, reader, writer

    def _news(self, slot: _Slot, news: News) -> None:
        match news:
            case Listening():
                slot.listening = True
                if all(each.listening for each in self._slots):
                    self._all_listen.set()
            case Refused(message):
                slot.refused = message
            case Told(serial, report):
                slot.report, slot.heard = report, time.monotonic()
                if question := slot.questions.pop(serial, None):
                    _answer(question)
            case Ended(summary):
                slot.summary = summary
                if slot.report:
                    slot.report.counters = summary.counters

    def _bury(self, slot: _Slot) -> None:
        """In one go, so that no scrape sees its counts twice or not at all."""
        if slot.report:
            self._gone.merge(slot.report.counters, self._names)
        slot.report = None
        for question in slot.questions.values():
            _answer(question)
        slot.questions.clear()
        if slot.writer:
            slot.writer.close()
            slot.writer = None


def _answer(question: asyncio.Future[None]) -> None:
    if not question.done():
        question.set_result(None)


# --------------------------------------------------------------------------------------------------- the worker


async def _work(control: socket.socket, opened: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=control)
    setup = await _receive(reader)
    if setup is None:
        return 0
    order = _decode_order(setup)
    assert isinstance(order, Setup)
    config = ProxyConfig.model_validate_json(order.config)
    try:
        worker = Worker(config, opened, clock=monotonic_clock())
    except SparseetyError as error:
        _send(writer, Refused(str(error)))
        await writer.drain()
        return error.exit_code
    stop, hurry, listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
    helpers = [
        asyncio.create_task(_obey(reader, writer, worker, stop, hurry)),
        asyncio.create_task(_tell(writer, worker, listening)),
    ]
    summary = await worker.run(stop, hurry, listening)
    for helper in helpers:
        helper.cancel()
    with contextlib.suppress(ConnectionError):
        _send(writer, Ended(summary))
        writer.close()
        await writer.wait_closed()
    return 0


async def _obey(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    worker: Worker,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    while (frame := await _receive(reader)) is not None:
        match _decode_order(frame):
            case Ask(serial, streams):
                _send(writer, Told(serial, await worker.newest_report(streams=streams)))
            case Stop():
                stop.set()
            case Hurry():
                hurry.set()
    stop.set()  # the parent is gone: nobody would replace this worker, or end it


async def _tell(writer: asyncio.StreamWriter, worker: Worker, listening: asyncio.Event) -> None:
    await listening.wait()
    _send(writer, Told(0, worker.report()))
    _send(writer, Listening())
    while True:
        await asyncio.sleep(TELL_SECONDS)
        _send(writer, Told(0, worker.report()))


def main(argv: list[str]) -> int:
    # A Ctrl-C reaches the whole group, and so may a SIGTERM: it is the parent that says when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format=f"%(levelname)s %(name)s[{os.getpid()}]: %(message)s", level=logging.WARNING)
    control, opened = (socket.socket(fileno=int(descriptor)) for descriptor in argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rest_collector()
        return runner.run(_work(control, opened))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
