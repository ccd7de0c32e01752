"""The plugin's numbers on vLLM's own /metrics.

They arise in the engine, and the API server publishes. With several API servers vLLM collects files that its processes
write by prometheus_client's multi-process mode; the engine writes such files too. With one API server vLLM does not
use that mode: then the plugin names a folder of its own for the engine, and collects from it in the API server.
"""

import atexit
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from sampler_hook.catalogue import SUMMED
from sparseety.metrics import Metric

VLLMS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_numbers = itertools.count()
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
    """Writes the numbers of one process, or of a part of it. Its files outlive it, as counters should."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.folder = environ.get(VLLMS_FOLDER) or environ.get(OUR_FOLDER)
        # No two of a process share a file. Beside vLLM's own files, and never of their name: <kind>_<pid>.db.
        self._name = f"sparseety-{os.getpid()}-{next(_numbers)}"
        self._files: dict[str, Any] = {}
        self._written: dict[tuple[str, ...], tuple[str, float]] = {}  # key and value, by name and labels

    def write(self, samples: Iterable[Sample]) -> None:
        """Set each sample to its value. Raises OSError."""
        if not self.folder:
            return
        now = time.time()
        for metric, labels, value, suffix in samples:
            name = (metric.name, suffix, *labels.values())
            key, before = self._written.get(name, ("", None))
            if before == value:
                continue
            key = key or _key(metric, labels, suffix)
            self._file(metric).write_value(key, value, now)
            self._written[name] = key, value

    def _file(self, metric: Metric) -> Any:
        # How the collector puts the gauges of several processes together stands in the file's name.
        stem = metric.kind if metric.kind != "gauge" else "gauge_sum" if metric.name in SUMMED else "gauge_max"
        if stem not in self._files:
            from prometheus_client.mmap_dict import MmapedDict

            path = Path(self.folder or "") / f"{stem}_{self._name}.db"
            self._files[stem] = MmapedDict(str(path))  # type: ignore[no-untyped-call]
        return self._files[stem]

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()


def _key(metric: Metric, labels: dict[str, str], suffix: str) -> str:
    from prometheus_client.mmap_dict import mmap_key

    key: str = mmap_key(metric.name, metric.name + suffix, list(labels), list(labels.values()), metric.text)
    return key
