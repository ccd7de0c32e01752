"""No trouble with the log or the capture reaches a client."""

import errno
import os

import pytest

from proxy.capture import RequestCapture
from sparseety.errors import SparseetyError
from sparseety.records import Chunk, Gap, RequestStart, StreamDone
from tests.logbook import until
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    chunk,
    chunked,
    post,
    records,
    reply,
    running_proxy,
    running_upstream,
)

STREAM = (chunked(EVENT_STREAM), chunk(b"data: {}\n\n"), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)


@pytest.mark.parametrize("step", ["__init__", "request_body", "request_ended", "reply_head", "reply_body", "ended"])
def test_a_fault_in_the_capture_ends_the_capture_of_that_request_alone(tmp_path, monkeypatch, step, caplog):
    original, faults = getattr(RequestCapture, step), iter([True])

    def faulty(*args):
        if next(faults, False):
            raise ZeroDivisionError
        return original(*args)

    monkeypatch.setattr(RequestCapture, step, faulty)
    with running_upstream(*STREAM) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        for _ in range(2):
            with proxy.client() as client:
                client.send(post(b"{}"))
                assert client.read_reply() == (200, b"data: {}\n\ndata: [DONE]\n\n")
        until(lambda: proxy.metric("sparseety_capture_sampled_requests_total", decision="failed") == 1)
    assert "capture 1 is given up" in caplog.text
    found = records(proxy.log_dir)
    gaps = [record for record in found if isinstance(record, Gap)]
    assert [(gap.captures, gap.reason) for gap in gaps] == [([1], "capture failed: ZeroDivisionError")]
    assert [record.capture for record in found if isinstance(record, StreamDone)] == [2]


def test_a_full_disk_is_not_the_clients_business(tmp_path, monkeypatch, caplog):
    with running_upstream(*STREAM) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        written = os.write
        broken = True

        def write(*args):
            if broken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written(*args)

        monkeypatch.setattr(os, "write", write)
        with proxy.client() as client:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"data: {}\n\ndata: [DONE]\n\n")
        until(lambda: proxy.admin("/readyz")[0] == 503)
        assert b"the capture log cannot be written" in proxy.admin("/readyz")[1]
        broken = False
    assert proxy.metric("sparseety_capture_records_dropped_total") == proxy.summary.lost > 0
    assert any(isinstance(record, Gap) and record.captures == [1] for record in records(proxy.log_dir))


def test_an_event_beyond_the_limit_passes_and_leaves_a_gap(tmp_path):
    event = b"data: " + b"x" * (3 << 20) + b"\n\n"
    steps = (chunked(EVENT_STREAM), chunk(event), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
    with (
        running_upstream(*steps) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(b"{}"))
        assert client.read_reply() == (200, event + b"data: [DONE]\n\n")
    start, gap, done, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert isinstance(gap, Gap)
    assert isinstance(done, Chunk)
    assert (done.kind, done.wire_index) == ("done", 2)
    assert isinstance(end, StreamDone)
    assert (end.outcome, end.bytes, end.end_marker) == ("complete", len(event) + 14, True)


def test_an_event_stream_in_a_coding_that_cannot_be_read_passes_and_leaves_a_gap(tmp_path):
    steps = (chunked(EVENT_STREAM, b"content-encoding: compress"), chunk(b"\x1f\x9d\x08"), LAST_CHUNK)
    with (
        running_upstream(*steps) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(b"{}"))
        assert client.read_reply() == (200, b"\x1f\x9d\x08")
    _, gap, end = records(proxy.log_dir)
    assert isinstance(gap, Gap)
    assert gap.reason == "event stream: content coding compress is not known"
    assert isinstance(end, StreamDone)
    assert (end.bytes, end.events, end.reads) == (3, 0, 1)


def test_a_log_folder_that_cannot_be_written_refuses_to_start(tmp_path):
    (tmp_path / "logs").write_text("a file is in the way")
    with (
        running_upstream(reply()) as upstream,
        pytest.raises(SparseetyError, match="cannot write logs in"),
        running_proxy(tmp_path, upstream.url),
    ):
        pass
