"""What an operator says about how to judge. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    drift: bool = False  # tokenize each text anew: information, at several times the cost of judging
    tool_parser: str | None = None  # vLLM's --tool-call-parser, which the engine does not log; None: not said


AS_A_RULE = JudgeOptions()
