"""Compressed bodies: what is forwarded stays as it is, the copy is inflated read by read and within bounds."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.capture import Limits, RequestCapture, RequestHead
from proxy.inflate import Bounds, CannotInflate, Inflater
from sparseety.records import AnyRecord, Chunk, Gap, RequestStart, Response, StreamDone
from tests.raw_upstream import LAST_CHUNK, chunk, chunked, post, records, running_proxy, running_upstream

STREAM = (Path(__file__).parent / "data" / "sse" / "chat-usage.sse").read_bytes()
EVENTS = [event + b"\n\n" for event in STREAM.split(b"\n\n")[:-1]]

Coder = Callable[[list[bytes]], list[bytes]]
"""Codes a body whose pieces are flushed one by one, as servers do; returns what each flush put out."""


def _zlib(window: int) -> Coder:
    def code(pieces: list[bytes]) -> list[bytes]:
        coder = zlib.compressobj(wbits=window)
        coded = [coder.compress(piece) + coder.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
        return [*coded, coder.flush()]

    return code


def _brotli(pieces: list[bytes]) -> list[bytes]:
    coder = pytest.importorskip("brotli").Compressor()
    return [*(coder.process(piece) + coder.flush() for piece in pieces), coder.finish()]


def _zstd(pieces: list[bytes]) -> list[bytes]:
    zstandard = pytest.importorskip("zstandard")
    coder = zstandard.ZstdCompressor().compressobj()
    coded = [coder.compress(piece) + coder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for piece in pieces]
    return [*coded, coder.flush()]


CODERS: dict[str, tuple[str, Coder]] = {
    "gzip": ("gzip", _zlib(31)),
    "x-gzip": ("x-gzip", _zlib(31)),
    "gzip, a member for each event": ("gzip", lambda pieces: [gzip.compress(piece) for piece in pieces]),
    "deflate": ("deflate", _zlib(15)),
    "deflate without header": ("deflate", _zlib(-15)),
    "br": ("br", _brotli),
    "zstd": ("zstd", _zstd),
}
each_coding = pytest.mark.parametrize(("coding", "coder"), CODERS.values(), ids=CODERS)


def capture(coding: str, reads: list[bytes], limits: Limits | None = None) -> list[AnyRecord]:
    request = RequestCapture(1, "u", RequestHead("POST", "/v1/chat/completions", []), 1.0, limits or Limits())
    found = request.request_ended(2.0)
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", coding.encode())]
    found += request.reply_head(200, headers, 3.0)
    for number, data in enumerate(reads):
        found += request.reply_body(data, 4.0 + number)
    return [*found, *request.ended("complete", 1e6)]


def said(found: list[AnyRecord]) -> list[tuple[str, str]]:
    return [(record.kind, record.delta_text) for record in found if isinstance(record, Chunk)]


PLAIN = said(capture("identity", [STREAM]))


@each_coding
def test_a_compressed_stream_is_read_flush_by_flush(coding, coder):
    reads = coder(EVENTS)
    found = capture(coding, reads)
    assert said(found) == PLAIN
    first = next(record for record in found if isinstance(record, Chunk) and record.delta_text)
    assert (first.wire_index, first.ts) == (2, 5.0)  # it bears the time of its own flush
    assert isinstance(found[-1], StreamDone)
    assert (found[-1].bytes, found[-1].end_marker) == (sum(map(len, reads)), True)
    assert not [record for record in found if isinstance(record, Gap)]


@each_coding
def test_it_may_be_cut_anywhere(coding, coder):
    coded = b"".join(coder(EVENTS))
    assert said(capture(coding, [bytes([byte]) for byte in coded])) == PLAIN
    for cut in range(1, len(coded), 13):
        assert said(capture(coding, [coded[:cut], coded[cut:]])) == PLAIN, cut


@each_coding
def test_a_bomb_is_given_up_within_its_bounds(coding, coder):
    coded = b"".join(coder([bytes(1 << 20)] * 64))
    inflater = Inflater(coding, Bounds(total=8 << 20, ratio=50))
    given: list[bytes] = []
    with pytest.raises(CannotInflate, match="inflates to more than"):
        given.extend(inflater.feed(coded[at : at + 1000]) for at in range(0, len(coded), 1000))
    assert sum(map(len, given)) <= 8 << 20


@each_coding
def test_a_bomb_in_a_stream_is_a_gap_and_the_count_goes_on(coding, coder):
    reads = coder([*EVENTS[:3], bytes(4 << 20), *EVENTS[3:]])
    found = capture(coding, reads, Limits(stream_bytes=1 << 20))
    (gap,) = (record for record in found if isinstance(record, Gap))
    assert (gap.count, gap.captures) == (1, [1])
    assert f"{coding} inflates to more than" in gap.reason
    assert said(found) == PLAIN[:3]
    assert isinstance(found[-1], StreamDone)
    assert (found[-1].bytes, found[-1].end_marker) == (sum(map(len, reads)), False)


@each_coding
def test_damage_is_a_gap_and_what_came_before_it_is_kept(coding, coder):
    reads = coder(EVENTS)
    found = capture(coding, [*reads[:3], b"\xff\xff\xff\xff nonsense" * 20, *reads[3:]])
    assert said(found)[:3] == PLAIN[:3]
    gaps = [record for record in found if isinstance(record, Gap)]
    assert len(gaps) == 1 or not found[-1].end_marker


@pytest.mark.parametrize("coding", ["compress", "gzip, br", "x", "ÿ"])
def test_a_coding_that_cannot_be_read_is_a_gap_and_a_count(coding):
    request = RequestCapture(1, "u", RequestHead("POST", "/v1/chat/completions", []), 1.0, Limits())
    request.request_ended(2.0)
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", coding.encode("latin-1"))]
    (gap,) = request.reply_head(200, headers, 3.0)
    assert isinstance(gap, Gap)
    assert "is not known" in gap.reason
    assert request.reply_body(b"coded", 4.0) == []
    (done,) = request.ended("complete", 5.0)
    assert isinstance(done, StreamDone)
    assert (done.bytes, done.events, done.chunk_count) == (5, 0, 0)


@each_coding
def test_a_compressed_whole_reply_is_read(coding, coder):
    coded = b"".join(coder([b'{"id":"a","choices":[{"index":0,"message":{"content":"x"}}]}']))
    request = RequestCapture(1, "u", RequestHead("POST", "/v1/chat/completions", []), 1.0, Limits())
    request.reply_head(200, [(b"content-encoding", coding.upper().encode())], 3.0)
    for byte in coded:
        request.reply_body(bytes([byte]), 4.0)
    (end,) = request.ended("complete", 5.0)
    assert isinstance(end, Response)
    assert ([choice.text for choice in end.choices], end.unread, end.bytes) == (["x"], None, len(coded))


@each_coding
def test_the_parameters_of_a_compressed_request_are_read(coding, coder):
    coded = b"".join(coder([b'{"model":"m","n":2}']))
    head = RequestHead("POST", "/v1/chat/completions", [(b"content-encoding", coding.encode())])
    request = RequestCapture(1, "u", head, 1.0, Limits())
    assert request.request_body(coded[:5], 2.0) == request.request_body(coded[5:], 2.0) == []
    (start,) = request.request_ended(3.0)
    assert isinstance(start, RequestStart)
    assert start.parameters
    assert (start.parameters.model, start.parameters.n) == ("m", 2)


@pytest.mark.parametrize(
    ("coding", "body", "reason"),
    [
        ("gzip", gzip.compress(bytes(1 << 20)), "request: gzip inflates to more than 1000 bytes"),
        ("gzip", gzip.compress(b"{}")[:-3], "request: the compressed body is cut off"),
        ("gzip", b"{}", "request: not gzip: error"),
        ("zip", b"{}", "request: content coding zip is not known"),
    ],
)
def test_a_compressed_request_that_cannot_be_read_is_a_gap(coding, body, reason):
    head = RequestHead("POST", "/v1/chat/completions", [(b"content-encoding", coding.encode())])
    request = RequestCapture(1, "u", head, 1.0, Limits(body_bytes=1000))
    start, gap = [*request.request_body(body, 2.0), *request.request_ended(3.0)]
    assert isinstance(start, RequestStart)
    assert isinstance(gap, Gap)
    assert (start.parameters, gap.reason) == (None, reason)


@each_coding
def test_the_client_gets_the_coded_bytes_flush_by_flush(coding, coder, tmp_path):
    reads = coder(EVENTS)
    head = chunked(b"content-type: text/event-stream", b"content-encoding: " + coding.encode())
    coded_ask = b"".join(coder([b'{"model":"m","stream":true}']))
    with (
        running_upstream(head, *(chunk(read) for read in reads), LAST_CHUNK) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(coded_ask, b"content-encoding: " + coding.encode(), b"accept-encoding: " + coding.encode()))
        assert client.read_reply() == (200, b"".join(reads))
        assert bytes(upstream.next_request().body) == coded_ask
    found = records(proxy.log_dir)
    assert said(found) == PLAIN
    assert isinstance(found[0], RequestStart)
    assert found[0].parameters
    assert found[0].parameters.model == "m"
