"""What the client and the upstream see of each other through a real proxy."""

import socket
import struct
import threading

import pytest

from sparseety.records import Chunk, Gap, RequestStart, Response, StreamDone
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
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

CHAT = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"caf\xc3\xa9\xe2\x80\xa8"}}]}\r\n\r\n'
DONE = b"data: [DONE]\n\n"


def test_the_client_gets_status_headers_and_body_as_the_upstream_sent_them(tmp_path):
    answer = (
        b"HTTP/1.1 418 I'm a teapot\r\nX-B: 2\r\nset-cookie: a=1\r\nX-A:  1 \r\nSet-Cookie: b=2\r\nserver: vllm\r\n"
        b"keep-alive: timeout=5\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\ncontent-length: 4\r\n\r\n\x00\xff\r\n"
    )
    with running_upstream(answer) as upstream, running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
        client.send(b"GET /anything?q=%zz&q=2 HTTP/1.1\r\nhost: here\r\n\r\n")
        head = client.read_until(b"\r\n\r\n")
        body = client.read_exactly(4)
    assert body == b"\x00\xff\r\n"
    assert head.split(b"\r\n")[1:-2] == [
        b"x-b: 2",
        b"set-cookie: a=1",
        b"x-a: 1",
        b"set-cookie: b=2",
        b"server: vllm",
        b"content-length: 4",
    ]
    assert head.startswith(b"HTTP/1.1 418 ")


def test_the_upstream_gets_the_request_as_the_client_sent_it_and_nothing_more(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(
            post(
                b"{}",
                b"Authorization: Bearer secret",
                b"Accept-Encoding: zstd",
                b"X-Twice: 1",
                b"X-Twice: 2",
                b"TE: trailers",
                b"Connection: keep-alive, x-hop",
                b"X-Hop: 1",
                path=b"/v1/caf%c3%a9/%2e%2e//x?key=a%zz&&b=",
            )
        )
        assert client.read_reply() == (200, b"{}")
        received = upstream.next_request()
    assert received.request_line == b"POST /v1/caf%c3%a9/%2e%2e//x?key=a%zz&&b= HTTP/1.1"
    assert received.headers == [
        (b"host", b"here"),
        (b"authorization", b"Bearer secret"),
        (b"accept-encoding", b"zstd"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
        (b"content-length", b"2"),
    ]
    log = proxy.service.writer.path.read_bytes()
    assert b"secret" not in log
    assert b"key=" not in log


def test_each_event_reaches_the_client_before_the_next_one_is_sent(tmp_path):
    go = [threading.Event(), threading.Event()]
    steps = [chunked(EVENT_STREAM), chunk(EVENT), go[0], chunk(b": ping\n\n"), go[1], chunk(DONE), LAST_CHUNK]
    with running_upstream(*steps) as upstream, running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
        client.send(post(CHAT, b"x-request-id: r-1", b"x-session-id: s-1"))
        client.read_until(b"\r\n\r\n")
        assert client.read_chunk() == EVENT
        assert b"sparseety_proxy_open_streams 1.0" in proxy.admin("/metrics")[1]
        go[0].set()
        assert client.read_chunk() == b": ping\n\n"
        go[1].set()
        assert client.read_chunk() == DONE
        assert client.read_chunk() == b""
    start, first, ping, done, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert (start.capture, start.endpoint, start.x_request_id, start.session) == (1, "chat", "r-1", "s-1")
    assert start.parameters is not None
    assert start.parameters.stream
    assert isinstance(first, Chunk)
    assert (first.delta_text, first.response_id, first.chunk_index) == ("caf\xe9\u2028", "chatcmpl-1", 1)
    assert isinstance(ping, Chunk)
    assert (ping.kind, ping.raw) == ("comment", ": ping")
    assert isinstance(done, Chunk)
    assert (done.kind, done.wire_index) == ("done", 3)
    assert isinstance(end, StreamDone)
    assert (end.outcome, end.end_marker, end.events, end.chunk_count) == ("complete", True, 3, 1)
    stamps = end.stamps
    assert start.ts <= stamps.sent <= stamps.headers <= stamps.first_chunk == stamps.first_token == stamps.last_token
    assert stamps.last_token <= stamps.end
    assert proxy.metric("sparseety_proxy_requests_total", endpoint="chat", outcome="complete") == 1
    assert proxy.metric("sparseety_stream_chunks_total") == 3
    assert proxy.metric("sparseety_proxy_open_streams") == 0


def test_one_connection_carries_many_requests_and_each_has_its_own_number(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        for _ in range(3):
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"{}")
    starts = [record for record in records(proxy.log_dir) if isinstance(record, RequestStart)]
    assert [start.capture for start in starts] == [1, 2, 3]
    assert len({start.uuid for start in starts}) == 3


def test_a_request_body_is_forwarded_while_it_still_arrives(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b'{"n"'))
        received = upstream.next_request()
        assert received.some_body_arrived.wait(WAIT)
        assert received.body == b'{"n"'
        client.send(chunk(b": 2}") + LAST_CHUNK)
        assert client.read_reply() == (200, b"{}")
    assert received.body == b'{"n": 2}'
    assert (b"transfer-encoding", b"chunked") in received.headers
    start = records(proxy.log_dir)[0]
    assert isinstance(start, RequestStart)
    assert start.parameters is not None
    assert start.parameters.n == 2


def test_a_body_beyond_the_capture_limit_is_forwarded_whole_and_leaves_a_gap(tmp_path):
    body = b'{"prompt":"' + b"a" * (33 << 20) + b'"}'
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(body, path=b"/v1/completions"))
        assert client.read_reply() == (200, b"{}")
        assert upstream.next_request().body == body
    start, gap, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert (start.endpoint, start.parameters) == ("completions", None)
    assert isinstance(gap, Gap)
    assert gap.captures == [1]
    assert isinstance(end, Response)


