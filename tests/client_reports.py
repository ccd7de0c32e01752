"""Makes reports of what a client saw comparable: two runs of the same calls differ by ids and the time of day.

And by where a stream was cut: vLLM joins the deltas that it could not send yet, so how many events carry a text is
chance. Streams are therefore folded. All else stays as it is.
"""

import json
import re
from typing import Any

# What vLLM and the clients draw at random: at least 16 hexadecimal digits, or a UUID.
_RANDOM = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}")
_TIMES = frozenset({"created", "created_at", "completed_at", "date"})
_TEXTS = frozenset({"content", "text", "reasoning", "refusal", "arguments", "partial_json", "delta"})


def read_report(output: str) -> dict[str, Any]:
    """Call -> what was seen, comparable."""
    lines = [json.loads(line) for line in output.splitlines()]
    return {line["call"]: comparable(line["saw"]) for line in lines}


def comparable(saw: Any) -> Any:
    """One call's part of a report. Ids are numbered in their order, so which of them were the same still shows."""
    names: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"<{len(names) + 1}>")

    def plain(value: Any, key: str = "") -> Any:
        if key in _TIMES and value is not None:
            return "<time>"
        if isinstance(value, str):
            return _RANDOM.sub(named, value)
        if isinstance(value, list | tuple):
            if len(value) == 2 and value[0] == "date":  # a header
                return ["date", "<time>"]
            return [plain(item) for item in folded(value)] if key == "events" else [plain(i) for i in value]
        if isinstance(value, dict):
            return {name: plain(item, name) for name, item in value.items()}
        return value

    return plain(saw)


def folded(events: list[Any]) -> list[Any]:
    """Events of chat and completions become one; of messages and responses, deltas in a row become one."""
    whole: list[Any] = []
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            whole.append(event)
        elif "choices" in event:
            last = whole.pop() if whole and "choices" in whole[-1] else {}
            whole.append(_joined(last, event))
        else:
            if "sequence_number" in event:
                event = event | {"sequence_number": event["sequence_number"] == index}  # in order, without a gap
            if whole and _continues(whole[-1], event):
                whole[-1] = whole[-1] | {
                    name: _joined(whole[-1][name], event[name], name) for name in _PARTS & event.keys()
                }
            else:
                whole.append(event | {name: _joined(None, event[name], name) for name in _PARTS & event.keys()})
    return whole


_PARTS = frozenset({"delta", "logprobs"})  # what differs between two deltas in a row


def _continues(last: Any, event: dict[str, Any]) -> bool:
    if not isinstance(last, dict) or not str(event.get("type")).endswith(("block_delta", ".delta")):
        return False
    return all(last.get(name) == event.get(name) for name in (last.keys() | event.keys()) - _PARTS)


def _joined(one: Any, other: Any, key: str = "") -> Any:
    """Texts and lists one after the other; objects field by field; of all else, each value once."""
    if isinstance(other, dict):
        return (one or {}) | {name: _joined((one or {}).get(name), value, name) for name, value in other.items()}
    if isinstance(other, list) and key in ("choices", "tool_calls"):
        by_index = dict(one or {})
        for item in other:
            by_index[item["index"]] = _joined(by_index.get(item["index"]), item)
        return dict(sorted(by_index.items()))
    if isinstance(other, list):
        return [*(one or []), *other]
    if isinstance(other, str) and key in _TEXTS:
        return (one or "") + other
    return one if other is None or (one and other in one) else (*(one or ()), other)
