"""The own transport, against a scripted server on raw sockets; httpx's transport is the reference for what is right."""

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvloop

from proxy.connection import HIGH_WATER, Timeouts
from proxy.transport import ReplyStream, Transport
from proxy.upstream import Upstream, explain
from tests.raw_upstream import LAST_CHUNK, WAIT, AwaitHangUp, Close, Reset, chunk, chunked, reply, running_upstream

TLS = Path(__file__).parent / "data" / "tls"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine in a loop of each kind: the program uses uvloop, other people's tests asyncio's."""

    def run(main):
        async def bounded():
            async with asyncio.timeout(WAIT):
                return await main

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(bounded())

    return run


@dataclass
class Got:
    status: int | None = None
    headers: tuple = ()
    body: bytes = b""
    outcome: str = "complete"
    words: str = field(default="", compare=False)


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for part in data:
        await asyncio.sleep(0)
        yield part


@contextlib.asynccontextmanager
async def upstream_to(url: str, **options):
    upstream = Upstream(url, **options)
    try:
        yield upstream
    finally:
        await upstream.aclose()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(handle, **options):
    """A server in the test's own loop; yields its port."""
    tasks = set()

    async def connected(reader, writer):
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            await handle(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*tasks)


async def fetch(upstream: Upstream, method: str = "GET", *body: bytes, headers=((b"host", b"x"),)) -> Got:
    got = Got()
    try:
        response = await upstream.send(method, b"/a%2Fb//c?%zz", list(headers), parts(*body))
    except httpx.TransportError as error:
        got.outcome, got.words = explain(error)
        return got
    got.status, got.headers = response.status, tuple(response.headers)
    try:
        async for data in response.stream:
            got.body += data
    except httpx.TransportError as error:
        got.outcome, got.words = explain(error)
    finally:
        await response.stream.aclose()
    return got


async def fetch_once(url: str, method: str = "GET", *, reference: bool = False) -> Got:
    async with upstream_to(url, transport=httpx.AsyncHTTPTransport() if reference else None) as upstream:
        return await fetch(upstream, method)


