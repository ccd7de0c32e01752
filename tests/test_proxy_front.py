"""What the front does with clients that are old, slow, rude or broken. All over real sockets."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator

import pytest

from proxy.front import FrontLimits, FrontProtocol
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    Close,
    RawClient,
    RawUpstream,
    Reset,
    RunningProxy,
    Step,
    chunk,
    chunked,
    post,
    reply,
    running_proxy,
    running_upstream,
)

NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"


class Front:
    """A proxy and what stands behind it, used by all tests of this file: each sets the script it needs."""

    def __init__(self, upstream: RawUpstream, proxy: RunningProxy) -> None:
        self.upstream, self.proxy = upstream, proxy

    def answers(self, *steps: Step) -> None:
        self.upstream.scripts = [steps]

    @contextlib.contextmanager
    def client(self) -> Iterator[RawClient]:
        self.upstream.requests.clear()
        while self.upstream.arrived.acquire(blocking=False):
            pass
        with self.proxy.client() as client:
            yield client

    def ask(self, request: bytes) -> bytes:
        """All that comes back to one request, up to the end of the connection."""
        with self.client() as client:
            client.send(request)
            return client.read_to_end()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path_factory.mktemp("front"), upstream.url) as proxy,
    ):
        yield Front(upstream, proxy)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    quick = FrontLimits(head_seconds=0.3, half_closed_seconds=0.2, linger_seconds=0.2)
    monkeypatch.setattr(FrontProtocol, "limits", quick)
    return


def head_of(data: bytes) -> list[bytes]:
    return data.partition(b"\r\n\r\n")[0].split(b"\r\n")


def refusal(data: bytes) -> tuple[int, str]:
    """Status and code of a reply that must be the proxy's own, in OpenAI's form, and the last on its connection."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert b"connection: close" in lines
    assert b"x-sparseety-error: " + error["type"].encode() in lines
    assert lines[0].startswith(b"HTTP/1.1 %d " % error["code"])
    return error["code"], error["type"]


# ------------------------------------------------------------------------------------------------------- HTTP/1.0


