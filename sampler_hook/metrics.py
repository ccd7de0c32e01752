"""The plugin's numbers on vLLM's own /metrics.

They arise in the engine, and the API server publishes. With several API servers vLLM collects files that its processes
write by prometheus_client's multi-process mode; the engine writes such files too. With one API server vLLM does not
use that mode: then the plugin names a folder of its own for the engine, and collects from it in the API server.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from sparseety.metrics import Metric

VLLMS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
OUR_FOLDER = "SPARSEETY_METRICS_DIR"  # set by the process that was started first, for those it starts


class Sample(NamedTuple):
    metric: Metric
    labels: dict[str, str]
    value: float
    suffix: str = ""  # of the name: _total, _bucket, _sum


def publish_here(environ: MutableMapping[str, str]) -> None:
    """Called in each of vLLM's processes, before it starts others. Does nothing where vLLM collects files itself."""
    if environ.get(VLLMS_FOLDER):
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = environ.get(OUR_FOLDER)
    if folder is None:
        folder = environ[OUR_FOLDER] = tempfile.mkdtemp(prefix="sparseety-metrics-")
        atexit.register(_remove, folder, os.getpid())
    # Another process than the API server has a registry too, which nobody looks at.
    MultiProcessCollector(REGISTRY, folder)  # type: ignore[no-untyped-call]


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


class Publisher:
    """Writes the numbers of one process. Its files outlive it, as counters should. Raises OSError."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._folder = environ.get(VLLMS_FOLDER) or environ.get(OUR_FOLDER)
        self._files: dict[str, Any] = {}

    def write(self, samples: Iterable[Sample]) -> None:
        """Set each sample to its value."""
        if not self._folder:
            return
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        for metric, labels, value, suffix in samples:
            file = self._files.get(metric.kind)
            if file is None:
                # Beside vLLM's own files, and never of their name: <kind>_<pid>.db, gauge_<mode>_<pid>.db.
                stem = "gauge_max" if metric.kind == "gauge" else metric.kind
                path = Path(self._folder) / f"{stem}_sparseety-{os.getpid()}.db"
                file = self._files[metric.kind] = MmapedDict(str(path))  # type: ignore[no-untyped-call]
            key = mmap_key(metric.name, metric.name + suffix, list(labels), list(labels.values()), metric.text)
            file.write_value(key, value, time.time())

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()
