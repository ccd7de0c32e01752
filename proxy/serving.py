"""Sockets that listen, and uvicorn on them."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Iterator

import uvicorn

from proxy.front import FrontProtocol, watch_peers
from proxy.values import Address
from sparseety.errors import SparseetyError

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that it is they who close
CLOSING_SECONDS = 2.0  # for connections to take their last bytes, once all requests have ended


def rest_collector() -> None:
    """To be called once by a process that is about to serve. The collector of cycles takes a fifth of a short request's
    cost at Python's defaults: it walks all that was imported, again and again, and what requests leave waiting."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def serving(app: object, lifespan: str) -> Server:
    return Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=FrontProtocol,
            ws="none",
            lifespan=lifespan,  # type: ignore[arg-type]
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )


async def finish(server: Server, task: asyncio.Task[None]) -> None:
    """End a server whose requests have ended. A client that does not read its last bytes must not hold it up."""
    server.should_exit = True
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    server.force_exit = True
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def listen_all(address: Address, flag: str, count: int) -> list[socket.socket]:
    """One socket for each worker, all on one port: the kernel spreads the connections.

    Measured with 4 workers and 256 connections at once, busiest against mean: 1.1, and 2.2 to 2.7 where all accept
    from one socket, since whoever wakes first takes what is there.
    """
    opened = [listen(address, flag)]
    if count == 1:
        return opened
    # The port was free. Shared sockets would not have told: two proxies could share one without knowing.
    address = Address(address.host, opened[0].getsockname()[1])
    opened.pop().close()
    with contextlib.ExitStack() as undo:
        for _ in range(count):
            opened.append(listen(address, flag, shared=True))
            undo.callback(opened[-1].close)
        undo.pop_all()
    return opened


def listen(address: Address, flag: str, *, shared: bool = False) -> socket.socket:
    """Raises SparseetyError: the port is taken, or the address is not of this machine."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        opened = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        reason = error.strerror
        if error.errno and not isinstance(error, socket.gaierror):
            reason = os.strerror(error.errno)  # the error's own words repeat the address
        raise SparseetyError(f"cannot listen on {address}: {reason}; choose another with {flag}") from None
    opened.setblocking(False)
    watch_peers(opened)
    return opened


async def first(event: asyncio.Event, work: asyncio.Task[object] | asyncio.Task[None]) -> None:
    """Wait for the event; should the work end first, raise what ended it."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((waiting, work), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not event.is_set():
        await work
        raise RuntimeError("a server ended by itself")