def test_a_client_of_http_1_0_gets_a_stream_unchunked_and_ended_by_the_connections_end(front):
    front.answers(chunked(EVENT_STREAM), chunk(b"data: 1\n\n"), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
    got = front.ask(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n{}")
    assert head_of(got) == [b"HTTP/1.1 200 OK", EVENT_STREAM, b"connection: close"]
    assert got.endswith(b"\r\n\r\ndata: 1\n\ndata: [DONE]\n\n")


def test_a_client_of_http_1_0_keeps_its_connection_where_it_asks_and_the_reply_has_a_length(front):
    front.answers(reply(b"{}"))
    with front.client() as client:
        for _ in range(2):
            client.send(b"GET /v1/models HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n")
            assert b"\r\nconnection: keep-alive\r\n" in client.read_until(b"\r\n\r\n")
            assert client.read_exactly(2) == b"{}"
        client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in client.read_until(b"\r\n\r\n")
        assert client.read_to_end() == b"{}"


def test_a_stream_that_breaks_off_is_reset_where_the_connections_end_would_be_its_clean_end(front):
    go = threading.Event()
    front.answers(chunked(EVENT_STREAM), chunk(b"data: 1\n\n"), go, Close)
    with front.client() as client:
        client.send(b"GET /v1/x HTTP/1.0\r\n\r\n")
        client.read_until(b"data: 1\n\n")
        go.set()
        with pytest.raises(ConnectionResetError):
            client.socket.recv(100)


# ------------------------------------------------------------------------------------------------ bodies, framing


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 27\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 27\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n"),
        (b"GET", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ],
)
def test_a_reply_without_a_body_passes_with_its_headers_and_the_connection_goes_on(front, method, answer):
    with front.client() as client:
        for _ in range(2):
            front.answers(answer)
            client.send(method + b" /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
            assert client.read_until(b"\r\n\r\n") == answer


def test_trailers_of_a_request_are_dropped_and_never_become_headers(front):  # A2-12
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
            b'8;ext=1\r\n{"stream\r\n7\r\n":true}\r\n0\r\nX-Sum: 1\r\nauthorization: y\r\n\r\n'
        )
        assert client.read_reply() == (200, b"{}")
        client.send(NEXT)
        assert client.read_reply() == (200, b"{}")
    first, second = front.upstream.requests
    assert first.body == b'{"stream":true}'
    names = [name for name, _ in first.headers]
    assert names == [b"host", b"content-type", b"transfer-encoding"]
    assert second.request_line == b"GET /next HTTP/1.1"


def test_a_body_is_asked_for_only_where_the_client_waits_for_that(front):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(post(b"{}", b"expect: 100-continue"))  # all at once
        assert client.read_reply() == (200, b"{}")
        client.send(post(b"{}", b"expect: 100-continue")[:-2])
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert client.read_reply() == (200, b"{}")
        client.send(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert front.upstream.next_request()
        client.send(b"{}")
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize(
    "body", [b"", b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_an_offer_to_upgrade_to_http_2_is_passed_over_and_the_body_kept(front, method, body):
    """As Java's HttpClient makes it with the first request of a connection."""
    front.answers(reply(b"{}"))
    with front.client() as client:
        head = b" /a?b HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        client.send(
            method + head + b"HTTP2-Settings: AA\r\n" + (body or b"\r\n") + b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"
        )
        assert client.read_reply() == (200, b"{}")
        assert client.read_reply() == (200, b"{}")
    first, second = front.upstream.requests
    assert first.request_line == method + b" /a?b HTTP/1.1"
    assert first.body == (b"{}" if body else b"")
    assert not {b"upgrade", b"connection", b"http2-settings"} & {name for name, _ in first.headers}
    assert second.request_line == b"GET /next HTTP/1.1"


def test_requests_sent_in_one_go_are_answered_one_after_the_other(front):
    front.upstream.scripts = [(reply(b"%d" % number),) for number in range(20)]
    with front.client() as client:
        client.send(b"".join(post(b"%d" % number, path=b"/%d" % number) for number in range(20)))
        for number in range(20):
            assert client.read_reply() == (200, b"%d" % number)
    assert [request.body for request in front.upstream.requests] == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(
    ("line", "arrives"),
    [
        (b"OPTIONS * HTTP/1.1", b"OPTIONS * HTTP/1.1"),
        (b"GET http://user:pw@other.example/v1/models?a HTTP/1.1", None),
        (b"GET /v1/a%2Fb//c/../%2e/%zz?? HTTP/1.1", None),
        (b"GET /v1/models? HTTP/1.1", None),
        (b'GET /a;b?{"x"}|\\^` HTTP/1.1', None),
        (b"PROPFIND /v1 HTTP/1.1", None),
        (b"DELETE /v1/x HTTP/1.1", None),
    ],
)
def test_targets_and_methods_arrive_as_they_were_sent(front, line, arrives):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(line + b"\r\nHost: h\r\n\r\n")
        assert client.read_reply() == (200, b"{}")
        assert front.upstream.next_request().request_line == (arrives or line)


def test_header_values_pass_as_bytes(front):
    front.answers(
        reply(b"", b"x-utf8: caf\xc3\xa9", b"x-latin: \xe9\t\xff", b"x-empty: ", b"x-twice: 1", b"x-twice: 2")
    )
    with front.client() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: caf\xc3\xa9 \xff\r\nX-B:\r\nX-A: 2\r\n\r\n")
        lines = client.read_until(b"\r\n\r\n").split(b"\r\n")
        assert lines[1:6] == [
            b"x-utf8: caf\xc3\xa9",
            b"x-latin: \xe9\t\xff",
            b"x-empty: ",
            b"x-twice: 1",
            b"x-twice: 2",
        ]
        assert front.upstream.next_request().headers == [
            (b"host", b"h"),
            (b"x-a", b"caf\xc3\xa9 \xff"),
            (b"x-b", b""),
            (b"x-a", b"2"),
        ]


# ------------------------------------------------------------------------------------ clients that end their side


def test_a_client_that_ends_its_side_gets_its_reply(front):
    front.answers(reply(b"whole"))
    with front.client() as client:
        client.send(post(b"{}"))
        client.socket.shutdown(socket.SHUT_WR)
        assert client.read_to_end().endswith(b"\r\n\r\nwhole")


def test_a_client_that_ends_its_side_gets_the_rest_of_a_stream_that_goes_on(front, limits):
    go = [threading.Event() for _ in range(2)]
    front.answers(chunked(EVENT_STREAM), go[0], chunk(b"a"), go[1], chunk(b"b"), LAST_CHUNK)
    with front.client() as client:
        client.send(post(b"{}"))
        client.socket.shutdown(socket.SHUT_WR)
        client.read_until(b"\r\n\r\n")
        go[0].set()
        assert client.read_chunk() == b"a"
        threading.Event().wait(0.5)  # more than the moment in which something had to be written
        go[1].set()
        assert client.read_chunk() == b"b"
        assert client.read_to_end() == LAST_CHUNK


def test_a_client_that_ended_its_side_and_gets_nothing_counts_as_gone(front, limits):
    front.answers(AwaitHangUp)
    with front.client() as client:
        client.send(post(b"{}"))
        client.socket.shutdown(socket.SHUT_WR)
        assert front.upstream.next_request().hung_up.wait(WAIT)


def test_a_reply_that_breaks_off_while_a_half_closed_client_takes_nothing_is_no_error(front, limits, caplog):
    go = threading.Event()
    front.answers(chunked(), chunk(bytes(8 << 20)), go, Reset)
    with front.client() as client:
        client.send(post(b"{}"))
        client.read_until(b"\r\n\r\n")
        client.socket.shutdown(socket.SHUT_WR)
        go.set()  # the connection is closing now, with bytes that the client does not take
        threading.Event().wait(1.0)  # the proxy looks at it several times
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_client_that_hung_up_in_a_stream_is_noticed_even_if_the_stream_pauses(front, limits):
    go = threading.Event()
    front.answers(chunked(EVENT_STREAM), chunk(b"a"), go, chunk(b"b"), AwaitHangUp)
    with front.client() as client:
        client.send(post(b"{}"))
        client.read_until(b"a\r\n")
    go.set()  # written to a closed socket, which answers with a reset
    assert front.upstream.next_request().hung_up.wait(WAIT)


def test_each_of_several_waiting_requests_is_aborted_when_their_client_hangs_up(front, limits):
    front.answers(AwaitHangUp)
    with front.client() as client:
        client.send(post(b"{}") * 3)
        received = front.upstream.next_request()
    assert received.hung_up.wait(WAIT)
    assert len(front.upstream.requests) == 1


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\nhost: h\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\n", 501, "not_implemented"),
        (b"CONNECT other.example:443 HTTP/1.1\r\nhost: h\r\n\r\n", 501, "not_implemented"),
        (b"FROB / HTTP/1.1\r\nhost: h\r\n\r\n", 501, "not_implemented"),
        (b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", 505, "http_version"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 501, "not_implemented"),  # TLS
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: 1\r\n 2\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: 1\x002\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: 1\r2\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: h\nx: 1\r\n\r\n", 400, "bad_request"),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: h\r\n\r\n", 400, "bad_request"),
    ],
)
def test_what_is_refused_is_said_clearly_and_marked_as_the_proxys_answer(front, limits, request_, status, code):
    front.answers(reply(b"{}"))
    assert refusal(front.ask(request_)) == (status, code)
    assert not front.upstream.requests


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1001 + b"\r\n",
        b"\r\n" * 100_000,
    ],
)
def test_headers_without_end_are_refused(front, limits, flood):
    front.answers(reply(b"{}"))
    assert refusal(front.ask(flood)) == (431, "headers_too_large")


