"""Never two requests from one: what arrives upstream is read by a server more lenient than any, byte by byte."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.raw_upstream import WAIT, RawClient, RunningProxy, reply, running_proxy, running_upstream

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD = b"POST /seen HTTP/1.1\r\nHost: h\r\n"


class Tap:
    """Keeps all bytes of all connections, and replies once to each connection, to whatever came first."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.received: list[bytearray] = []
        self.threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.received.append(bytearray())
            thread = threading.Thread(target=self._read, args=(connection, self.received[-1]), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _read(self, connection: socket.socket, received: bytearray) -> None:
        connection.settimeout(WAIT)
        replied = False
        with connection:
            while data := _receive(connection):
                received += data
                if not replied and _complete(bytes(received)):
                    replied = True
                    connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")

    def all_of_it(self) -> list[bytes]:
        """What arrived on each connection so far; to be called when the proxy has ended."""
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        return [bytes(received) for received in self.received]


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def _complete(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    return bool(end)


@pytest.fixture
def tap() -> Iterator[Tap]:
    tap = Tap()
    yield tap
    tap.listener.close()


def everything_sent(proxy: RunningProxy, request: bytes) -> bytes:
    with proxy.client() as client:
        client.send(request)
        client.socket.shutdown(socket.SHUT_WR)
        return client.read_to_end()


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED = {
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "two equal lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "a list of lengths": HEAD + b"Content-Length: 0, %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a signed length": HEAD + b"Content-Length: +0\r\n\r\n" + HIDDEN,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "a hexadecimal length": HEAD + b"Content-Length: 0x1\r\n\r\n" + HIDDEN,
    "a length of two words": HEAD + b"Content-Length: 0 1\r\n\r\n" + HIDDEN,
    "an empty length": HEAD + b"Content-Length:\r\n\r\n" + HIDDEN,
    "a length beyond 64 bits": HEAD + b"Content-Length: 18446744073709551616\r\n\r\n" + HIDDEN,
    "length, then coding": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "coding, then length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two codings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "another coding before": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "another coding in a line before": HEAD
    + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "another coding after": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "identity alone": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + HIDDEN,
    "a coding by a similar name": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding in quotes": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n' + HIDDEN,
    "a coding behind a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "an empty coding": HEAD + b"Transfer-Encoding:\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "a coding in HTTP/1.0": b"POST /seen HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "whitespace before the colon": HEAD + b"Content-Length : %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a coding with whitespace before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a header that begins with whitespace": b"POST /seen HTTP/1.1\r\n Content-Length: 9\r\nHost: h\r\n\r\n" + HIDDEN,
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded header": HEAD + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a bare LF in a header": HEAD + b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a bare CR in a header": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a NUL in a header": HEAD + b"X: a\x00b\r\n\r\n" + HIDDEN,
    "a head ended by LF LF": HEAD.replace(b"\r", b"") + b"\n" + HIDDEN,
    "two hosts": HEAD + b"Host: other\r\n\r\n" + HIDDEN,
    "a line break in the target": b"GET /seen\r\nX: HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "a bare CR in the target": b"GET /seen\rX: HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "a space in the target": b"GET /seen HTTP/1.1 HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "a tab for a space": b"GET\t/seen HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "no version": b"GET /seen\r\nHost: h\r\n\r\n" + HIDDEN,
    "an upgrade with a websocket's frames": HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + HIDDEN,
    "several upgrades": HEAD + b"Connection: upgrade\r\nUpgrade: h2c, websocket\r\n\r\n" + HIDDEN,
}

BAD_CHUNKS = {
    "no number": b"zz\r\nabc\r\n0\r\n\r\n",
    "a negative number": b"-3\r\nabc\r\n0\r\n\r\n",
    "a sign": b"+3\r\nabc\r\n0\r\n\r\n",
    "0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "an underscore": b"0_3\r\nabc\r\n0\r\n\r\n",
    "beyond 64 bits": b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "an empty size": b"\r\nabc\r\n0\r\n\r\n",
    "a space after the size": b"3 \r\nabc\r\n0\r\n\r\n",
    "LF after the size": b"3\nabc\r\n0\r\n\r\n",
    "CR after the size": b"3\rabc\r\n0\r\n\r\n",
    "LF after an extension": b"3;a\nabc\r\n0\r\n\r\n",
    "LF after the data": b"3\r\nabc\n0\r\n\r\n",
    "data longer than its size": b"2\r\nabc\r\n0\r\n\r\n",
    "data shorter than its size": b"4\r\nabc\r\n0\r\n\r\n",
    "LF after the last chunk": b"3\r\nabc\r\n0\n\n",
    "a length among the trailers": b"3\r\nabc\r\n0\r\nContent-Length: 9\r\n\r\n",
    "a coding among the trailers": b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
}


def test_an_ambiguous_head_is_refused_and_nothing_of_it_goes_upstream(tmp_path, tap):
    with running_proxy(tmp_path, tap.url) as proxy:
        for name, request in REFUSED.items():
            got = everything_sent(proxy, request)
            assert got.split()[1] in (b"400", b"501", b"505"), name
            assert got.count(b"\r\nx-sparseety-error: ") == 1, name
            assert got.count(b"\r\nconnection: close\r\n") == 1, name
    assert tap.all_of_it() == []


def test_a_body_in_bad_chunks_never_becomes_a_complete_request(tmp_path, tap):
    with running_proxy(tmp_path, tap.url) as proxy:
        for name, body in BAD_CHUNKS.items():
            got = everything_sent(proxy, CHUNKED + body + HIDDEN)
            assert got.startswith(b"HTTP/1.1 400 "), name
            assert got.count(b"\r\nx-sparseety-error: bad_request\r\n") == 1, name
    for received in tap.all_of_it():
        assert b"hidden" not in received
        assert not received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, HIDDEN),
        (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), HIDDEN),
        (CHUNKED + b'%X;a=b;c="d"\r\n%b\r\n000\r\nX: y\r\n\r\n' % (len(HIDDEN), HIDDEN), HIDDEN),
        (HEAD + b"Transfer-Encoding: \tChUnKeD \r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), HIDDEN),
        (HEAD + b"Connection: content-length\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, HIDDEN),
        (CHUNKED.replace(b"Host", b"Connection: transfer-encoding, host\r\nHost") + b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (HEAD + b"Content_Length: 3\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_a_request_that_holds_another_arrives_as_one_in_one_framing(tmp_path, tap, request_, body):
    with running_proxy(tmp_path, tap.url) as proxy, proxy.client() as client:
        client.send(request_)
        assert client.read_until(b"ok").startswith(b"HTTP/1.1 200 ")
    (received,) = tap.all_of_it()
    head, _, rest = received.partition(b"\r\n\r\n")
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    framings = [name for name in names if name in (b"content-length", b"transfer-encoding")]
    assert len(framings) == 1
    assert names.count(b"host") == 1
    if framings == [b"content-length"]:
        assert rest == body
    else:
        assert b"".join(_dechunked(rest)) == body


def _dechunked(data: bytes) -> Iterator[bytes]:
    while True:
        size, _, data = data.partition(b"\r\n")
        yield data[: int(size, 16)]
        end, data = data[int(size, 16) :][:2], data[int(size, 16) + 2 :]
        assert end == b"\r\n"
        if not int(size, 16):
            assert data == b""
            return


def test_what_follows_a_request_that_asked_to_close_is_not_served(tmp_path, tap):
    with running_proxy(tmp_path, tap.url) as proxy:
        got = everything_sent(proxy, b"GET /seen HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + HIDDEN)
    assert got.count(b"HTTP/1.1 ") == 1
    (received,) = tap.all_of_it()
    assert b"hidden" not in received


def test_a_body_that_was_not_asked_for_cannot_become_the_next_request(tmp_path):
    """The client was answered while it waited for `100 Continue`: it may send its body or not, so this is the end."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with running_proxy(tmp_path, f"http://127.0.0.1:{port}") as proxy, proxy.client() as client:
        client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN))
        got = _final(client)
        client.send(HIDDEN)
        got += client.read_to_end()
    assert got.count(b"HTTP/1.1 5") == 1


def _final(client: RawClient) -> bytes:
    """The head of the reply, past an interim one."""
    head = client.read_until(b"\r\n\r\n")
    return client.read_until(b"\r\n\r\n") if head.startswith(b"HTTP/1.1 100 ") else head


@pytest.mark.parametrize("target", [b"/a%0d%0aX-Evil:%201", b"/a%00", b"/a?b=%0d%0a%0d%0aGET%20/hidden"])
def test_an_escaped_line_break_in_a_target_stays_escaped(tmp_path, tap, target):
    with running_proxy(tmp_path, tap.url) as proxy, proxy.client() as client:
        client.send(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        client.read_until(b"ok")
    assert tap.all_of_it() == [b"GET " + target + b" HTTP/1.1\r\nhost: h\r\n\r\n"]
    (log,) = proxy.log_dir.glob("*.jsonl")
    assert b"\r" not in log.read_bytes()
    assert b"Evil" not in log.read_bytes().split(b"\n", 1)[0]


@pytest.mark.parametrize("excess", [reply(b"evil"), b"HTTP/1.1 200 OK\r\n", b"nonsense", b"\r\n"])
def test_what_a_server_sends_beyond_its_reply_never_reaches_the_next_client(tmp_path, excess):
    with running_upstream(reply(b"one") + excess) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        upstream.scripts.append((reply(b"two"),))
        for body in (b"one", b"two", b"two"):
            with proxy.client() as client:
                client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
                assert client.read_reply() == (200, body)
