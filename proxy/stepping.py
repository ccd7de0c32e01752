"""Coroutines that mostly need not wait: run at once, and only the rest, if there is one, in a task."""

import asyncio
import functools
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


def run(
    coroutine: Coroutine[Any, Any, None],
    loop: asyncio.AbstractEventLoop,
    on_error: Callable[[Exception], None],
    on_end: Callable[[], None] = lambda: None,
) -> asyncio.Task[None] | None:
    """Run a coroutine at once as far as it goes without waiting, and the rest, if there is one, in a task.

    Saves the task in the usual case. Raises what the first part raises; the rest gives it to `on_error`.
    The first part may run outside of any task, where `asyncio.timeout` and the like do not work.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None

    async def rest() -> None:
        try:
            await _carry_on(coroutine, awaited)
        except Exception as error:  # noqa: BLE001 -- the one who began this waits elsewhere
            on_error(error)
        finally:
            on_end()

    return loop.create_task(rest())


@types.coroutine
def _carry_on(coroutine: Coroutine[Any, Any, None], awaited: object) -> Generator[Any, Any, None]:
    """`await coroutine`, for one that has been started and waits for `awaited`."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 -- a cancellation; it is the coroutine's to handle
            resume = functools.partial(coroutine.throw, error)
        else:
            resume = functools.partial(coroutine.send, None)
        try:
            awaited = resume()
        except StopIteration:
            return
