"""What the workers were asked to count, by SPARSEETY_HOOK_CAPTURE and its companions. Nothing, unless asked."""

from collections.abc import Mapping
from dataclasses import dataclass

from sparseety.errors import SparseetyError

SPARSITY, EXPERTS, WEIGHTS = "sparsity", "experts", "weights"
KINDS = frozenset({SPARSITY, EXPERTS, WEIGHTS})
NEAR_ZERO = 1e-6  # the default threshold: SiLU and GELU leave next to no exact zeros
GRAINS = ("request", "token")


@dataclass(frozen=True, slots=True)
class SparsitySettings:
    kinds: frozenset[str] = KINDS
    threshold: float = NEAR_ZERO  # near zero: absolute value <= threshold
    per_token: bool = False  # write counts of single tokens, and not sums by request and phase

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "SparsitySettings | None":
        """None: counting was not asked for. Raises SparseetyError."""
        kinds = KINDS & {part.strip() for part in environ.get("SPARSEETY_HOOK_CAPTURE", "").split(",")}
        if not kinds:
            return None
        grain = environ.get("SPARSEETY_HOOK_SPARSITY_GRAIN", "").strip().lower() or GRAINS[0]
        if grain not in GRAINS:
            raise SparseetyError(f"SPARSEETY_HOOK_SPARSITY_GRAIN={grain!r} is neither {GRAINS[0]} nor {GRAINS[1]}")
        return cls(kinds, near_zero(environ.get("SPARSEETY_HOOK_NEAR_ZERO", "")), grain == GRAINS[1])


def near_zero(text: str) -> float:
    """A threshold as written by a user. Raises SparseetyError."""
    try:
        threshold = float(text) if text.strip() else NEAR_ZERO
    except ValueError:
        threshold = -1.0
    if not 0.0 <= threshold < float("inf"):  # nor is what is not a number
        raise SparseetyError(f"{text!r} is no threshold for near zero; example: 0.001")
    return threshold
