"""Every stream that was taken from a real vLLM, through the pure capture, cut everywhere.

A few lie in tests/data/sse; the rest is read where the checkout has the whole collection beside it. What a stream says
is found out here by other means than the capture's: line by line with json.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.capture import ENDPOINTS, Limits, RequestCapture, RequestHead
from sparseety.records import AnyRecord, Chunk, RequestStart, Response, StreamDone

HERE = Path(__file__).parent / "data" / "sse"
SHARED = Path(
    os.environ.get("SPARSEETY_TEST_SAMPLES") or Path(__file__).parent.parent.parent / "shared" / "sse-samples"
)
_PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "generate": "/inference/v1/generate",
    "error": "/v1/chat/completions",
}


@dataclass
class Sample:
    name: str
    data: bytes
    meta: dict[str, Any]  # request and response as they were; empty for some

    @property
    def path(self) -> str:
        return self.meta.get("request", {}).get("path") or _PATHS[self.name.partition("-")[0]]

    @property
    def status(self) -> int:
        return self.meta.get("response", {}).get("status", 200)

    @property
    def ask(self) -> bytes:
        body = self.meta.get("request", {}).get("body", {})
        return body.encode() if isinstance(body, str) else json.dumps(body).encode()

    def reads(self) -> list[bytes]:
        """As the server sent it, one HTTP chunk a read."""
        found, at = [], 0
        for _, size in self.meta.get("http_chunks_ms_bytes", []):
            found.append(self.data[at : at + size])
            at += size
        return [*found, self.data[at:]] if at < len(self.data) else found


def samples(kind: str) -> list[Sample]:
    paths = {path.name: path for folder in (SHARED, HERE) if folder.is_dir() for path in folder.glob(f"*.{kind}")}
    found = []
    for path in sorted(paths.values(), key=lambda path: path.name):
        meta = path.with_suffix(".meta.json")
        found.append(Sample(path.stem, path.read_bytes(), json.loads(meta.read_bytes()) if meta.exists() else {}))
    return found


STREAMS, BODIES = samples("sse"), samples("body")
each_stream = pytest.mark.parametrize("sample", STREAMS, ids=lambda sample: sample.name)


def capture(sample: Sample, reads: list[bytes], content_type: bytes = b"text/event-stream") -> list[AnyRecord]:
    head = RequestHead("POST", sample.path, [(b"authorization", b"Bearer secret")])
    request = RequestCapture(1, "u", head, 1.0, Limits())
    found = [*request.request_body(sample.ask, 2.0), *request.request_ended(3.0)]
    found += request.reply_head(sample.status, [(b"content-type", content_type)], 4.0)
    for number, data in enumerate(reads):
        found += request.reply_body(data, 5.0 + number)
    return [*found, *request.ended("complete", 1e6)]


def plain(found: list[AnyRecord]) -> list[dict[str, Any]]:
    """The records as data, less what is about reads and their times."""
    plain = [msgspec.to_builtins(record) for record in found]
    for record in plain:
        for name in ("ts", "read", "reads", "stamps"):
            record.pop(name, None)
    return plain


def test_the_collection_holds_every_endpoint():
    paths = {sample.path for sample in STREAMS}
    assert set(ENDPOINTS) <= paths


@dataclass
class Said:
    """What a stream says, read without our code."""

    text: dict[int, str]
    reasoning: dict[int, str]
    arguments: dict[int, str]
    finish: dict[int, str]
    ids: list[int]
    response_id: str | None = None
    usage: tuple[int, int] | None = None  # prompt, completion
    end: bool = False


def said_by(data: bytes) -> Said:
    said = Said({}, {}, {}, {}, [])
    for line in data.decode().split("\n"):
        if line == "data: [DONE]":
            said.end = True
        elif line.startswith("data: {"):
            _add(said, json.loads(line[6:]))
    return said


def _add(said: Said, event: dict[str, Any]) -> None:
    def put(where: dict[int, str], choice: int, text: str | None) -> None:
        where[choice] = where.get(choice, "") + (text or "")

    kind, holder = event.get("type"), event.get("response") or event.get("message") or event
    said.response_id = said.response_id or holder.get("id")
    usage = event.get("usage") or holder.get("usage")
    if usage and "prompt_tokens" in usage:
        said.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    elif usage:
        said.usage = (usage["input_tokens"], usage["output_tokens"])
    if kind == "content_block_delta":
        put(said.text, 0, event["delta"].get("text"))
    elif kind == "response.output_text.delta":
        put(said.text, 0, event["delta"])
    elif kind == "message_delta":
        said.finish[0] = event["delta"]["stop_reason"]
    elif kind == "response.completed":
        said.finish[0] = event["response"]["status"]
    said.end |= kind in ("message_stop", "response.completed")
    for choice in event.get("choices", []):
        delta, index = choice.get("delta") or {}, choice["index"]
        put(said.text, index, choice.get("text") or delta.get("content"))
        put(said.reasoning, index, delta.get("reasoning"))
        for call in delta.get("tool_calls") or []:
            put(said.arguments, index, call.get("function", {}).get("arguments"))
        said.ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            said.finish[index] = choice["finish_reason"]


@each_stream
def test_a_sample_is_recorded_as_its_client_reads_it(sample):
    found = capture(sample, sample.reads() or [sample.data])
    start, done = found[0], found[-1]
    assert isinstance(start, RequestStart)
    assert isinstance(done, StreamDone)
    chunks = [record for record in found if isinstance(record, Chunk)]
    if sample.path not in ENDPOINTS:
        assert (chunks, done.bytes) == ([], len(sample.data))
        return
    said = said_by(sample.data)
    if sample.meta:
        assert start.parameters
        assert (start.parameters.stream, start.parameters.model) == (True, "m")
    for kind, texts in (("text", said.text), ("reasoning", said.reasoning), ("tool_call", said.arguments)):
        for choice in texts:
            mine = [record.delta_text for record in chunks if (record.kind, record.choice) == (kind, choice)]
            assert "".join(mine) == texts[choice], kind
    assert {record.choice: record.finish_reason for record in chunks if record.finish_reason} == said.finish
    assert [record.response_id for record in chunks if record.response_id] == [said.response_id]
    assert sorted(token for record in chunks for token in record.token_ids or []) == sorted(said.ids)
    usage = done.usage and (done.usage.prompt_tokens, done.usage.completion_tokens)
    assert usage == said.usage
    assert done.end_marker == said.end
    assert done.total_text_len == sum(
        len(text) for texts in (said.text, said.reasoning, said.arguments) for text in texts.values()
    )
    assert [record.kind for record in chunks].count("unparsed") == (0 if sample.data.endswith(b"\n\n") else 1)


@each_stream
def test_a_sample_is_recorded_the_same_wherever_it_is_cut(sample):
    data = sample.data
    expected = plain(capture(sample, [data]))
    assert plain(capture(sample, sample.reads())) == expected
    assert plain(capture(sample, [bytes([byte]) for byte in data])) == expected
    step = 1 + len(data) // 800  # every cut of a small one; of a large one 800, and those around each event's end
    cuts = {*range(1, len(data), step)}
    ends = [at for at in range(len(data)) if data[at : at + 2] == b"\n\n"][::step]
    cuts |= {cut for end in ends for cut in (end, end + 1, end + 2, end + 3) if 0 < cut < len(data)}
    for cut in cuts:
        assert plain(capture(sample, [data[:cut], data[cut:]])) == expected, cut


@pytest.mark.parametrize("sample", BODIES, ids=lambda sample: sample.name)
def test_a_whole_reply_is_read_or_says_why_not(sample):
    found = capture(sample, [sample.data[at : at + 100] for at in range(0, len(sample.data), 100)], b"application/json")
    end = found[-1]
    assert isinstance(end, Response)
    body = json.loads(sample.data)
    if sample.status != 200:
        assert end.choices == []
        assert end.unread == (f"status {sample.status}" if sample.path in ENDPOINTS else None)
    elif sample.path not in ENDPOINTS:
        assert (end.choices, end.unread, end.sha256) == ([], None, None)
    else:
        assert (end.unread, end.response_id) == (None, body["id"])
        texts = (
            [choice["message"]["content"] for choice in body["choices"]]
            if "choices" in body
            else [part["text"] for item in body["output"] for part in item["content"]]
        )
        assert [choice.text for choice in end.choices] == texts
        assert all(choice.finish_reason for choice in end.choices)
        assert end.usage
        assert end.usage.completion_tokens == body["usage"].get("completion_tokens", body["usage"].get("output_tokens"))
