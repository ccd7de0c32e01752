"""Where prometheus and promtool are, for the tests marked `observability`: SPARSEETY_TEST_PROMETHEUS names the folder
that deploy/prometheus/install.sh filled. Without it they are skipped."""

import os
from pathlib import Path

import pytest


def binary(name: str) -> str:
    folder = os.environ.get("SPARSEETY_TEST_PROMETHEUS")
    if not folder:
        pytest.skip("SPARSEETY_TEST_PROMETHEUS is not set")
    path = Path(folder).absolute() / "bin" / name
    if not path.exists():
        pytest.fail(f"{path} is not there; deploy/prometheus/install.sh {folder} makes it")
    return str(path)


def folder_of_npm() -> Path:
    """Where tests/grafana/package.json is installed."""
    prometheus = os.environ.get("SPARSEETY_TEST_PROMETHEUS")
    if not prometheus:
        pytest.skip("SPARSEETY_TEST_PROMETHEUS is not set")
    folder = Path(prometheus).absolute() / "grafana"
    if not (folder / "node_modules").is_dir():
        pytest.skip("Grafana's types are not installed: no npm")
    return folder
