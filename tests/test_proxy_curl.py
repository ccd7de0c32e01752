"""`curl -N` shows each event as the server sends it: here, the server sends none before the last is shown."""

import os
import select
import shutil
import subprocess
import threading

import pytest

from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    Reset,
    RunningProxy,
    chunk,
    chunked,
    running_proxy,
    running_upstream,
)

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

EVENTS = [
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n',
    b": a comment, as servers send to keep a connection open\n\n",
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"\xf0\x9f\x98',  # cut inside of a character
    b'\x80"}}]}\n\n',
    b"event: x\r\n",  # and inside of an event
    b"data: y\r\n\r\n",
    b"data: [DONE]\n\n",
]


def curl(proxy: RunningProxy, *options: str) -> subprocess.Popen[bytes]:
    url = f"http://127.0.0.1:{proxy.service.listen.port}/v1/chat/completions"
    command = ["curl", "-N", "-sS", "--noproxy", "*", "--max-time", str(WAIT), *options]
    return subprocess.Popen([*command, "--json", '{"stream":true}', url], stdout=subprocess.PIPE)


@pytest.mark.parametrize("options", [(), ("--compressed",), ("--http1.0",)], ids=["plain", "compressed", "HTTP/1.0"])
def test_curl_shows_each_piece_before_the_next_is_sent(tmp_path, options):
    shown = [threading.Event() for _ in EVENTS]
    steps = [step for event, gate in zip(EVENTS, shown, strict=True) for step in (chunk(event), gate)]
    with (
        running_upstream(chunked(EVENT_STREAM), *steps, LAST_CHUNK) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        curl(proxy, *options) as client,
    ):
        assert client.stdout is not None
        for event, gate in zip(EVENTS, shown, strict=True):
            assert read(client.stdout.fileno(), len(event)) == event
            gate.set()
        assert client.stdout.read() == b""
        assert client.wait(WAIT) == 0


def read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size and select.select([descriptor], [], [], WAIT)[0]:
        more = os.read(descriptor, size - len(data))
        if not more:
            break
        data += more
    return data


def test_curl_tells_a_stream_that_broke_off_from_one_that_ended(tmp_path):
    with (
        running_upstream(chunked(EVENT_STREAM), chunk(EVENTS[0]), Reset) as upstream,
        running_proxy(tmp_path, upstream.url) as proxy,
        curl(proxy) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.read() == EVENTS[0]
        assert client.wait(WAIT) in (18, 56)  # a transfer that ended early; a connection that was reset
