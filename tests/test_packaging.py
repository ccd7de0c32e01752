"""The wheel, as a user gets it: installed in fresh environments, used from outside the checkout."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("sparseety", "sparseety-proxy", "verify-tokens")

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.skipif(not os.environ.get("SPARSEETY_TEST_PACKAGING"), reason="asked for by make test-packaging"),
]


def run(*command: object, cwd: Path, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARSEETY"))}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=ROOT)
    [built] = out.glob("*.whl")
    return built


def fresh(folder: Path, *requirements: str) -> Path:
    """A new virtual environment with these installed; returns its bin folder."""
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / "bin"
    run(scripts / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements, cwd=folder)
    return scripts


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sparseety", "proxy", "sampler_hook", "verifier"}


def test_the_bare_distribution_pulls_msgspec_alone_and_its_scripts_say_which_extra_they_need(wheel, tmp_path):
    scripts = fresh(tmp_path, str(wheel))
    listed = run(
        scripts / "python", "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check", cwd=tmp_path
    )
    names = {line.partition("==")[0] for line in listed.splitlines() if "==" in line}
    assert names - {"pip", "setuptools"} == {"sparseety", "msgspec"}
    assert "usage: sparseety" in run(scripts / "sparseety", "--help", cwd=tmp_path)
    assert "pip install 'sparseety[proxy]'" in run(scripts / "sparseety-proxy", "--help", cwd=tmp_path, code=2)
    assert "pip install 'sparseety[verifier]'" in run(scripts / "verify-tokens", "--help", cwd=tmp_path, code=2)
    doctor = run(scripts / "sparseety", "doctor", "--only", "proxy", "--only", "verifier", cwd=tmp_path, code=3)
    assert re.search(
        r"^\?     proxy\.installed .*not installed here\n *fix: pip install 'sparseety\[proxy\]'", doctor, re.M
    )
    assert re.search(r"^\?     verifier\.installed .*not installed here\n", doctor, re.M)
    assert "ok    environment.python" in run(scripts / "sparseety", "doctor", "--only", "environment", cwd=tmp_path)


def test_every_console_script_says_how_it_is_used_outside_the_checkout(wheel, tmp_path):
    scripts = fresh(tmp_path, f"{wheel}[proxy,verifier]")
    for script in SCRIPTS:
        assert f"usage: {script}" in run(scripts / script, "--help", cwd=tmp_path)
        assert "0.1.0" in run(scripts / script, "--version", cwd=tmp_path)
    listing = run(scripts / "python", "-c", _ENTRY_POINTS, cwd=tmp_path)
    assert "sampler_hook:register" in listing


_ENTRY_POINTS = """
from importlib.metadata import entry_points
for entry in entry_points(group="vllm.general_plugins"):
    entry.load()()
    print(entry.value)
"""
