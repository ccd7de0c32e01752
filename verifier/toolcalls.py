"""The tool calls that a tool parser finds in an output, and whether a delivered call is one of them. Pure.

Source: vllm/tool_parsers/hermes_tool_parser.py, vllm/tool_parsers/streaming.py and vllm/parser/abstract_parser.py
of vLLM 0.32.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparseety.records import ToolCall
from verifier.parsers import Tools

_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()
_NOTHING = object()

Match = Literal["exact", "semantic"]


@dataclass(frozen=True, slots=True)
class CallDue:
    """One call that is due. Its arguments are `text[start:end]` as they stand, or `value` written anew."""

    begin: int  # where its text begins: the marker
    name: str | None  # None: the request named it
    start: int
    end: int
    at_most: int = 0  # a stream may have sent as far as this before it knew better
    bare: bool = False  # it has no arguments; a stream's last delta may say "{}" then
    value: Any = field(default=_NOTHING)  # a whole reply's arguments, parsed

    @property
    def anew(self) -> bool:
        """The server writes the arguments anew, so only their meaning compares."""
        return self.value is not _NOTHING

    def matches(self, text: str, call: ToolCall, whole: bool) -> Match | None:
        """Is `call` this one? whole=False: any beginning of it will do."""
        if self.name is not None and call.name != self.name:
            return None
        if self.anew:
            return self._means(call.arguments)
        if self.bare and call.arguments == "{}":
            return "semantic"
        if not text.startswith(call.arguments, self.start):
            return None
        end = self.start + len(call.arguments)
        if end > max(self.end, self.at_most) or (whole and end < self.end):
            return None
        return "exact"

    def _means(self, arguments: str) -> Match | None:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        return "semantic" if _canonical(value) == _canonical(self.value) else None


@dataclass(frozen=True, slots=True)
class Found:
    calls: list[CallDue]
    left_out: int = 0  # code points that are neither a call nor before the first one


def json_calls(text: str, first: int, tools: Tools, streamed: bool) -> Found | None:
    """Calls {"name", "arguments"} between markers, from `first` on; None: one of them is no such JSON."""
    regions = _regions(text, first, tools)
    left_out = _between(text, regions, tools)
    if not streamed:
        calls = []
        for begin, start, end, _ in regions:
            call = _read_call(text[start:end])
            if call is None:
                return None
            name, value = call
            calls.append(CallDue(begin, name, start, end, value=value))
        return Found(calls, left_out)
    calls = []
    for begin, start, end, closed in regions:
        due = _streamed_call(text, begin, start, end, closed, tools)
        if due is None:  # without a name this call is never sent, and none after it
            left_out += len(text) - start
            break
        calls.append(due)
    return Found(calls, left_out)


def marked_calls(text: str, first: int, tools: Tools, streamed: bool) -> Found | None:
    """Whatever stands between the markers is the arguments; the name is not in it."""
    regions = _regions(text, first, tools)
    calls = []
    for begin, start, end, _ in regions:
        inner = text[start:end]
        start += len(inner) - len(inner.lstrip())
        calls.append(CallDue(begin, None, start, start + len(inner.strip())))
    return Found(calls, _between(text, regions, tools))


def named_call(text: str, content: int, streamed: bool) -> list[CallDue]:
    """All of the content is the arguments."""
    if not streamed and not text[content:].strip():
        return []
    return [CallDue(content, None, content, len(text))]


def required_calls(text: str, content: int, streamed: bool) -> list[CallDue]:
    """A JSON list of {"name", "parameters"}."""
    if streamed:
        return _scan_required(text, content)
    try:
        elements = json.loads(text[content:])
    except (ValueError, RecursionError):
        return []
    calls = []
    for element in elements if isinstance(elements, list) else []:
        if not isinstance(element, dict) or not isinstance(element.get("name"), str):
            return []
        parameters = element.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            return []
        calls.append(CallDue(content, element["name"], content, len(text), value=parameters))
    return calls


# --------------------------------------------------------------------------------------------------------- inside


def _regions(text: str, first: int, tools: Tools) -> list[tuple[int, int, int, bool]]:
    """(marker, inner start, inner end, closed) of each call."""
    found, at = [], first
    while at >= 0:
        start = at + len(tools.start)
        end = text.find(tools.end, start)
        found.append((at, start, end if end >= 0 else len(text), end >= 0))
        at = text.find(tools.start, end + len(tools.end)) if end >= 0 else -1
    return found


def _between(text: str, regions: Sequence[tuple[int, int, int, bool]], tools: Tools) -> int:
    """Code points after a call that belong to none, whitespace apart."""
    left = 0
    for index, (_, _, end, closed) in enumerate(regions):
        if closed:
            until = regions[index + 1][0] if index + 1 < len(regions) else len(text)
            left += len(text[end + len(tools.end) : until].strip())
    return left


def _read_call(inner: str) -> tuple[str, Any] | None:
    try:
        call = json.loads(inner)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return (name, arguments) if isinstance(name, str) else None


def _streamed_call(text: str, begin: int, start: int, end: int, closed: bool, tools: Tools) -> CallDue | None:
    """The parser finds name and arguments by pattern, and hands the arguments on as they stand."""
    inner = text[start:end]
    if not closed:
        for size in range(min(len(tools.end) - 1, len(inner)), 0, -1):
            if inner.endswith(tools.end[:size]):
                inner = inner[:-size]
                break
    start += len(inner) - len(inner.lstrip())
    inner = inner.strip()
    name, arguments = _NAME.search(inner), _ARGUMENTS.search(inner)
    if name is None:
        return None
    if arguments is None:
        return CallDue(begin, name[1], start + len(inner), start + len(inner), bare=True)
    raw = inner[arguments.end() :]
    kept = raw
    if closed or _is_json(inner):  # then the brace that closes the call is not theirs
        kept = raw.rstrip()
        if kept.endswith("}"):
            kept = kept[:-1].rstrip()
    start += arguments.end()
    return CallDue(begin, name[1], start, start + len(kept), at_most=start + len(raw), bare=not raw)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _scan_required(text: str, content: int) -> list[CallDue]:
    """The calls of a list that may be unfinished: each has a whole name, and parameters that have begun."""
    calls: list[CallDue] = []
    at = _after_space(text, content)
    if not text.startswith("[", at):  # the text is constrained to such a list
        return calls
    at = _after_space(text, at + 1)
    while text.startswith("{", at):
        begin = at
        members, at = _members(text, at + 1)
        name, parameters = members.get("name"), members.get("parameters")
        if name is None or not name[2] or parameters is None:
            break
        try:
            value = json.loads(text[name[0] : name[1]])
        except ValueError:
            break
        if not isinstance(value, str):
            break
        calls.append(CallDue(begin, value, parameters[0], parameters[1]))
        at = _after_space(text, at)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
    return calls


def _members(text: str, at: int) -> tuple[dict[str, tuple[int, int, bool]], int]:
    """The members of an object from behind its brace: name -> (start, end, finished); and where it ends."""
    members: dict[str, tuple[int, int, bool]] = {}
    while True:
        at = _after_space(text, at)
        if text.startswith("}", at):
            return members, at + 1
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
        key, at = _value(text, at)
        if not isinstance(key, str):
            return members, len(text)
        at = _after_space(text, at)
        if not text.startswith(":", at):
            return members, len(text)
        start = _after_space(text, at + 1)
        if start >= len(text):
            return members, len(text)
        value, end = _value(text, start)
        finished = value is not _NOTHING
        members.setdefault(key, (start, end if finished else len(text), finished))
        if not finished:
            return members, len(text)
        at = end


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _NOTHING, at
    return value, end


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
