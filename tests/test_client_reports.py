"""Reports of clients are equal but for what chance decides, and a difference anywhere else shows."""

import copy
from typing import Any

import pytest

from tests.client_reports import comparable


def chat(*pieces: str, number: str = "0123456789abcdef", created: int = 1) -> list[dict[str, Any]]:
    """A stream's events, a choice of two answers in turn."""
    events = [
        {
            "id": f"chatcmpl-{number}",
            "created": created,
            "choices": [{"index": index % 2, "delta": {"content": piece}, "finish_reason": None}],
        }
        for index, piece in enumerate(pieces)
    ]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    return events


def response(*pieces: str) -> list[dict[str, Any]]:
    deltas = [{"type": "response.output_text.delta", "output_index": 0, "delta": piece} for piece in pieces]
    events = [{"type": "response.created"}, *deltas, {"type": "response.completed", "text": "".join(pieces)}]
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def message(*pieces: str) -> list[dict[str, Any]]:
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}} for piece in pieces
    ]
    return [{"type": "message_start"}, *deltas, {"type": "message_stop"}]


def test_ids_times_and_where_a_stream_was_cut_are_no_difference():
    one = {"headers": [["date", "Sun"], ["server", "x"]], "events": chat("a", "A", "b", "B", "c", "C")}
    other = {
        "headers": [["date", "Mon"], ["server", "x"]],
        "events": chat("ab", "A", "c", "BC", number="f" * 16, created=2),
    }
    assert comparable(one) == comparable(other)
    for events in (response, message):
        assert comparable({"events": events("a", "b", "c")}) == comparable({"events": events("ab", "c")})


SAW = {
    "headers": [["date", "Sun"], ["server", "x"]],
    "events": chat("a", "A", "b", "B"),
    "response": {"events": response("a", "b")},
    "message": {"events": message("a", "b")},
}


@pytest.mark.parametrize(
    "change",
    [
        lambda saw: saw["headers"].append(["via", "x"]),
        lambda saw: saw["headers"].reverse(),
        lambda saw: saw["headers"][1].__setitem__(1, "y"),
        lambda saw: saw["events"].pop(1),
        lambda saw: saw["events"].insert(1, saw["events"][1]),
        lambda saw: saw["events"][2]["choices"][0]["delta"].update(content="ß"),
        lambda saw: saw["events"][2]["choices"][0].update(index=1),
        lambda saw: saw["events"][2].update(id="chatcmpl-" + "f" * 16),  # not the id of the others
        lambda saw: saw["events"][2].update(extra=1),
        lambda saw: saw["events"][-1]["choices"][0].update(finish_reason="length"),
        lambda saw: saw["events"].append("data: [DONE]"),
        lambda saw: saw["response"]["events"].pop(1),
        lambda saw: saw["response"]["events"][2].update(delta="ß"),
        lambda saw: saw["response"]["events"][2].update(output_index=1),
        lambda saw: saw["response"]["events"][2].update(sequence_number=7),
        lambda saw: saw["response"]["events"].pop(),
        lambda saw: saw["message"]["events"].pop(1),
        lambda saw: saw["message"]["events"][1]["delta"].update(text="ß"),
        lambda saw: saw["message"]["events"].pop(),
    ],
)
def test_any_other_difference_shows(change):
    changed = copy.deepcopy(SAW)
    change(changed)
    assert comparable(changed) != comparable(SAW)