@pytest.mark.parametrize("flood", [b"1;", b"0\r\nx: ", b"2\r\nab\r\n0\r\n"])
def test_what_stands_between_the_chunks_of_a_body_has_a_limit_too(front, limits, flood):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        received = front.upstream.next_request()
        client.send(flood + b"x" * 200_000)
        assert refusal(client.read_to_end()) == (431, "headers_too_large")
    assert received.hung_up.wait(WAIT)


def test_large_headers_below_the_limit_pass(front):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(post(b"{}", *[b"x-%d: " % number + b"y" * 600 for number in range(100)]))
        assert client.read_reply() == (200, b"{}")
    assert len(front.upstream.requests[0].headers) == 102


@pytest.mark.parametrize("beginning", [b"G", b"GET / HTTP/1.1\r\nhost:", b"\r\n"])
@pytest.mark.parametrize("earlier", [False, True])
def test_headers_that_take_too_long_are_refused(front, limits, beginning, earlier):
    front.answers(reply(b"{}"))
    with front.client() as client:
        if earlier:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"{}")
        client.send(beginning)
        assert refusal(client.read_to_end()) == (408, "request_timeout")


def test_a_body_may_take_any_time(front, limits):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(post(b"{}")[:-2])
        threading.Event().wait(0.7)  # more than twice the time that headers have
        client.send(b"{}")
        assert client.read_reply() == (200, b"{}")


