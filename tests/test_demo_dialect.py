"""The demo backend against raw replies of a real vLLM 0.32."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.demo.backend import Settings, serving
from deploy.demo.dialect import FINGERPRINT
from deploy.demo.replay import Stream

SAMPLES = Path(__file__).parent / "data" / "sse"
FRANCE = "What is the capital of France?"
COUNT = "Count from 1 to 20, separated by commas."
PARIS_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
FOXES = "🦊🚀🎉🦊🚀🎉🦊🚀🎉🦊🚀"


def events_of(name: str) -> list[bytes]:
    return (SAMPLES / f"{name}.sse").read_bytes().split(b"\n\n")[:-1]


def read(event: bytes) -> Any:
    data = event.removeprefix(b"data: ")
    return None if data == b"[DONE]" else json.loads(data)


def ids_of(name: str) -> list[int]:
    bodies = [body for event in events_of(name) if (body := read(event))]
    return [i for body in bodies for choice in body["choices"] for i in choice.get("token_ids") or []]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A backend that has sampled what the recorded server had."""
    sampled = [
        (FRANCE, PARIS_IDS),
        (COUNT, ids_of("chat-return-token-ids-stop")),
        (FOXES, ids_of("completion-utf8-cut")),
        ("Say hi in a funny way.", PARIS_IDS[:-1] * 2),  # for n = 2, two streams longer than the sample
        ("Say hi in a funny way.", PARIS_IDS[:-1] * 3),
    ]
    path = tmp_path_factory.mktemp("streams") / "streams.jsonl"
    streams = [Stream(kind="en", greedy=True, prompt=p, prompt_ids=[], ids=i, finish="stop") for p, i in sampled]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, streams)))
    with serving(Settings(model="m", streams=path, token_delay=0)) as url:
        yield url


def ask_as_in(name: str, url: str) -> list[bytes]:
    """Send the sample's own request; returns the events, with the recorded server's own time and fingerprint."""
    request = json.loads((SAMPLES / f"{name}.meta.json").read_text())["request"]
    headers = {"X-Request-Id": request["headers"]["X-Request-Id"]}
    response = httpx.post(url + request["path"], json=request["body"], headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    sample = read(events_of(name)[0])
    created = str(read(response.content.split(b"\n\n")[0])["created"])
    body = response.content.replace(f'"created":{created}'.encode(), f'"created":{sample["created"]}'.encode())
    return body.replace(FINGERPRINT.encode(), b"vllm-0.32.0-90105fa2").split(b"\n\n")[:-1]


@pytest.mark.parametrize(
    "name",
    [
        "chat-return-token-ids",
        "chat-return-token-ids-stop",
        "chat-stop-string",
        "chat-stop-token-ids",
        "chat-usage",
        "chat-usage-continuous",
        "completion-utf8-cut",
    ],
)
def test_the_same_ids_give_the_very_bytes_that_vllm_sent(name: str, url: str) -> None:
    assert ask_as_in(name, url) == events_of(name)


def shape(value: Any) -> Any:
    """Keys in their order, and the types below them; of texts only whether there is one."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return value if value is None else bool(value) if isinstance(value, str) else type(value)


@pytest.mark.parametrize("name", ["chat-n2", "completion-two-prompts"])
def test_replies_of_several_choices_have_the_shape_of_vllms(name: str, url: str) -> None:
    """The recorded texts cannot be had again here; every kind of event can."""
    ours, theirs = ask_as_in(name, url), events_of(name)
    assert ours[-1] == theirs[-1] == b"data: [DONE]"
    shapes = {str(shape(read(event))) for event in theirs}
    assert {str(shape(read(event))) for event in ours} == shapes
    assert str(shape(read(ours[0]))) == str(shape(read(theirs[0])))
    assert {c["index"] for event in ours[:-1] for c in read(event)["choices"]} == {0, 1}
    finishes = [read(event) for event in ours if b'"finish_reason":"' in event]
    assert len(finishes) == 2
    assert all("system_fingerprint" in body for body in finishes)
