"""The whole proxy over httpx's own transport: bytes and records are those that it has over the project's."""

import os
from pathlib import Path

import httpx
import msgspec
import pytest

from proxy import worker
from proxy.upstream import Upstream
from sparseety.records import AnyRecord, Chunk, LogClose, LogOpen
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    Close,
    Reset,
    chunk,
    chunked,
    post,
    records,
    reply,
    running_proxy,
    running_upstream,
)

ROOT = Path(__file__).parent.parent
SOURCE = Path(os.environ.get("SPARSEETY_TEST_SAMPLES", ROOT / "tests" / "data" / "sse"))
SAMPLES = sorted([*SOURCE.glob("*.sse"), *SOURCE.glob("*.body")])
ASK = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'

BROKEN = {
    "an error of the server": (reply(b'{"error":{}}', status=b"500 Internal Server Error"),),
    "cut in mid-stream": (chunked(EVENT_STREAM), chunk(b'data: {"choices":[]}\n\n'), Close),
    "reset in mid-stream": (chunked(EVENT_STREAM), chunk(b'data: {"choices":[]}\n\n'), Reset),
}


def script_of(sample: Path) -> tuple[bytes, ...]:
    data = sample.read_bytes()
    head = chunked(EVENT_STREAM) if sample.suffix == ".sse" else chunked(b"content-type: application/json")
    return head, chunk(data[: len(data) // 2]), chunk(data[len(data) // 2 :]), LAST_CHUNK


def served(folder: Path, script: tuple[object, ...]) -> tuple[bytes, bytes, bool, list[AnyRecord]]:
    """Head, body and whether that was whole, as a client gets them, and the log of it."""
    with (
        running_upstream(*script) as upstream,  # type: ignore[arg-type]
        running_proxy(folder, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(ASK, b"connection: close"))
        got = b""
        while data := client.socket.recv(1 << 16):
            got += data
    head, _, rest = got.partition(b"\r\n\r\n")
    body, whole = unchunked(rest) if b"transfer-encoding: chunked" in head else (rest, True)
    found = [told(record) for record in records(proxy.log_dir) if not isinstance(record, LogOpen | LogClose)]
    return head, body, whole, found


def unchunked(data: bytes) -> tuple[bytes, bool]:
    """How the body was cut into chunks is the network's doing. False: its end is missing."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if size == b"0":
            return body, True
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body, False


def told(record: AnyRecord) -> AnyRecord:
    """A record without what differs from run to run: times, names, how reads were cut, an error's words."""
    changes = {"ts": 0.0, "uuid": "", "stamps": None, "reads": 0, "error": None}
    if isinstance(record, Chunk):
        changes["read"] = None
    known = {name: value for name, value in changes.items() if name in record.__struct_fields__}
    return msgspec.structs.replace(record, **known)


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, script: tuple[object, ...]) -> None:
    own = served(folder / "own", script)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "build_upstream", lambda config: Upstream(config.upstream, httpx.AsyncHTTPTransport()))
        reference = served(folder / "reference", script)
    assert own == reference
    assert len(own[3]) >= 2


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_real_replies_and_their_records_are_those_over_the_reference_transport(tmp_path, monkeypatch, sample):
    compare(tmp_path, monkeypatch, script_of(sample))


@pytest.mark.parametrize("ending", BROKEN)
def test_broken_replies_and_their_records_are_those_over_the_reference_transport(tmp_path, monkeypatch, ending):
    compare(tmp_path, monkeypatch, BROKEN[ending])