def test_a_request_that_the_proxy_does_not_read_yet_is_not_refused_as_late(front, limits):
    go = threading.Event()
    front.upstream.scripts = [
        (chunked(), chunk(b"a"), go, LAST_CHUNK),
        *[(reply(b"%d" % number),) for number in (2, 3, 4)],
    ]
    with front.client() as client:
        client.send(post(b"{}") * 2)
        client.read_until(b"a\r\n")
        client.send(post(b"{}") + post(b"{}")[:20])  # two wait by now: nothing more is read
        client.send(post(b"{}")[20:])
        threading.Event().wait(0.7)
        go.set()
        client.read_until(LAST_CHUNK)
        for number in (2, 3, 4):
            assert client.read_reply() == (200, b"%d" % number)


def test_a_request_that_goes_wrong_behind_another_does_not_spoil_that_ones_reply(front, limits):
    go = threading.Event()
    front.answers(chunked(), chunk(b"a"), go, LAST_CHUNK)
    for wrong in (
        b"FROB / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        go.clear()
        with front.client() as client:
            client.send(post(b"{}") + wrong)
            client.read_until(b"a\r\n")
            client.socket.shutdown(socket.SHUT_WR)
            go.set()
            assert client.read_until(LAST_CHUNK)
            assert refusal(client.read_to_end())[0] in (400, 501)
        assert len(front.upstream.requests) == 1


def test_a_body_that_goes_wrong_is_refused_and_its_request_aborted(front, limits):
    front.answers(reply(b"{}"))
    with front.client() as client:
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        received = front.upstream.next_request()
        assert received.some_body_arrived.wait(WAIT)
        client.send(b"nonsense\r\n")
        assert refusal(client.read_to_end()) == (400, "bad_request")
    assert received.hung_up.wait(WAIT)
    assert not received.body_arrived.is_set()


def test_a_fault_of_the_fronts_own_is_not_called_a_bad_request(front, limits, monkeypatch, caplog):
    def broken(self: FrontProtocol) -> None:
        raise AttributeError("secret")

    monkeypatch.setattr(FrontProtocol, "_new_cycle", broken)
    assert refusal(front.ask(NEXT)) == (500, "internal_error")
    assert "in broken" in caplog.text
    assert "secret" not in caplog.text.replace('AttributeError("secret")', "")  # the line of the source


def test_a_refused_client_that_goes_on_sending_still_reads_why(front):
    with front.client() as client:
        client.send(b"FROB / HTTP/1.1\r\n\r\n")
        for _ in range(50):
            client.send(b"x" * 10_000)
        client.socket.shutdown(socket.SHUT_WR)
        assert refusal(client.read_to_end()) == (501, "not_implemented")


def test_nothing_is_added_to_a_reply_and_nothing_to_a_request(front):
    front.answers(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    with front.client() as client:
        client.send(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert client.read_until(b"{}") == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        assert front.upstream.next_request().head == b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


def test_no_header_is_doubled_and_hop_by_hop_ones_end_here(front):  # A3-07
    front.answers(
        b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\nset-cookie: a=1\r\n"
        b"set-cookie: b=2\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nx-request-id: r1\r\n"
        b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    with front.client() as client:
        client.send(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        head = client.read_until(b"\r\n\r\n")
    names = re.findall(rb"\r\n([^:]+):", head)
    assert names == [
        b"date",
        b"server",
        b"set-cookie",
        b"set-cookie",
        b"x-request-id",
        b"content-type",
        b"content-length",
    ]
