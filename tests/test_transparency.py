"""docs/transparency.md lists what the proxy changes: each deviation has its test here, and nothing else may differ."""

import json
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.front import FrontLimits, FrontProtocol
from tests.exchange import Message, parse_head, read_reply
from tests.raw_upstream import (
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    Close,
    RawClient,
    RawUpstream,
    Received,
    RunningProxy,
    Step,
    chunk,
    chunked,
    post,
    reply,
    running_proxy,
    running_upstream,
)

PAGE = Path(__file__).parent.parent / "docs" / "transparency.md"
HELLO = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


class Wire:
    """A proxy and its upstream. `send` gives what arrived at the upstream, and what came back."""

    def __init__(self, upstream: RawUpstream, proxy: RunningProxy) -> None:
        self.upstream, self.proxy = upstream, proxy

    def send(self, request: bytes, *steps: Step, direct: bool = False) -> tuple[Message, Message]:
        self.upstream.requests.clear()
        while self.upstream.arrived.acquire(blocking=False):
            pass
        self.upstream.scripts = [steps or (reply(b"{}"),)]
        with RawClient(self.upstream.port) if direct else self.proxy.client() as client:
            client.send(request)
            got = read_reply(client, request.split()[0])
        return sent(self.upstream.next_request()), got

    def refused(self, request: bytes) -> tuple[int, bytes]:
        """Status and code; nothing may have gone upstream."""
        self.upstream.requests.clear()
        with self.proxy.client() as client:
            client.send(request)
            got = read_reply(client)
            assert client.read_to_end() == b""
        assert self.upstream.requests == []
        return int(got.line.split()[1]), dict(got.headers)[b"x-sparseety-error"]


def sent(received: Received) -> Message:
    message = parse_head(received.head)
    message.body = bytes(received.body)
    return message


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with (
        running_upstream(reply(b"{}")) as upstream,
        running_proxy(tmp_path_factory.mktemp("wire"), upstream.url) as proxy,
    ):
        yield Wire(upstream, proxy)


Check = Callable[[Wire, pytest.MonkeyPatch], None]
DEVIATIONS: dict[str, Check] = {}


def deviation(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert name not in DEVIATIONS
        DEVIATIONS[name] = check
        return check

    return add


# ------------------------------------------------------------------------------------------------------ requests


@deviation("request-name-case")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    arrived, _got = wire.send(b"GET / HTTP/1.1\r\nHoSt: H\r\nX-Request-ID: A\r\n\r\n")
    assert arrived.headers == [(b"host", b"H"), (b"x-request-id", b"A")]


@deviation("request-whitespace")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    arrived, _got = wire.send(b"GET / HTTP/1.1\r\nHost:h\r\nX: \t a  b \t\r\n\r\n")
    assert arrived.headers == [(b"host", b"h"), (b"x", b"a  b")]


@deviation("request-hop-by-hop")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    hops = b"Connection: keep-alive, X-Hop, content-length, host\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
    hops += b"Proxy-Connection: keep-alive\r\nTrailer: x\r\nUpgrade: h2c\r\n"
    arrived, _got = wire.send(b"POST / HTTP/1.1\r\nHost: h\r\n" + hops + b"Content-Length: 1\r\nX: 1\r\n\r\na")
    assert arrived.headers == [(b"host", b"h"), (b"content-length", b"1"), (b"x", b"1")]


@deviation("request-version")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    arrived, _got = wire.send(b"GET /x HTTP/1.0\r\nHost: h\r\n\r\n")
    assert arrived.line == b"GET /x HTTP/1.1"


@deviation("request-host")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for version in (b"1.0", b"1.1"):
        arrived, _got = wire.send(b"GET / HTTP/" + version + b"\r\nX: 1\r\n\r\n")
        assert sorted(arrived.headers) == [(b"host", b"127.0.0.1:%d" % wire.upstream.port), (b"x", b"1")]


@deviation("request-chunks")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    request = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;a=b\r\nx\r\n2\r\nyz\r\n0\r\n\r\n"
    arrived, _got = wire.send(request)
    assert arrived.headers == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]
    assert arrived.body == b"xyz"


