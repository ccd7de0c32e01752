"""From the outputs of a run to its result. Pure."""

from collections.abc import Sequence

from verifier.stability.model import Forced, Output
from verifier.stability.result import Analysis, Contract, Facts, GateSettings


def analyse(
    outputs: Sequence[Output],
    forced: Sequence[Forced] = (),
    settings: GateSettings | None = None,
    contract: Contract = "same-model",
    facts: Facts | None = None,
) -> Analysis:
    """All statistics and the verdict. Outputs of the arms a1, a2 and b; any other name is a yardstick."""
    raise NotImplementedError
