"""Put faults into the plugin of a real server, one at a time: on PYTHONPATH, each of vLLM's processes loads this first.

SPARSEETY_TEST_FAULT names a file; what it says is what fails from then on: "Class.method", or "disk ENOSPC".
"""

import errno
import functools
import os
from pathlib import Path
from typing import Any

FAULT = Path(os.environ.get("SPARSEETY_TEST_FAULT", ""))

# Everything of ours that vLLM calls into, and what is done with it in the other thread.
METHODS = {
    "sampler_hook.engine": {
        "EngineCapture": ("added", "before_step", "after_step", "finished_outside", "evicted", "event", "drain"),
    },
    "sampler_hook.scribe": {"Scribe": ("added", "took", "ended", "_blocks")},
    "sampler_hook.journal": {"Journal": ("_put", "publish")},
    "sampler_hook.control": {"ControlFile": ("changed",)},
}  # fmt: skip


def fault() -> str:
    try:
        return FAULT.read_text()
    except OSError:
        return ""


def failing(own: Any, name: str) -> Any:
    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        if fault() == name:
            raise ZeroDivisionError(f"put into {name} by a test")
        return own(*args, **kwargs)

    return method


class Disk:
    """The module `os` of the log's writer, with a disk that takes nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, *args: Any) -> int:
        return self._write(os.write, *args)

    def pwrite(self, *args: Any) -> int:
        return self._write(os.pwrite, *args)

    def _write(self, own: Any, *args: Any) -> int:
        kind, _, name = fault().partition(" ")
        if kind == "disk":
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
        count: int = own(*args)
        return count


def put_in() -> None:
    import importlib

    for module_name, classes in METHODS.items():
        module = importlib.import_module(module_name)
        for class_name, names in classes.items():
            owner = getattr(module, class_name)
            for name in names:
                setattr(owner, name, failing(getattr(owner, name), f"{class_name}.{name}"))
    for module_name in ("sparseety.segments",):
        try:
            importlib.import_module(module_name).os = Disk()
        except ImportError:
            continue


if os.environ.get("SPARSEETY_TEST_FAULT"):
    put_in()