@deviation("request-trailers")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    request = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Sum: 1\r\n\r\n"
    arrived, _got = wire.send(request)
    assert arrived.headers == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]
    assert arrived.body == b"x"


@deviation("request-expect")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    wire.upstream.scripts = [(reply(b"{}"),)]
    with wire.proxy.client() as client:
        client.send(post(b"{}", b"expect: 100-continue")[:-2])
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert read_reply(client).body == b"{}"


@deviation("request-upgrade")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    head = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\n"
    arrived, got = wire.send(head + b"x")
    assert arrived.headers == [(b"host", b"h"), (b"content-length", b"1")]
    assert (arrived.body, got.body) == (b"x", b"{}")


@deviation("request-connections")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    wire.upstream.scripts = [(chunked(), go, LAST_CHUNK), (reply(b"2"),)]
    wire.upstream.requests.clear()
    with wire.proxy.client() as client:
        client.send(HELLO * 2)
        client.read_until(b"\r\n\r\n")
        assert len(wire.upstream.requests) == 1  # the second waits for the first one's end
        go.set()
        client.read_until(LAST_CHUNK)
        assert read_reply(client).body == b"2"


# ------------------------------------------------------------------------------------------------------- replies


@deviation("reply-name-case")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    assert wire.send(HELLO, reply(b"", b"X-Request-ID: A"))[1].headers[0] == (b"x-request-id", b"A")


@deviation("reply-whitespace")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    assert wire.send(HELLO, reply(b"", b"x:\t a  b"))[1].headers[0] == (b"x", b"a  b")


@deviation("reply-reason")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for status, line in (
        (b"200 Fine", b"HTTP/1.1 200 OK"),
        (b"404", b"HTTP/1.1 404 Not Found"),
        (b"299 Own", b"HTTP/1.1 299 "),
        (b"599 Own", b"HTTP/1.1 599 "),
    ):
        assert wire.send(HELLO, reply(b"", status=status))[1].line == line


