"""What the variables ask for."""

import pytest

from sampler_hook.sparsity_settings import NEAR_ZERO, SparsitySettings
from sparseety.errors import SparseetyError


@pytest.mark.parametrize("value", ["", "0", "off", "No"])
def test_sparsity_is_off_until_asked_for(value: str) -> None:
    assert SparsitySettings.from_env({}) is None
    assert SparsitySettings.from_env({"SPARSEETY_HOOK_SPARSITY": value}) is None


def test_it_is_counted_by_request_or_by_token() -> None:
    assert SparsitySettings.from_env({"SPARSEETY_HOOK_SPARSITY": "1"}) == SparsitySettings(NEAR_ZERO, False)
    assert SparsitySettings.from_env({"SPARSEETY_HOOK_SPARSITY": "Request"}) == SparsitySettings(NEAR_ZERO, False)
    asked = {"SPARSEETY_HOOK_SPARSITY": "token", "SPARSEETY_HOOK_NEAR_ZERO": "0.05"}
    assert SparsitySettings.from_env(asked) == SparsitySettings(0.05, True)


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "small"])
def test_a_threshold_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(SparseetyError, match="no threshold for near zero"):
        SparsitySettings.from_env({"SPARSEETY_HOOK_SPARSITY": "1", "SPARSEETY_HOOK_NEAR_ZERO": value})


def test_a_word_that_is_neither_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(SparseetyError, match="'layers' is none of off, request, token"):
        SparsitySettings.from_env({"SPARSEETY_HOOK_SPARSITY": "layers"})
