"""The dashboards are of the types that Grafana itself loads them by, the options of each kind of panel too."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.prometheus_binaries import folder_of_npm
from tests.prometheus_server import DASHBOARDS

pytestmark = pytest.mark.observability

TYPES = Path(__file__).parent / "grafana/loaded.ts"
FAULTS: dict[str, Callable[[Any], Any]] = {
    "a schema version that is a word": lambda dashboard: dashboard.update(schemaVersion="39"),
    "a kind of panel that there is not": lambda dashboard: dashboard["panels"][1].update(type="figure"),
    "an option of another kind of panel": lambda dashboard: dashboard["panels"][1]["options"].update(rowHeight=1),
    "a width that is a word": lambda dashboard: dashboard["panels"][0]["gridPos"].update(w="24"),
    "a mapping of no such type": lambda dashboard: dashboard["panels"][1]["fieldConfig"]["defaults"].update(
        mappings=[{"type": "words", "options": {}}]
    ),
}


def compile_types(folder: Path, dashboards: dict[str, str]) -> str:
    """What the compiler says of them, by name and text; nothing: they are of the types."""
    npm = folder_of_npm()
    (folder / "node_modules").symlink_to(npm / "node_modules")
    (folder / "loaded.ts").write_text(TYPES.read_text())
    for name, text in dashboards.items():
        head = 'import type { Loaded } from "./loaded";\nexport const dashboard: Loaded = '
        (folder / f"{name}.ts").write_text(head + text + ";\n")
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    command = [str(npm / "node_modules/.bin/tsc"), *options, "loaded.ts", *(f"{name}.ts" for name in dashboards)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


def test_the_dashboards_are_of_grafanas_types(tmp_path: Path) -> None:
    assert compile_types(tmp_path, {path.stem: path.read_text() for path in DASHBOARDS.glob("*.json")}) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dashboard_that_grafana_would_not_take_is_found_out(fault: str, tmp_path: Path) -> None:
    dashboard = json.loads((DASHBOARDS / "sparseety-overview.json").read_text())
    FAULTS[fault](dashboard)
    assert "error TS" in compile_types(tmp_path, {"faulty": json.dumps(dashboard)})