EVENTS = [b"data: 1\n\n", b"data: \xf0\x9f", b"\x98\x80\r\n\r\n"]
END = (Close, Reset, AwaitHangUp)
REPLIES = {
    "length": (reply(b"abc", b"X-A:  1 ", b"x-a:2", b"Set-Cookie: a", b"x-empty:"),),
    "empty": (reply(b""),),
    "chunked": (chunked(b"a: b"), *map(chunk, EVENTS), LAST_CHUNK),
    "chunk extensions and trailers": (chunked(), b"3;a=b\r\nabc\r\n0\r\nx-sum: 1\r\n\r\n"),
    "ends by close": (b"HTTP/1.1 200 OK\r\n\r\nabc", Close),
    "empty, ends by close": (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", Close),
    "1.0": (b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\nabc", Close),
    "1.0 with a length": (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", Close),
    "interim": (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + reply(b"abc"),),
    "no content": (b"HTTP/1.1 204 No Content\r\na: b\r\n\r\n",),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 3\r\n\r\n",),
    "no reason": (b"HTTP/1.1 599 \r\ncontent-length: 1\r\n\r\na",),
    "closed without a reply": (Close,),
    "reset without a reply": (Reset,),
    "closed in the head": (b"HTTP/1.1 200 OK\r\ncontent-le", Close),
    "cut in the length": (reply(b"abcd")[:-1], Close),
    "cut after a chunk": (chunked(), chunk(b"abc"), Close),
    "cut in a chunk": (chunked(), b"5\r\nabc", Close),
    "cut in the last chunk": (chunked(), chunk(b"abc"), b"0\r\n", Close),
    "reset after a chunk": (chunked(), chunk(b"abc"), Reset),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", AwaitHangUp),
    "bad chunk size": (chunked() + chunk(b"abc") + b"zz\r\n", AwaitHangUp),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", AwaitHangUp),
    "unknown coding": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc", Close),
    "space before the colon": (b"HTTP/1.1 200 OK\r\nx : 1\r\ncontent-length: 0\r\n\r\n", AwaitHangUp),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_is_read_as_httpx_reads_it(run, name):
    with running_upstream(*REPLIES[name]) as server:
        expected = run(fetch_once(server.url, reference=True))
        assert run(fetch_once(server.url)) == expected
    whole = not {Close, Reset, AwaitHangUp} & set(REPLIES[name]) or b"lose" in name.encode() or "1.0" in name
    assert (expected.outcome == "complete") == (whole and "closed" not in name)


@pytest.mark.parametrize("name", [name for name, (first, *rest) in REPLIES.items() if not rest and first not in END])
def test_a_reply_to_head_has_no_body(run, name):
    with running_upstream(*REPLIES[name]) as server:
        assert run(fetch_once(server.url, "HEAD")).body == b""


@pytest.mark.parametrize("name", ["length", "chunked", "chunk extensions and trailers", "ends by close", "interim"])
def test_a_reply_does_not_depend_on_how_the_network_sliced_it(run, name):
    steps = REPLIES[name]
    raw = b"".join(step for step in steps if isinstance(step, bytes))

    async def every_cut():
        cuts = iter(range(1, len(raw)))

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            cut = next(cuts)
            for piece in (raw[:cut], raw[cut:]):
                writer.write(piece)
                await asyncio.sleep(0.001)  # for the other side to read it
            if steps[-1] is not Close:
                await reader.read()

        async with serving(serve) as port:
            return [await fetch_once(f"http://127.0.0.1:{port}") for _ in range(1, len(raw))]

    with running_upstream(*steps) as server:
        expected = run(fetch_once(server.url))
    assert run(every_cut()) == [expected] * (len(raw) - 1)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"Host", b"here"), (b"X-A", b"1"), (b"x-a", b"2"), (b"Content-Length", b"6")], [b"abc", b"", b"def"]),
        ([(b"host", b"here"), (b"Transfer-Encoding", b"chunked")], [b"abc", b"", b"x" * 300]),
        ([(b"host", b"here")], []),
    ],
)
def test_a_request_goes_out_as_httpx_sends_it(run, headers, body):
    async def send(url, transport):
        async with upstream_to(url, transport=transport) as upstream:
            return await fetch(upstream, "PATCH", *body, headers=headers)

    with running_upstream(reply(b"ok")) as server:
        for transport in (None, httpx.AsyncHTTPTransport()):
            assert run(send(server.url, transport)).body == b"ok"
        own, reference = server.requests
    assert own.head == reference.head
    assert own.head.startswith(b"PATCH /a%2Fb//c?%zz HTTP/1.1\r\n")
    assert own.body == reference.body == b"".join(body)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"host", b"x"), (b"a", b"1\r\nb: 2")], []),
        ([(b"host", b"x"), (b"a\n", b"1")], []),
        ([(b"host", b"x")], [b"nobody announced this"]),
        ([(b"host", b"x"), (b"content-length", b"3")], [b"abcd"]),
        ([(b"host", b"x"), (b"content-length", b"3")], [b"ab"]),
    ],
)
def test_what_would_not_arrive_as_one_request_is_refused(run, headers, body):
    async def send(url):
        async with upstream_to(url) as upstream:
            return await fetch(upstream, "POST", *body, headers=headers)

    with running_upstream(
        AwaitHangUp
    ) as server:  # which replies to nothing: a reply may come before the body is looked at
        assert run(send(server.url)).outcome == "internal_error"
        assert all(request.hung_up.wait(WAIT) for request in server.requests)