def test_a_reply_that_is_sent_before_the_request_is_read_reaches_the_client(tmp_path):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9000000\r\n\r\n"
    with (
        running_upstream(reply(b"no", status=b"413 Content Too Large"), AwaitHangUp, read_body=False) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(head)
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"x" * 9_000_000)
        assert client.read_reply() == (413, b"no")
    end = records(proxy.log_dir)[-1]
    assert isinstance(end, Response)
    assert (end.outcome, end.status) == ("complete", 413)


def test_an_upstream_that_is_down_gives_a_502_that_is_the_proxys_own(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running_proxy(tmp_path, f"http://127.0.0.1:{port}") as proxy:
        for _ in range(2):  # and it stays up
            with proxy.client() as client:
                client.send(post(CHAT))
                head = client.read_until(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 502 ")
                assert b"\r\nx-sparseety-error: upstream_unreachable\r\n" in head
                assert b'{"error": {"message": "the upstream cannot be reached' in client.read_until(b"}}")
        assert proxy.admin("/healthz")[0] == 200
        assert proxy.admin("/readyz")[0] == 503
    found = records(proxy.log_dir)
    assert [type(record) for record in found] == [RequestStart, Response] * 2
    assert isinstance(found[1], Response)
    assert (found[1].outcome, found[1].status) == ("upstream_unreachable", None)


@pytest.mark.parametrize("end", [Close, Reset])
def test_a_reply_that_breaks_off_never_ends_cleanly_at_the_client(tmp_path, end):
    steps = [chunked(EVENT_STREAM), chunk(EVENT), chunk(b"data: {"), end]
    with running_upstream(*steps) as upstream, running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
        client.send(post(CHAT))
        got = client.read_to_end()
        assert not got.endswith(LAST_CHUNK)
    last = records(proxy.log_dir)[-1]
    assert isinstance(last, StreamDone)
    assert last.outcome == "upstream_broken"
    assert last.error


def test_all_that_arrived_before_the_upstream_broke_reaches_the_client_and_the_log(tmp_path):
    steps = [chunked(EVENT_STREAM), chunk(EVENT), chunk(b"data: {"), Close]
    with running_upstream(*steps) as upstream, running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
        client.send(post(CHAT))
        client.read_until(b"\r\n\r\n")
        got = b""
        while got != EVENT + b"data: {":  # in as many chunks as the network made of it
            got += client.read_chunk()
        assert client.read_to_end() == b""
    _, text, cut, _ = records(proxy.log_dir)
    assert isinstance(text, Chunk)
    assert text.kind == "text"
    assert isinstance(cut, Chunk)
    assert (cut.kind, cut.raw) == ("unparsed", "data: {")


def test_a_short_reply_with_a_length_is_broken_off_too(tmp_path):
    short = reply(b"0123456789")[:-3]
    with (
        running_upstream(short, Close) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(post(b"{}"))
        assert client.read_to_end().endswith(b"\r\n\r\n0123456")
    end = records(proxy.log_dir)[-1]
    assert isinstance(end, Response)
    assert (end.outcome, end.bytes, end.unread) == ("upstream_broken", 7, "cut off")


def test_an_upstream_that_hangs_up_instead_of_replying_gives_a_502(tmp_path):
    with running_upstream(Close) as upstream, running_proxy(tmp_path, upstream.url) as proxy, proxy.client() as client:
        client.send(post(CHAT))
        assert b"x-sparseety-error: upstream_broken\r\n" in client.read_until(b"\r\n\r\n")
    end = records(proxy.log_dir)[-1]
    assert isinstance(end, Response)
    assert (end.outcome, end.status) == ("upstream_broken", None)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_the_upstream_request_is_aborted_when_the_client_hangs_up(tmp_path, begun, reset):
    steps = [chunked(EVENT_STREAM), chunk(EVENT)] if begun else []
    with running_upstream(*steps, AwaitHangUp) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        with proxy.client() as client:
            client.send(post(CHAT))
            received = upstream.next_request()
            assert received.body_arrived.wait(WAIT)
            if begun:
                client.read_until(EVENT)
            if reset:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert received.hung_up.wait(WAIT)
    start, *_, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert start.parameters is not None
    assert isinstance(end, StreamDone if begun else Response)
    assert end.outcome == "client_gone"


def test_the_upstream_request_is_aborted_when_the_client_hangs_up_while_it_uploads(tmp_path):
    with running_upstream(reply()) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        with proxy.client() as client:
            client.send(post(b"x" * 100)[:-50])
            received = upstream.next_request()
            assert received.some_body_arrived.wait(WAIT)
        assert received.hung_up.wait(WAIT)
    start, end = records(proxy.log_dir)
    assert isinstance(start, RequestStart)
    assert start.parameters is None
    assert isinstance(end, Response)
    assert (end.outcome, end.status) == ("client_gone", None)


def test_a_client_that_hangs_up_without_reading_its_stream_does_not_hold_the_upstream(tmp_path):
    more = [chunk(b": " + b"x" * 60_000 + b"\n\n")] * 400  # far more than all the buffers on the way hold
    with running_upstream(chunked(EVENT_STREAM), *more, AwaitHangUp) as upstream:
        with running_proxy(tmp_path, upstream.url) as proxy:
            with proxy.client() as client:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.send(post(CHAT))
                client.read_until(b"\r\n\r\n")
            assert upstream.next_request().hung_up.wait(WAIT)
        end = records(proxy.log_dir)[-1]
        assert isinstance(end, StreamDone)
        assert end.outcome == "client_gone"


def test_a_head_request_and_a_reply_without_body_pass(tmp_path):
    with (
        running_upstream(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n") as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        proxy.client() as client,
    ):
        client.send(b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"\r\ncontent-length: 5\r\n" in client.read_until(b"\r\n\r\n")
        upstream.scripts = [(b"HTTP/1.1 204 No Content\r\n\r\n",)]
        client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 204 ")
    ends = [record for record in records(proxy.log_dir) if isinstance(record, Response)]
    assert [(end.status, end.outcome, end.unread) for end in ends] == [(200, "complete", None), (204, "complete", None)]


def test_paths_of_the_admin_port_are_the_upstreams_on_the_other(tmp_path):
    with running_upstream(reply(b"theirs")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        for path in ("/metrics", "/healthz", "/readyz", "/docs"):
            with proxy.client() as client:
                client.send(b"GET " + path.encode() + b" HTTP/1.1\r\nhost: a\r\n\r\n")
                assert client.read_reply() == (200, b"theirs")
        assert proxy.admin("/readyz") == (200, b'{"ready":true,"reasons":[]}')
