"""vLLM 0.32's reasoning and tool-call parsers whose work can be checked: their markers and rules. One table, pure.

A parser stands here only if benchmarks/parsers_vs_vllm.py ran clean on it; every other one is "not checked", and a
request that needs it is incomplete. docs/parsers.md is the matrix.
"""

import re
from dataclasses import dataclass
from typing import Literal

MADE_FOR = "0.32"  # the vLLM release that these rules were checked against


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a reasoning parser splits an output: up to the first end marker it is reasoning, the rest is content.

    Output begins inside the reasoning, with or without a start marker, unless the prompt has closed it already.
    Without an end marker all of it is reasoning.
    """

    start: str | None  # dropped wherever it stands in the reasoning
    end: str
    openers: tuple[str, ...] = ()  # tool markers that end the reasoning too; they stay in what follows
    spellings: tuple[str, ...] = ()  # of the first opener; known only where that is found as text, not as a token
    engine: bool = True  # vLLM's parser engine: drops special tokens, repeated markers. False: one class of its own
    strips: bool = False  # whitespace at the reasoning's end is dropped
    strips_newlines: bool = False  # newlines at the content's start are dropped
    reopens: bool = False  # a start marker in the content begins reasoning anew
    switch: bool = True  # an argument of the chat template switches it off; the prompt shows that
    can_be_off: bool = False  # it is off unless such an argument switches it on, whatever the prompt shows


@dataclass(frozen=True, slots=True)
class Tools:
    """How a tool-call parser finds calls in the content.

    json: objects {"name", "arguments"} between two markers, text before the first call is content, after it nothing is.
    named: the whole content is one call's arguments (tool_choice names the function).
    required: a JSON list of {"name", "parameters"} (tool_choice "required").
    marked: what stands between two markers is the arguments, as it is.
    """

    form: Literal["json", "named", "required", "marked"]
    start: str = ""
    end: str = ""


_THINK = ("<think>", "</think>")
_QWEN3 = Reasoning(*_THINK, openers=("<tool_call>",))
_R1 = Reasoning(*_THINK, engine=False, switch=False)

REASONING: dict[str, Reasoning] = {
    "deepseek_r1": _R1,
    "deepseek_v3": Reasoning(*_THINK, engine=False, can_be_off=True),
    "holo2": Reasoning(*_THINK, engine=False, can_be_off=True),
    "poolside_v1": Reasoning(*_THINK, engine=False, can_be_off=True),
    "step3": Reasoning(None, "</think>", engine=False, switch=False),
    "qwen3": _QWEN3,
    "mimo": _QWEN3,
    "seed_oss": Reasoning("<seed:think>", "</seed:think>", openers=("<seed:tool_call>",)),
    "nemotron_v3": Reasoning(*_THINK, openers=("<tool_call>",), strips=True),
    "step3p5": Reasoning(*_THINK, openers=("<tool_call>",), strips=True, switch=False),
    "granite_thinking_parser": Reasoning(*_THINK, openers=("<tool_call>",), strips=True, strips_newlines=True),
    "glm45": Reasoning(*_THINK, openers=("<tool_call>",), strips=True, reopens=True),
    "glm47": Reasoning(*_THINK, openers=("<tool_call>",), strips=True, reopens=True),
    "ling3": Reasoning(*_THINK, openers=("<tool_call>",), strips=True, reopens=True),
    "kimi_k2": Reasoning(*_THINK, openers=("<|tool_calls_section_begin|>",), strips=True),
    "minimax_m2": Reasoning(*_THINK, openers=("<minimax:tool_call>",), strips=True, switch=False),
    "deepseek_v4": Reasoning(
        *_THINK,
        openers=("<｜DSML｜tool_calls>",),
        spellings=("<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
        strips=True,
        reopens=True,
    ),
    "deepseek_v41": Reasoning(*_THINK, openers=("<｜DSML｜ calls>",), strips=True, reopens=True),
}

_HERMES = Tools("json", "<tool_call>", "</tool_call>")

TOOLS: dict[str, Tools] = {
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "longcat": Tools("json", "<longcat_tool_call>", "</longcat_tool_call>"),
}

# What tool_choice makes of any tool parser; and what proves itself wherever it fits.
FORCED = (Tools("named"), Tools("required"))
UNKNOWN_TOOLS = (*dict.fromkeys(TOOLS.values()), *FORCED, Tools("marked", "<tool_call>", "</tool_call>"))

# Text that some tool parser may take for the beginning of a call, even where the request offers no tools.
CALL_SIGN = re.compile(r"<[^<>\s]{0,24}(?:tool|function|invoke|call|action)|\[TOOL_CALLS|functools")
