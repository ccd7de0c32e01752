"""What of the model's sparsity is to be counted: SPARSEETY_HOOK_SPARSITY and its companions. Nothing, unless asked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparseety.errors import SparseetyError

OFF, REQUEST, TOKEN = ("", "0", "false", "no", "off"), ("1", "true", "yes", "on", "request"), ("token",)
NEAR_ZERO = 1e-6  # the default threshold: SiLU and GELU leave next to no exact zeros


@dataclass(frozen=True, slots=True)
class SparsitySettings:
    threshold: float = NEAR_ZERO  # near zero: absolute value <= threshold
    per_token: bool = False  # write counts of single tokens too

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "SparsitySettings | None":
        """None: counting was not asked for. Raises SparseetyError."""
        grain = environ.get("SPARSEETY_HOOK_SPARSITY", "").strip().lower()
        if grain in OFF:
            return None
        if grain not in REQUEST + TOKEN:
            raise SparseetyError(
                f"SPARSEETY_HOOK_SPARSITY={environ['SPARSEETY_HOOK_SPARSITY']!r} is none of off, request, token"
            )
        return cls(near_zero(environ.get("SPARSEETY_HOOK_NEAR_ZERO", "")), grain in TOKEN)


def near_zero(text: str) -> float:
    """A threshold as written by a user. Raises SparseetyError."""
    try:
        threshold = float(text) if text.strip() else NEAR_ZERO
    except ValueError:
        threshold = -1.0
    if not (math.isfinite(threshold) and threshold >= 0):
        raise SparseetyError(f"{text!r} is no threshold for near zero; example: 0.001")
    return threshold
