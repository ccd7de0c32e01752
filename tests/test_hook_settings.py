"""The SPARSEETY_HOOK_* variables."""

from pathlib import Path

import pytest

from sampler_hook.settings import HookSettings
from sparseety.errors import SparseetyError


@pytest.mark.parametrize("environ", [{}, {"SPARSEETY_HOOK_DIR": ""}, {"SPARSEETY_HOOK_UNTESTED": "1"}])
def test_capture_is_off_unless_a_folder_is_named(environ: dict[str, str]) -> None:
    assert HookSettings.from_env(environ) is None


def test_a_folder_switches_capture_on() -> None:
    assert HookSettings.from_env({"SPARSEETY_HOOK_DIR": "/logs"}) == HookSettings(Path("/logs"))


def test_a_relative_folder_stays_where_it_was_when_vllm_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert HookSettings.from_env({"SPARSEETY_HOOK_DIR": "logs"}) == HookSettings(tmp_path / "logs")


@pytest.mark.parametrize(("value", "meant"), [("1", True), ("yes", True), (" TRUE ", True), ("0", False), ("", False)])
def test_a_switch_is_read_as_people_write_it(value: str, meant: bool) -> None:
    settings = HookSettings.from_env({"SPARSEETY_HOOK_DIR": "/logs", "SPARSEETY_HOOK_UNTESTED": value})
    assert settings is not None
    assert settings.untested is meant


def test_a_switch_that_says_neither_is_an_error_that_names_it() -> None:
    with pytest.raises(SparseetyError, match="SPARSEETY_HOOK_UNTESTED='perhaps' is neither yes nor no"):
        HookSettings.from_env({"SPARSEETY_HOOK_DIR": "/logs", "SPARSEETY_HOOK_UNTESTED": "perhaps"})