# ---------------------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize(
    ("steps", "connections"),
    [
        ((reply(b"a"),), 1),
        ((chunked(), chunk(b"a"), LAST_CHUNK), 1),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" + reply(b"a"),), 1),
        ((reply(b"a", b"connection: close"),), 3),
        ((b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na",), 3),
        ((reply(b"a") + b"HTTP/1.1 200 OK\r\n",), 3),
        ((reply(b"a") + reply(b"a stray reply"),), 3),
    ],
)
def test_a_connection_is_used_again_only_if_nothing_is_left_on_it(run, steps, connections):
    async def three(url):
        async with upstream_to(url) as upstream:
            for _ in range(3):
                assert (await fetch(upstream)).body == b"a"

    with running_upstream(*steps) as server:
        run(three(server.url))
        assert (len(server.requests), server.connections) == (3, connections)


def test_a_connection_is_not_used_again_after_a_reply_that_came_before_the_request_was_sent(run):
    async def early(url):
        async with upstream_to(url) as upstream:
            for _ in range(2):
                more = asyncio.Event()

                async def body(more=more):
                    yield b"a"
                    await more.wait()

                response = await upstream.send("POST", b"/", [(b"host", b"x"), (b"content-length", b"2")], body())
                assert response.status == 413
                assert [data async for data in response.stream] == [b"no"]
                await response.stream.aclose()

    with running_upstream(reply(b"no", status=b"413 Too Large"), AwaitHangUp, read_body=False) as server:
        run(early(server.url))
        assert server.connections == 2
        assert all(request.hung_up.wait(WAIT) for request in server.requests)


def test_a_stream_that_is_not_read_to_its_end_takes_its_connection_with_it(run):
    async def leave(url):
        async with upstream_to(url) as upstream:
            response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
            await response.stream.aclose()
            await response.stream.aclose()  # the second time is nobody's connection
            assert await asyncio.to_thread(server.next_request().hung_up.wait, WAIT)

    with running_upstream(chunked(), chunk(b"a"), AwaitHangUp) as server:
        run(leave(server.url))


@pytest.mark.parametrize("steps", [(), (chunked(),), (chunked(), chunk(b"a"))])
def test_to_cancel_a_request_closes_its_connection(run, steps):
    async def cancel(url):
        async with upstream_to(url) as upstream:
            task = asyncio.create_task(fetch(upstream))
            assert await asyncio.to_thread(server.arrived.acquire, timeout=WAIT)
            await asyncio.sleep(0.02)
            task.cancel()
            assert await asyncio.to_thread(server.requests[0].hung_up.wait, WAIT)

    with running_upstream(*steps, AwaitHangUp) as server:
        run(cancel(server.url))


def test_an_idle_connection_is_closed_before_the_server_would(run):
    async def idle(url):
        async with upstream_to(url, timeouts=Timeouts(pool=0.05)) as upstream:
            await asyncio.gather(*(fetch(upstream) for _ in range(3)))
            for request in list(server.requests):
                assert await asyncio.to_thread(request.hung_up.wait, WAIT)

    with running_upstream(reply(b"a"), AwaitHangUp) as server:
        run(idle(server.url))
        assert server.connections == len(server.requests) == 3


def test_a_server_that_closes_idle_connections_after_a_while_fails_no_request_and_gets_each_once(run):
    seen = []

    async def serve(reader, writer):
        while True:
            async with asyncio.timeout(0.2):
                seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(reply(b"a"))

    async def around_the_limit(port, pause):
        async with upstream_to(f"http://127.0.0.1:{port}", timeouts=Timeouts(pool=0.05)) as upstream:
            assert (await fetch(upstream)).outcome == "complete"
            await asyncio.sleep(pause)
            assert (await fetch(upstream)).outcome == "complete"

    async def race():
        async with serving(serve) as port:
            await asyncio.gather(*(around_the_limit(port, 0.19 + turn * 0.0005) for turn in range(40)))

    run(race())
    assert len(seen) == 80


def test_a_connection_that_was_closed_unnoticed_is_passed_over(run):
    async def late(url):
        async with upstream_to(url) as upstream:
            for _ in range(5):
                assert (await fetch(upstream)).outcome == "complete"
                (idle,) = upstream._transport._idle
                assert idle._readable.poll(WAIT * 1000)  # closed, and the event loop has not looked

    with running_upstream(reply(b"a"), Close) as server:
        run(late(server.url))
        assert len(server.requests) == server.connections == 5


@pytest.mark.parametrize("linger", [False, True])
def test_a_reply_to_half_an_upload_is_delivered_though_the_connection_breaks(run, linger):
    def serve(listener):
        for _ in range(20):
            accepted, _ = listener.accept()
            accepted.recv(1 << 16)
            accepted.sendall(reply(b"no", status=b"413 Too Large"))
            if linger:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()  # with bytes unread: the kernel resets the connection

    async def upload(url):
        for _ in range(20):
            async with upstream_to(url) as upstream:
                headers = [(b"host", b"x"), (b"content-length", b"5000000")]
                got = await fetch(upstream, "POST", *[b"x" * 50_000] * 100, headers=headers)
                assert (got.status, got.body, got.outcome) == (413, b"no", "complete")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        run(upload(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        server.join(WAIT)


# --------------------------------------------------------------------------------------------------- flow and limits


def test_a_reply_that_nobody_takes_is_not_read_on(run):
    async def slow(url):
        async with upstream_to(url) as upstream:
            response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
            await asyncio.sleep(0.1)
            connection = response.stream._connection
            assert 0 < connection._queued <= HIGH_WATER + (1 << 18)  # one read more
            assert sum([len(data) async for data in response.stream]) == 400 * 60_000

    with running_upstream(chunked(), *[chunk(b"x" * 60_000)] * 400, LAST_CHUNK) as server:
        run(slow(server.url))


def test_an_upload_that_the_upstream_does_not_take_is_not_drawn_on_and_runs_into_its_limit(run):
    drawn = 0

    async def body():
        nonlocal drawn
        while True:
            drawn += 1
            yield b"x" * 60_000

    async def upload(url):
        async with upstream_to(url, timeouts=Timeouts(write=0.1)) as upstream:
            with pytest.raises(httpx.WriteTimeout) as caught:
                await upstream.send("POST", b"/", [(b"host", b"x"), (b"transfer-encoding", b"chunked")], body())
            return explain(caught.value)[0]

    never = threading.Event()
    with running_upstream(never, read_body=False) as server:
        assert run(upload(server.url)) == "upstream_timeout"
        assert drawn < 400
        never.set()


@pytest.mark.parametrize(
    ("timeouts", "steps", "status", "words"),
    [
        (Timeouts(first_byte=0.05), (AwaitHangUp,), None, "no reply for 0.05 s"),
        (Timeouts(first_byte=0.05, idle=0.05), (chunked(), AwaitHangUp), 200, "nothing more for 0.05 s"),
        (Timeouts(idle=0.05), (chunked(), chunk(b"a"), AwaitHangUp), 200, "nothing more for 0.05 s"),
    ],
)
def test_a_limit_that_is_set_says_which_it_was(run, timeouts, steps, status, words):
    async def wait(url):
        async with upstream_to(url, timeouts=timeouts) as upstream:
            return await fetch(upstream)

    with running_upstream(*steps) as server:
        got = run(wait(server.url))
        assert (got.status, got.outcome) == (status, "upstream_timeout")
        assert words in got.words
        assert server.next_request().hung_up.wait(WAIT)


def test_the_limit_of_silence_does_not_count_while_it_is_the_client_that_waits(run):
    async def slow(url):
        async with upstream_to(url, timeouts=Timeouts(idle=1.0)) as upstream:
            response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
            size = 0
            async for data in response.stream:
                if not size:
                    await asyncio.sleep(1.5)
                size += len(data)
            return size

    with running_upstream(chunked(), *[chunk(b"x" * 60_000)] * 200, LAST_CHUNK) as server:
        assert run(slow(server.url)) == 200 * 60_000


def test_a_server_that_is_not_there_or_does_not_accept_is_unreachable(run):
    async def connect(port):
        async with upstream_to(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect=0.1)) as upstream:
            return (await fetch(upstream)).outcome

    with socket.socket() as listener, contextlib.ExitStack() as opened:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert run(connect(port)) == "upstream_unreachable"
        listener.listen(0)
        for _ in range(3):  # more than its queue holds
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert run(connect(port)) == "upstream_unreachable"


def test_a_head_without_end_is_given_up(run):
    with running_upstream(b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 60_000 + b"\r\n"] * 10, AwaitHangUp) as server:
        got = run(fetch_once(server.url))
    assert (got.status, got.outcome) == (None, "upstream_broken")


# ---------------------------------------------------------------------------------------------------------- pushing


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("slow", [False, True])
def test_pushed_and_pulled_bodies_are_the_same(run, name, slow):
    async def push(url):
        got = Got()

        async def forward(data):
            if slow:
                await asyncio.sleep(0.002)
            got.body += data

        async with upstream_to(url) as upstream:
            try:
                response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
                got.status, got.headers = response.status, tuple(response.headers)
                assert isinstance(response.stream, ReplyStream)
                await response.stream.push(forward)
                await response.stream.aclose()
            except httpx.TransportError as error:
                got.outcome = explain(error)[0]
        return got

    with running_upstream(*REPLIES[name]) as server:
        assert run(push(server.url)) == run(fetch_once(server.url))


def test_a_push_that_has_to_wait_stops_the_reading_and_keeps_the_order(run):
    async def push(url):
        taken, most = bytearray(), 0
        async with upstream_to(url) as upstream:
            response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
            connection = response.stream._connection

            async def forward(data):
                nonlocal most
                if len(taken) % 3 == 0:
                    await asyncio.sleep(0.001)
                taken.extend(data)
                most = max(most, connection._queued)

            await response.stream.push(forward)
            await response.stream.aclose()
        return bytes(taken), most

    data = [b"%07d" % number * 3000 for number in range(300)]
    with running_upstream(chunked(), *map(chunk, data), LAST_CHUNK) as server:
        taken, most = run(push(server.url))
    assert taken == b"".join(data)
    assert most <= HIGH_WATER + (1 << 18)


@pytest.mark.parametrize("slow", [False, True])
def test_what_forwarding_raises_ends_the_push_and_the_connection(run, slow):
    async def push(url):
        async def forward(data):
            if slow:
                await asyncio.sleep(0.002)
            raise ZeroDivisionError

        async with upstream_to(url) as upstream:
            response = await upstream.send("GET", b"/", [(b"host", b"x")], parts())
            with pytest.raises(ZeroDivisionError):
                await response.stream.push(forward)
            await response.stream.aclose()

    with running_upstream(chunked(), chunk(b"a"), AwaitHangUp) as server:
        run(push(server.url))
        assert server.next_request().hung_up.wait(WAIT)


# --------------------------------------------------------------------------------------------------------------- TLS


def test_tls_is_verified_and_carries_the_same_bytes(run):
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    data = b"x" * 3_000_000

    async def main():
        async def serve(reader, writer):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(reply(await reader.readexactly(len(data))))
                await writer.drain()

        headers = [(b"host", b"x"), (b"content-length", b"%d" % len(data))]
        async with serving(serve, ssl=served, limit=1 << 22) as port:
            url = httpx.URL(f"https://localhost:{port}")
            async with upstream_to(str(url), transport=Transport(url, ssl_context=trusting)) as upstream:
                for _ in range(2):
                    got = await fetch(upstream, "POST", data[:10], data[10:], headers=headers)
                    assert (got.status, got.body == data, got.outcome) == (200, True, "complete")
            async with upstream_to(str(url)) as upstream:
                assert (await fetch(upstream)).outcome == "upstream_unreachable"

    run(main())
