"""Where work is done: in this process, or in a pool of them on this machine. Another kind is another `Executor`."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class WorkerDied(Exception):
    """This task, alone, killed the process it ran in."""


class Task(Protocol[T_co]):
    def result(self) -> T_co:
        """Waits for it. Raises what the task raised, or WorkerDied."""


class Executor(Protocol):
    """Functions and arguments must be picklable, and no task may wait for another."""

    slots: int  # tasks that go on at one time

    def submit(self, function: Callable[..., T], *arguments: Any) -> Task[T]: ...

    def close(self) -> None:
        """Gives up what goes on."""


class _Done(Generic[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        return self._value


class Inline:
    """In this process, at once."""

    slots = 1

    def submit(self, function: Callable[..., T], *arguments: Any) -> Task[T]:
        return _Done(function(*arguments))

    def close(self) -> None:
        pass


class LocalPool:
    """Processes on this machine, each at the other end of a pipe of its own.

    Not concurrent.futures' pool: what its processes share (pipes, locks) is left in disorder by one that is killed, and
    then it waits for ever.
    """

    def __init__(self, processes: int) -> None:
        self.slots = processes
        # Not forked: this process may have threads, and tokenizers' do not survive a fork.
        self._context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # where it is started later, it lets the thread that does so hear Ctrl-C
        self._calls: SimpleQueue[tuple[bytes, Future[bytes]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._processes: dict[threading.Thread, BaseProcess] = {}
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(processes)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Task[T]:
        # Pickled here and now, for the arguments may change.
        call, future = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL), Future[bytes]()
        self._calls.put((call, future))
        return _PoolTask(future)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """In a thread for each process: hand it one call at a time."""
        # Ctrl-C goes to all processes: one that is just beginning must not hear it. It inherits this.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        pipe: Connection | None = None
        while (item := self._calls.get()) is not None:
            call, future = item
            problem: Exception = WorkerDied()
            for _ in range(2):  # another program may have killed it: once more, in a new one
                try:
                    pipe = pipe or self._start()
                    pipe.send_bytes(call)
                    future.set_result(pipe.recv_bytes())
                    break
                except (EOFError, OSError):
                    pass
                except Exception as error:  # noqa: BLE001 -- such as no memory left, for who waits for this
                    problem = error
                self._end(pipe)
                pipe = None
            else:
                future.set_exception(problem)
        self._end(pipe)

    def _start(self) -> Connection:
        """A new process's pipe. Raises OSError."""
        with self._lock:
            if self._closed:
                raise OSError("closed")
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # then ours ends with that process
            self._processes[threading.current_thread()] = process
            return ours

    def _end(self, pipe: Connection | None) -> None:
        """Of this thread's process."""
        if pipe is not None:
            pipe.close()
        with self._lock:
            process = self._processes.pop(threading.current_thread(), None)
        if process is not None:
            process.kill()
            process.join()


class _PoolTask(Generic[T]):
    def __init__(self, future: "Future[bytes]") -> None:
        self._future = future

    def result(self) -> T:
        done, value = pickle.loads(self._future.result())
        if not done:
            raise value
        result: T = value
        return result


def _work(pipe: Connection) -> None:
    """A process of the pool: signals are the parent's business, and it does not outlive it."""
    collect_seldom()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(call: bytes) -> bytes:
    """(True, what came of it) or (False, what it raised)."""
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 -- raised again by who asked for it
        return pickle.dumps((False, error))


def collect_seldom() -> None:
    """Let the garbage collector run less often: what is read comes in large numbers, and in no cycles."""
    gc.set_threshold(100_000, 20, 20)


def _end_with(sentinel: int) -> None:
    with contextlib.suppress(OSError):
        wait([sentinel])
    os._exit(1)
