"""Where work is done: in this process, or in a pool of them on this machine. Another kind is another `Executor`."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
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
    """Processes on this machine."""

    def __init__(self, processes: int) -> None:
        self.slots = processes
        self._generation = 0
        self._pool = self._new_pool()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Task[T]:
        # Pickled here and now: the pool would do it later, when the arguments may have changed.
        return _PoolTask(self, pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, call: bytes) -> tuple[int, "Future[Any]"]:
        """(generation of the pool, what comes of it)."""
        try:
            return self._generation, self._pool.submit(_call, call)
        except BrokenProcessPool:
            self.renew(self._generation)
            return self._generation, self._pool.submit(_call, call)

    def renew(self, generation: int) -> None:
        """A process of that pool has died, and the whole of it with it."""
        if generation == self._generation:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._generation += 1
            self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        # Not forked: this process may have threads, and tokenizers' do not survive a fork.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.slots, mp_context=context, initializer=_begin)


class _PoolTask(Generic[T]):
    def __init__(self, pool: LocalPool, call: bytes) -> None:
        self._pool, self._call = pool, call
        self._generation, self._future = pool.start(call)

    def result(self) -> T:
        try:
            return self._result()
        except BrokenProcessPool:
            pass  # another task may have been the cause: this one tries again, by itself
        self._pool.renew(self._generation)
        self._generation, self._future = self._pool.start(self._call)
        try:
            return self._result()
        except BrokenProcessPool:
            raise WorkerDied from None

    def _result(self) -> T:
        value: T = self._future.result()
        return value


def _call(call: bytes) -> Any:
    function, arguments = pickle.loads(call)
    return function(*arguments)


def collect_seldom() -> None:
    """Let the garbage collector run less often: what is read comes in large numbers, and in no cycles."""
    gc.set_threshold(100_000, 20, 20)


def _begin() -> None:
    """In each process of the pool: signals are the parent's business, and no process outlives it."""
    collect_seldom()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    with contextlib.suppress(OSError):
        wait([sentinel])
    os._exit(1)
