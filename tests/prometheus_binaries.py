"""Where prometheus and promtool are, for the tests marked `observability`: SPARSEETY_TEST_PROMETHEUS names the folder
that deploy/prometheus/install.sh filled. Without it they are skipped."""

import os
from pathlib import Path

import pytest

_GIVEN = os.environ.get("SPARSEETY_TEST_PROMETHEUS")
_FOLDER = Path(_GIVEN).absolute() if _GIVEN else None  # now: tests change the working directory


def _folder() -> Path:
    if _FOLDER is None:
        pytest.skip("SPARSEETY_TEST_PROMETHEUS is not set")
    return _FOLDER


def binary(name: str) -> str:
    path = _folder() / "bin" / name
    if not path.exists():
        pytest.fail(f"{path} is not there; deploy/prometheus/install.sh {_GIVEN} makes it")
    return str(path)


def folder_of_npm() -> Path:
    """Where tests/grafana/package.json is installed."""
    folder = _folder() / "grafana"
    if not (folder / "node_modules").is_dir():
        pytest.skip("Grafana's types are not installed: no npm")
    return folder