@deviation("reply-version")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    got = wire.send(HELLO, b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab", Close)[1]
    assert (got.line, got.body) == (b"HTTP/1.1 200 OK", b"ab")


@deviation("reply-hop-by-hop")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    hops = [b"connection: X-Hop, content-length", b"x-hop: 1", b"keep-alive: timeout=5", b"upgrade: h2c", b"trailer: x"]
    assert wire.send(HELLO, reply(b"ab", *hops, b"x: 1"))[1].headers == [(b"x", b"1"), (b"content-length", b"2")]


@deviation("reply-connection")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    got = wire.send(HELLO, reply(b"ab", b"connection: close"), Close)[1]
    assert got.headers == [(b"content-length", b"2")]
    got = wire.send(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", reply(b"ab"))[1]
    assert got.headers == [(b"content-length", b"2"), (b"connection", b"close")]
    got = wire.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", reply(b"ab"))[1]
    assert got.headers == [(b"content-length", b"2"), (b"connection", b"keep-alive")]


@deviation("reply-chunks")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    got = wire.send(HELLO, chunked(), b"1;a=b\r\nx\r\n2\r\nyz\r\n0\r\n\r\n")[1]
    assert (got.headers, got.body) == ([(b"transfer-encoding", b"chunked")], b"xyz")


@deviation("reply-until-close")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    got = wire.send(HELLO, b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\nab", Close)[1]
    assert (got.headers, got.body) == ([(b"x", b"1"), (b"transfer-encoding", b"chunked")], b"ab")


@deviation("reply-http10")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    got = wire.send(b"GET / HTTP/1.0\r\n\r\n", chunked(b"x: 1"), chunk(b"ab"), LAST_CHUNK)[1]
    assert (got.headers, got.body) == ([(b"x", b"1"), (b"connection", b"close")], b"ab")


@deviation("reply-trailers")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    wire.upstream.scripts = [(chunked(), chunk(b"ab"), b"0\r\nx-sum: 1\r\n\r\n")]
    with wire.proxy.client() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert client.read_to_end().endswith(chunk(b"ab") + LAST_CHUNK)


@deviation("reply-interim")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    wire.upstream.scripts = [(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 102 P\r\n\r\n", reply(b"ab"))]
    with wire.proxy.client() as client:
        client.send(HELLO)
        assert client.read_until(b"ab") == reply(b"ab")


# ------------------------------------------------------------------------------------------------------- refused


@deviation("refused-malformed")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    """tests/test_proxy_front_smuggling.py has the long list."""
    for lines in (
        b"Content-Length: 1\r\nContent-Length: 2",
        b"X : 1",
        b"X: 1\n",
        b"X: 1\r\n 2",
        b"X: \x00",
        b"Host: b",
    ):
        assert wire.refused(b"POST / HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n\r\n") == (400, b"bad_request")


@deviation("refused-target")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for target in (b"/caf\xc3\xa9", b"/a\tb", b"/a\x01", b"models"):
        assert wire.refused(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n") == (400, b"bad_request")


@deviation("refused-coding")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    coding = b"\r\nHost: h\r\nTransfer-Encoding: %b\r\n\r\n0\r\n\r\n"
    assert wire.refused(b"POST / HTTP/1.1" + coding % b"gzip, chunked") == (501, b"not_implemented")
    assert wire.refused(b"POST / HTTP/1.0" + coding % b"chunked") == (400, b"bad_request")


@deviation("refused-method")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for method in (b"FROB", b"get"):
        assert wire.refused(method + b" / HTTP/1.1\r\nHost: h\r\n\r\n") == (501, b"not_implemented")


@deviation("refused-connect")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    assert wire.refused(b"CONNECT other:443 HTTP/1.1\r\nHost: h\r\n\r\n") == (501, b"not_implemented")


@deviation("refused-websocket")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    head = b"GET /v1/realtime HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    assert wire.refused(head + b"Sec-WebSocket-Key: a\r\n\r\n") == (501, b"not_implemented")


@deviation("refused-version")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    assert wire.refused(b"GET / HTTP/2.0\r\nHost: h\r\n\r\n") == (505, b"http_version")


@deviation("limit-head-size")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for lines in (b"X: " + b"a" * (64 << 10) + b"\r\n", b"X: a\r\n" * 1000):
        assert wire.refused(b"GET / HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n") == (431, b"headers_too_large")


@deviation("limit-head-time")
def _(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FrontProtocol.limits.head_seconds == 15
    monkeypatch.setattr(FrontProtocol, "limits", FrontLimits(head_seconds=0.1))
    assert wire.refused(b"GET / HTTP/1.1\r\nHost:") == (408, b"request_timeout")


@deviation("limit-idle")
def _(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FrontProtocol.__init__

    def impatient(self: FrontProtocol, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        assert self.timeout_keep_alive == 75
        self.timeout_keep_alive = 0.1  # type: ignore[assignment]

    monkeypatch.setattr(FrontProtocol, "__init__", impatient)
    wire.upstream.scripts = [(reply(b"{}"),)]
    with wire.proxy.client() as client:
        assert client.read_to_end() == b""
    with wire.proxy.client() as client:
        client.send(HELLO)
        assert client.read_to_end() == reply(b"{}")


@deviation("half-close")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for steps, gone in (((reply(b"{}"),), False), ((AwaitHangUp,), True)):
        wire.upstream.scripts = [steps]
        wire.upstream.requests.clear()
        with wire.proxy.client() as client:
            client.send(HELLO)
            client.socket.shutdown(socket.SHUT_WR)
            got = client.read_to_end()
        # Where its FIN was seen before the reply's head was written, that says that the connection ends.
        assert got.replace(b"connection: close\r\n", b"") == (b"" if gone else reply(b"{}"))
        if gone:
            assert wire.upstream.requests[0].hung_up.wait(WAIT)


# --------------------------------------------------------------------------------- where the server does not answer


@deviation("own-unreachable")
def _(_: Wire, _monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_proxy(Path(folder), f"http://127.0.0.1:{port}") as proxy,
        proxy.client() as client,
    ):
        client.send(HELLO)
        got = read_reply(client)
    assert got.line == b"HTTP/1.1 502 Bad Gateway"
    assert (b"x-sparseety-error", b"upstream_unreachable") in got.headers
    assert json.loads(got.body)["error"].keys() == {"message", "type", "param", "code"}


@deviation("own-broken")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for steps in ((Close,), (b"nonsense\r\n\r\n", Close), (b"HTTP/1.1 200 OK\r\ncontent-", Close)):
        got = wire.send(HELLO, *steps)[1]
        assert got.line == b"HTTP/1.1 502 Bad Gateway"
        assert (b"x-sparseety-error", b"upstream_broken") in got.headers


@deviation("own-cut-off")
def _(wire: Wire, _: pytest.MonkeyPatch) -> None:
    for steps in ((chunk(b"ab"), Close), (chunk(b"ab"), b"nonsense\r\n")):
        wire.upstream.scripts = [(chunked(), *steps)]
        with wire.proxy.client() as client:
            client.send(HELLO)
            assert not client.read_to_end().endswith(LAST_CHUNK)


@deviation("own-shutdown")
def _(_: Wire, _monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder, running_upstream(AwaitHangUp) as upstream:
        with running_proxy(Path(folder), upstream.url) as proxy:
            client = proxy.client()
            client.send(HELLO)
            upstream.next_request()
        with client:
            got = read_reply(client)
    assert got.line == b"HTTP/1.1 503 Service Unavailable"
    assert (b"x-sparseety-error", b"shutdown") in got.headers


# ------------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_listed_deviation_is_as_the_page_says(wire, monkeypatch, name):
    DEVIATIONS[name](wire, monkeypatch)


def test_the_page_lists_what_is_tested_and_nothing_else():
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == list(DEVIATIONS)


def test_the_page_names_the_limits_that_are_set():
    page, limits = PAGE.read_text(), FrontLimits()
    assert f"{limits.head_bytes >> 10} KiB or {limits.head_fields:,} lines" in page
    assert f"{limits.head_seconds:g} s after the request's first byte" in page
    assert limits.half_closed_seconds == 0.5
    assert "within half a second" in page


# ------------------------------------------------------------------------------------- all else is as it was sent

GZIP = bytes.fromhex("1f8b08000000000002ff4b4c4a06003d0d9b4703000000")

ODD_REQUESTS = {
    "a target that nobody normalises": b"GET /v1/a%2Fb//c/./../%2e/%zz;p?q=%zz&&q=2?&r=%00 HTTP/1.1\r\nHost: h\r\n\r\n",
    "an empty query": b"GET /v1/models? HTTP/1.1\r\nHost: h\r\n\r\n",
    "a fragment": b"GET /v1/models#a?b HTTP/1.1\r\nHost: h\r\n\r\n",
    "two slashes": b"GET //v1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "the absolute form": b"GET http://other.example:1/v1?x HTTP/1.1\r\nHost: h\r\n\r\n",
    "the asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    "characters that should be escaped": b'GET /a"<>^`{|}\\ HTTP/1.1\r\nHost: h\r\n\r\n'.replace(b"\\ ", b"\\z "),
    "duplicates in order": b"GET / HTTP/1.1\r\nHost: h\r\nX-B: 1\r\nX-A: 1\r\nX-B: 2\r\nx-b: 1\r\n\r\n",
    "a host further down": b"GET / HTTP/1.1\r\nX: 1\r\nHost: h\r\nY: 1\r\n\r\n",
    "Latin-1 and UTF-8": b"GET / HTTP/1.1\r\nHost: h\r\nX: caf\xe9 \xe2\x82\xac\r\n\r\n",
    "empty values": b"GET / HTTP/1.1\r\nHost: h\r\nX:\r\nY: \r\n\r\n",
    "odd names": b"GET / HTTP/1.1\r\nHost: h\r\n!#$%&'*+-.^_`|~: 1\r\nX_Y: 2\r\nx-sparseety-error: mine\r\n\r\n",
    "an empty host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "credentials": b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\nCookie: a\r\nApi-Key: y\r\n\r\n",
    "what proxies like to add": b"GET / HTTP/1.1\r\nHost: h\r\nVia: 1\r\nX-Forwarded-For: 1\r\nForwarded: a\r\n\r\n",
    "tracing": b"GET / HTTP/1.1\r\nHost: h\r\ntraceparent: 00-1-2-01\r\ntracestate: a=b\r\nX-Request-Id: r\r\n\r\n",
    "a body of a GET": b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    "a body that is no JSON": b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n\x00\xff\n",
    "an empty body": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    "no body and no length": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    "a length with zeros before": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 003\r\n\r\nabc",
    "a compressed body": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    % len(GZIP)
    + GZIP,
    "a chunked body": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"abc") + LAST_CHUNK,
    "a preflight": b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\nOrigin: http://app.example\r\n"
    b"Access-Control-Request-Headers: authorization,x-stainless-arch\r\n\r\n",
    "HEAD": b"HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
    "another method": b"PROPFIND /x HTTP/1.1\r\nHost: h\r\nDepth: 1\r\n\r\n",
    "empty lines before": b"\r\n\r\n" + HELLO,
}

ODD_REPLIES = {
    "duplicates in order": reply(
        b"ab", b"x-b: 1", b"set-cookie: a=1; path=/", b"x-a: 1", b"set-cookie: b=2", b"X-B: 2"
    ),
    "date and server": reply(b"ab", b"date: Mon, 01 Jan 2024 00:00:00 GMT", b"server: uvicorn"),
    "no date and no server": reply(b"ab"),
    "Latin-1 and UTF-8": reply(b"ab", b"x: caf\xe9 \xe2\x82\xac"),
    "empty values": reply(b"ab", b"x:", b"y: "),
    "odd names": reply(b"ab", b"!#$%&'*+-.^_`|~: 1", b"x_y: 2"),
    "an error": reply(b'{"error":{"message":"m"}}', b"content-type: application/json", status=b"422 Unprocessable"),
    "an unknown status": reply(b"ab", status=b"299 Own"),
    "a redirect": reply(b"", b"location: http://elsewhere.example/%zz", status=b"307 Temporary Redirect"),
    "a refusal with its challenge": reply(b"", b"www-authenticate: Bearer", b"retry-after: 1", status=b"401 No"),
    "compressed": reply(GZIP, b"content-encoding: gzip"),
    "no length": b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\nab",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nx: 1\r\n\r\nab",
    "an empty body without length": b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\n",
    "chunks": chunked(b"x-accel-buffering: no", b"cache-control: no-cache")
    + chunk(b"a")
    + chunk(b"\r\n\x00")
    + LAST_CHUNK,
    "an empty chunked body": chunked() + LAST_CHUNK,
    "no content": b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n",
    "not modified": b'HTTP/1.1 304 Not Modified\r\netag: "a"\r\ncontent-length: 27\r\n\r\n',
    "a header as it stands in ours": reply(b"ab", b"x-sparseety-error: theirs"),
}


@pytest.mark.parametrize("name", ODD_REQUESTS)
def test_a_request_arrives_as_it_does_without_the_proxy(wire, name):
    request = ODD_REQUESTS[name]
    answer = reply(b"") if request.startswith(b"HEAD") else reply(b"{}")
    expected, direct = wire.send(request.lstrip(b"\r\n"), answer, direct=True)
    arrived, got = wire.send(request, answer)
    assert arrived.line == expected.line
    assert arrived.comparable() == expected.comparable()
    assert got == direct


@pytest.mark.parametrize("name", ODD_REPLIES)
def test_a_reply_arrives_as_it_does_without_the_proxy(wire, name):
    steps = ODD_REPLIES[name], Close
    _, expected = wire.send(HELLO, *steps, direct=True)
    _, got = wire.send(HELLO, *steps)
    assert got.comparable() == expected.comparable()


@pytest.mark.parametrize("name", ODD_REPLIES)
def test_a_reply_to_head_arrives_as_it_does_without_the_proxy(wire, name):
    head = ODD_REPLIES[name].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    _, expected = wire.send(HELLO.replace(b"GET", b"HEAD"), head, Close, direct=True)
    _, got = wire.send(HELLO.replace(b"GET", b"HEAD"), head, Close)
    assert got.comparable() == expected.comparable()
