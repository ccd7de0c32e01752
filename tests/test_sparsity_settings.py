"""What the variables ask for."""

import pytest

from sampler_hook.sparsity_settings import KINDS, NEAR_ZERO, SparsitySettings
from sparseety.errors import SparseetyError

ASKED = {"SPARSEETY_HOOK_CAPTURE": "tokens, sparsity"}


@pytest.mark.parametrize("value", ["", "tokens", "tokens,kv"])
def test_sparsity_is_off_until_asked_for(value: str) -> None:
    assert SparsitySettings.from_env({}) is None
    assert SparsitySettings.from_env({"SPARSEETY_HOOK_CAPTURE": value}) is None


def test_what_is_counted_is_chosen_by_name() -> None:
    assert SparsitySettings.from_env(ASKED) == SparsitySettings(frozenset({"sparsity"}), NEAR_ZERO, False)
    asked = {"SPARSEETY_HOOK_CAPTURE": "weights,experts,sparsity", "SPARSEETY_HOOK_SPARSITY_GRAIN": "Token"}
    assert SparsitySettings.from_env(asked) == SparsitySettings(KINDS, NEAR_ZERO, True)


def test_the_threshold_is_the_users() -> None:
    settings = SparsitySettings.from_env(ASKED | {"SPARSEETY_HOOK_NEAR_ZERO": "0.05"})
    assert settings is not None
    assert settings.threshold == 0.05


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "small"])
def test_a_threshold_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(SparseetyError, match="no threshold for near zero"):
        SparsitySettings.from_env(ASKED | {"SPARSEETY_HOOK_NEAR_ZERO": value})


def test_a_grain_that_is_none_is_an_error_that_names_both() -> None:
    with pytest.raises(SparseetyError, match="'layer' is neither request nor token"):
        SparsitySettings.from_env(ASKED | {"SPARSEETY_HOOK_SPARSITY_GRAIN": "layer"})
