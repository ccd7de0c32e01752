"""Field cases: streams that broke other tools, through the pure capture and through a real proxy on real sockets.

tests/data/cases-sse.jsonl names the public report behind each. The borders of `upstream_reads` are part of a case.
"""

import ast
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.capture import Limits, RequestCapture, RequestHead
from sparseety.records import AnyRecord, Chunk, RequestStart, Response, StreamDone, Usage
from tests.raw_upstream import LAST_CHUNK, chunk, chunked, post, records, running_proxy, running_upstream

CASES = Path(__file__).parent / "data" / "cases-sse.jsonl"
ASK = b'{"model":"toy","stream":true}'


@dataclass
class Case:
    name: str
    reads: list[bytes]
    headers: list[tuple[bytes, bytes]]
    path: str
    expect: dict[str, Any]


def _cases() -> list[Case]:
    found = []
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        for variant in case["input"].get("variants", [case["input"]]):
            if "upstream_reads" not in variant:
                continue  # of raw HTTP; below
            headers = {"content-type": "text/event-stream", **variant.get("response_headers", {})}
            reads = [ast.literal_eval(read) for read in variant["upstream_reads"]]
            found.append(
                Case(
                    f"{case['id']} {variant.get('name', case['title'])}",
                    reads,
                    [(name.encode(), value.encode()) for name, value in headers.items()],
                    "/v1/responses" if b"response.output_text" in reads[0] else "/v1/chat/completions",
                    variant["expect"],
                )
            )
    return found


ALL = _cases()
by_name = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


def pure(case: Case, reads: list[bytes]) -> list[AnyRecord]:
    head = RequestHead("POST", case.path, [(b"authorization", b"Bearer secret")])
    request = RequestCapture(1, "u", head, 1.0, Limits())
    found = [*request.request_body(ASK, 2.0), *request.request_ended(3.0), *request.reply_head(200, case.headers, 4.0)]
    for number, data in enumerate(reads):
        found += request.reply_body(data, 5.0 + number)
    return [*found, *request.ended("complete", 1e6)]


def chunks(found: list[AnyRecord]) -> list[Chunk]:
    return [record for record in found if isinstance(record, Chunk)]


def comparable(found: list[AnyRecord]) -> list[dict[str, Any]]:
    plain = [msgspec.to_builtins(record) for record in found]
    for record in plain:
        for name in ("ts", "uuid", "read", "reads", "stamps"):
            record.pop(name, None)
    return plain


@by_name
def test_a_case_is_recorded_as_the_standard_reads_it(case):
    found = pure(case, case.reads)
    made, done, expect = chunks(found), found[-1], case.expect
    assert isinstance(done, StreamDone)
    assert done.bytes == sum(map(len, case.reads))
    choices = expect.get("by_choice") or {"0": expect}
    for choice, expected in choices.items():
        mine = [record for record in made if record.choice == int(choice)]
        if "content" in expected:
            assert "".join(record.delta_text for record in mine) == expected["content"]
        if "finish_reason" in expected:
            assert [record.finish_reason for record in mine if record.finish_reason] == [expected["finish_reason"]]
    if expect.get("done"):
        assert done.end_marker
        assert [record.kind for record in made][-1] == "done"
    if "comments" in expect:
        raw = [record.raw for record in made if record.kind == "comment"]
        assert raw == [f":{comment}" for comment in expect["comments"]]
    if "usage" in expect:
        assert done.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)
    if expect.get("outcome") == "upstream_error":
        assert [record.kind for record in made].count("error") == 1
        assert next(record.raw for record in made if record.kind == "error")
    if "events" in expect:  # those that a client sees: they have data
        seen = {record.wire_index for record in made if record.raw is None or "data:" in record.raw}
        assert len(seen) == len(expect["events"])


@by_name
def test_a_case_is_recorded_the_same_however_it_is_cut(case):
    whole = b"".join(case.reads)
    expected = comparable(pure(case, [whole]))
    assert comparable(pure(case, case.reads)) == expected
    assert comparable(pure(case, [bytes([byte]) for byte in whole])) == expected
    for cut in range(1, len(whole)):
        assert comparable(pure(case, [whole[:cut], whole[cut:]])) == expected, cut


@by_name
def test_a_case_passes_a_real_proxy_to_the_byte_and_is_recorded_the_same(case, tmp_path):
    heads = [name + b": " + value for name, value in case.headers]
    script = [chunked(*heads), *(chunk(read) for read in case.reads), LAST_CHUNK]
    with (
        running_upstream(*script) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(ASK, b"accept-encoding: gzip", b"authorization: Bearer secret", path=case.path.encode()))
        assert client.read_reply() == (200, b"".join(case.reads))
    assert comparable(records(proxy.log_dir)) == comparable(pure(case, case.reads))
    assert all(b"secret" not in file.read_bytes() for file in proxy.log_dir.iterdir())


def test_an_error_body_instead_of_a_stream_is_a_plain_response(tmp_path):
    body = b'{"error":{"message":"n must be positive","code":400}}'
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    with (
        running_upstream(head + body) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(ASK))
        assert client.read_reply() == (400, body)
    start, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert isinstance(end, Response)
    assert (end.status, end.choices, end.unread) == (400, [], "status 400")


def test_each_read_is_forwarded_at_once_and_its_events_bear_its_time(tmp_path):
    """A3-03: nothing waits for a whole event or character, and clumps show in the log."""
    pieces = [
        b'data: {"choices":[{"text":"\xe4',
        b'\xb8\xad"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\nda',
        b"ta: [DONE]\n\n",
    ]
    gates = [threading.Event() for _ in pieces]
    steps = [step for gate, piece in zip(gates, pieces, strict=True) for step in (gate, chunk(piece))]
    head = chunked(b"content-type: text/event-stream", b"x-accel-buffering: no")
    with (
        running_upstream(head, *steps, LAST_CHUNK) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(ASK, path=b"/v1/completions"))
        assert b"x-accel-buffering: no" in client.read_until(b"\r\n\r\n").lower()
        for gate, piece in zip(gates, pieces, strict=True):
            gate.set()
            assert client.read_chunk() == piece  # it is here while the upstream still waits to send the next
        assert client.read_chunk() == b""
    first, second, done = chunks(records(proxy.log_dir))
    assert (first.delta_text, second.delta_text, done.kind) == ("中", "b", "done")
    assert first.ts == second.ts < done.ts
    assert [record.read or record.wire_index for record in (first, second, done)] == [2, 2, 3]
