"""How much memory a server has at most while a round runs: of its processes where they are here, else as it says."""

import asyncio
import contextlib
import os
import re
from pathlib import Path
from types import TracebackType

from sparseety.errors import SparseetyError
from verifier.stability.drive import Server

_EVERY = 0.5  # seconds
_RESIDENT = re.compile(rb"^process_resident_memory_bytes ([0-9.e+]+)$", re.MULTILINE)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """`most` is what was seen while the block ran; None: nothing says it."""

    def __init__(self, server: Server, pid: int | None) -> None:
        """pid: the server's process, whose children count too. Raises SparseetyError where it is not here."""
        self._server, self._pid = server, pid
        self.most: int | None = None
        self.what: str | None = None
        if pid is not None and resident(pid) is None:
            raise SparseetyError(f"there is no process {pid} on this machine")

    async def __aenter__(self) -> "Watch":
        self.most = self.what = None
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if kind is None and self._pid is None:
            text = await self._server.metrics()
            if found := _RESIDENT.search(text):
                self.most, self.what = int(float(found[1])), "of the API server's process alone (/metrics), at each end"

    async def _watch(self) -> None:
        while self._pid is not None:
            self.what = "resident sizes of the process and its children, summed; shared pages count several times"
            self.most = max(self.most or 0, resident(self._pid) or 0)
            await asyncio.sleep(_EVERY)


def resident(pid: int) -> int | None:
    """Bytes of a process and all its children; None: it is not there."""
    own = _resident(pid)
    if own is None:
        return None
    return own + sum(resident(child) or 0 for child in _children(pid))


def _resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
