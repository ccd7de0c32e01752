"""No credential reaches a record or a log line, wherever it stands and however its request ends.

A real process, everything it logs at the most talkative level, and markers in place of secrets.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.upstream import Upstream
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    Close,
    RawClient,
    RawUpstream,
    Reset,
    Step,
    chunk,
    chunked,
    reply,
    running_proxy,
    running_upstream,
)

ROOT = Path(__file__).parent.parent

# The command itself, with each logger there is at its lowest level and asyncio in debug mode.
PROGRAM = """
import logging, sys
logging.basicConfig(level=1, stream=sys.stderr)
from proxy.cli import main
for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "asyncio", "sparseety.proxy"):
    logging.getLogger(name).setLevel(1)
sys.exit(main(sys.argv[1:]))
"""

HEADERS = (
    b"Host: hUSERINFO:SECRET01@h\r\nAUTHORIZATION: Bearer SECRET02\r\nX-Api-Key: SECRET03\r\napi-key: SECRET04\r\n"
    b"Cookie: s=SECRET05\r\nProxy-Authorization: Basic SECRET06\r\nX-My-Token: SECRET07\r\nX-Odd: caf\xe9 SECRET08\r\n"
)
TARGET = b"/v1/chat/completions?key=SECRET09&api_key=SECRET10#SECRET11"
ABSOLUTE = b"http://user:SECRET12@other.example/v1/chat/completions?access_token=SECRET13"
REPLY_HEADERS = (b"set-cookie: s=SECRET14", b"x-upstream-key: SECRET15", b"authorization: SECRET16")
BODY = b'{"model":"m","stream":true,"user":"SECRET17","messages":[{"role":"user","content":"hi"}],"api_key":"SECRET18"}'
SECRET = re.compile(rb"SECRET\d\d")


def request(target: bytes = TARGET, body: bytes = BODY, extra: bytes = b"") -> bytes:
    head = b"POST " + target + b" HTTP/1.1\r\n" + HEADERS + extra
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass
class Process:
    port: int
    log_dir: Path
    stderr: Path

    def everything_written(self) -> bytes:
        return b"".join(path.read_bytes() for path in [self.stderr, *sorted(self.log_dir.rglob("*"))])


@contextlib.contextmanager
def running_process(folder: Path, upstream: str) -> Iterator[Process]:
    command = [sys.executable, "-X", "dev", "-c", PROGRAM, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", upstream, "--log-dir", str(folder / "logs"), "--drain-seconds", "0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_")}
    stderr = folder / "stderr"
    with stderr.open("wb") as output, subprocess.Popen(command, stderr=output, cwd=ROOT, env=environ) as process:
        try:
            while b"Ready" not in stderr.read_bytes():
                assert process.poll() is None, stderr.read_text()
            found = re.search(rb"listen +http://127\.0\.0\.1:(\d+)", stderr.read_bytes())
            assert found
            yield Process(int(found[1]), folder / "logs", stderr)
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT)
        finally:
            process.kill()


def ask(process: Process, upstream: RawUpstream, sent: bytes, *steps: Step) -> bytes:
    upstream.scripts = [steps]
    with RawClient(process.port) as client:
        client.send(sent)
        client.socket.shutdown(socket.SHUT_WR)
        return client.read_to_end()


STREAM = chunked(EVENT_STREAM, *REPLY_HEADERS) + chunk(b'data: {"id":"a","choices":[]}\n\n')
BAD = [
    request().replace(b"Content-Length", b"Content-Length : 1\r\nContent-Length"),
    request().replace(b"X-Odd: ", b"X-Odd: \x00"),
    request().replace(b"X-Odd: ", b"X-Odd: \r"),
    request().replace(b"POST", b"FROB"),
    request().replace(b"HTTP/1.1", b"HTTP/2.0", 1),
    request(TARGET + b"\xe9"),
    request().replace(b"/v1", b"v1"),
    request(extra=b"Transfer-Encoding: gzip, chunked\r\n"),
    request(extra=b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
    request(extra=b"X-Long: SECRET19" + b"a" * 70_000 + b"\r\n"),
    request(extra=b"Host: again\r\n"),
    request().replace(b"POST /v1/chat/completions", b"CONNECT SECRET20.example:443", 1),
    b"SECRET21 nonsense\r\n\r\n",
]


def test_credentials_stay_out_of_records_and_logs_in_every_ending(tmp_path):
    with running_upstream(reply()) as upstream, running_process(tmp_path, upstream.url) as process:
        got = ask(process, upstream, request(), STREAM + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert all(header in got for header in REPLY_HEADERS)
        arrived = upstream.requests[-1]
        assert b"Bearer SECRET02" in arrived.head  # it is passed on, of course
        assert b"key=SECRET09" in arrived.request_line
        assert ask(process, upstream, request(ABSOLUTE), reply(b"{}", *REPLY_HEADERS)).startswith(b"HTTP/1.1 200 ")
        assert ask(process, upstream, request(), reply(b"SECRET22", status=b"401 SECRET23")).startswith(
            b"HTTP/1.1 401 "
        )
        for steps in (
            (Close,),
            (Reset,),
            (STREAM, Close),
            (STREAM, Reset),
            (AwaitHangUp,),
        ):
            ask(process, upstream, request(), *steps)
        for sent in BAD:
            assert b"\r\nx-sparseety-error: " in ask(process, upstream, sent, reply(b"{}"))
        upstream.scripts = [(AwaitHangUp,)]
        with RawClient(process.port) as last:  # still open when the proxy is stopped
            last.send(request())
            upstream.next_request()
    written = process.everything_written()
    assert b'"event":"request_start"' in written
    assert set(SECRET.findall(written)) == set()


def test_a_reply_that_is_no_http_is_not_quoted(tmp_path):
    with running_upstream(reply()) as upstream, running_process(tmp_path, upstream.url) as process:
        got = [
            ask(process, upstream, request(), *steps, Close)
            for steps in (
                (b"SECRET24 nonsense\r\n\r\n",),
                (b"HTTP/1.1 200 OK\r\nset-cookie: SECRET25\x00\r\n\r\n",),
                (b"HTTP/1.1 200 OK\r\nset-cookie SECRET26\r\n\r\n",),
                (b"HTTP/1.1 200 OK\r\ncontent-length: SECRET27\r\n\r\n",),
                (STREAM, b"SECRET28\r\n"),
            )
        ]
    assert [reply.count(b"x-sparseety-error: upstream_broken") for reply in got] == [1, 1, 1, 1, 0]
    allowed = SECRET.findall(b"".join(REPLY_HEADERS))  # of the stream that began well
    assert set(SECRET.findall(b"".join(got))) == set(allowed)
    assert set(SECRET.findall(process.everything_written())) == set()


def test_credentials_stay_out_of_what_is_said_about_a_server_that_is_down(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running_process(tmp_path, f"http://127.0.0.1:{port}") as process, RawClient(process.port) as client:
        client.send(request())
        client.socket.shutdown(socket.SHUT_WR)
        got = client.read_to_end()
    assert b"x-sparseety-error: upstream_unreachable" in got
    assert not SECRET.search(got)
    assert set(SECRET.findall(process.everything_written())) == set()


def test_an_upstream_with_credentials_in_its_url_is_refused_without_repeating_them(tmp_path):
    command = [sys.executable, "-m", "proxy.cli", "--upstream", "http://user:SECRET01@127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=WAIT, check=False)
    assert result.returncode == 2
    assert not SECRET.search(result.stdout + result.stderr)


@pytest.mark.parametrize("error", [ValueError("SECRET01"), RuntimeError("SECRET02")])
def test_an_error_of_the_proxys_own_is_logged_without_its_words(tmp_path, monkeypatch, caplog, error):
    """They may quote what a client or a server sent."""

    async def broken(*_: object) -> None:
        try:
            raise KeyError("SECRET03")
        except KeyError:
            raise error from None

    caplog.set_level(1)
    monkeypatch.setattr(Upstream, "send", broken)
    with running_proxy(tmp_path, "http://127.0.0.1:1") as proxy, proxy.client() as client:
        client.send(request())
        assert b"x-sparseety-error: internal_error" in client.read_until(b"\r\n\r\n")
    assert "failed" in caplog.text
    assert not SECRET.search(caplog.text.encode())
