"""deploy/nginx/sparseety.conf in a real nginx, before real proxies: nothing is held back, repeated or renamed."""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.run import free_ports
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    Close,
    RawClient,
    chunk,
    chunked,
    post,
    records,
    reply,
    running_proxy,
    running_upstream,
)

CONFIG = Path(__file__).parent.parent / "deploy/nginx/sparseety.conf"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")


@contextlib.contextmanager
def nginx(folder: Path, replicas: tuple[int, int], bypass: int) -> Iterator[int]:
    """Yields its port. The shipped file, with other addresses in it."""
    [port] = free_ports(1)
    text = CONFIG.read_text()
    addresses = {"proxy-1:9000": replicas[0], "proxy-2:9000": replicas[1], "vllm:8000": bypass, "127.0.0.1:9080": port}
    for name, number in addresses.items():
        assert text.count(name) == 1
        text = text.replace(name, f"127.0.0.1:{number}")
    (folder / "sparseety.conf").write_text(text)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; user root root;\n"
        "events { worker_connections 64; }\n"
        f"http {{ access_log off; include {folder}/sparseety.conf;\n"
        + "".join(f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        + "}\n"
    )
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + WAIT
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield port
        finally:
            process.terminate()
            process.wait(WAIT)


def headers_of(head: bytes) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in re.findall(rb"^([^:\r\n]+): ([^\r\n]*)", head, re.M)}


def test_each_event_comes_through_at_once_and_the_bytes_are_the_same(tmp_path):
    events = [f'data: {{"n":{n}}}\n\n'.encode() for n in range(5)]
    gates = [threading.Event() for _ in events]
    steps = [step for gate, event in zip(gates, events, strict=True) for step in (gate, chunk(event))]
    script = (chunked(EVENT_STREAM), *steps, LAST_CHUNK)
    with running_upstream(*script) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        here = proxy.service.listen.port
        with nginx(tmp_path, (here, here), upstream.port) as port, RawClient(port) as client:
            client.send(post(b'{"stream":true}'))
            client.read_until(b"\r\n\r\n")  # before there is an event
            for gate, event in zip(gates, events, strict=True):
                gate.set()
                assert client.read_chunk() == event  # before there is another
            assert client.read_chunk() == b""


def test_the_clients_name_for_a_request_is_kept_and_one_without_a_name_gets_one(tmp_path):
    with running_upstream(reply(b"{}")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        here = proxy.service.listen.port
        with nginx(tmp_path, (here, here), upstream.port) as port, RawClient(port) as client:
            client.send(post(b"{}", b"x-request-id: mine"))
            assert client.read_reply() == (200, b"{}")
            assert headers_of(upstream.next_request().head)[b"x-request-id"] == b"mine"
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"{}")
            made = headers_of(upstream.next_request().head)[b"x-request-id"]
            assert re.fullmatch(rb"[0-9a-f]{32}", made)
            assert headers_of(upstream.requests[-1].head)[b"host"] == b"here"
    named = [record.x_request_id for record in records(tmp_path / "logs") if hasattr(record, "x_request_id")]
    assert named == ["mine", made.decode()]


def test_a_replica_that_is_gone_is_passed_over_and_without_any_the_bypass_serves(tmp_path):
    gone = free_ports(2)
    with running_upstream(reply(b"{}")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        here = proxy.service.listen.port
        with nginx(tmp_path, (gone[0], here), gone[1]) as port:
            for _ in range(4):
                with RawClient(port) as client:
                    client.send(post(b"{}"))
                    assert client.read_reply() == (200, b"{}")
    recorded = len([record for record in records(tmp_path / "logs") if hasattr(record, "x_request_id")])
    assert recorded == 4
    with (
        running_upstream(reply(b"{}")) as upstream,
        nginx(tmp_path, (gone[0], gone[1]), upstream.port) as port,
        RawClient(port) as client,
    ):
        client.send(post(b"{}"))
        assert client.read_reply() == (200, b"{}")


def test_what_was_sent_is_not_sent_again(tmp_path):
    """A server may have begun to generate."""
    with running_upstream(Close) as first, running_upstream(Close) as second, running_upstream(reply()) as bypass:
        with nginx(tmp_path, (first.port, second.port), bypass.port) as port, RawClient(port) as client:
            client.send(post(b"{}"))
            assert client.read_until(b"\r\n").startswith(b"HTTP/1.1 502")
        assert len([*first.requests, *second.requests, *bypass.requests]) == 1


def test_a_client_that_leaves_ends_its_generation(tmp_path):
    steps = (chunked(EVENT_STREAM), chunk(b": hi\n\n"), AwaitHangUp)
    with running_upstream(*steps) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        here = proxy.service.listen.port
        with nginx(tmp_path, (here, here), upstream.port) as port:
            with RawClient(port) as client:
                client.send(post(b"{}"))
                client.read_until(b": hi\n\n")
            assert upstream.requests[-1].hung_up.wait(WAIT)


def test_a_request_is_passed_on_while_it_comes(tmp_path):
    whole = post(b'{"prompt":"a"}')
    with (
        running_upstream(reply(b"{}")) as upstream,
        nginx(tmp_path, (upstream.port, upstream.port), upstream.port) as port,
        RawClient(port) as client,
    ):
        client.send(whole[:-1])
        upstream.next_request()
        client.send(whole[-1:])
        assert client.read_reply() == (200, b"{}")


def test_a_large_request_is_neither_refused_nor_kept_in_a_file(tmp_path):
    body = b"x" * (3 << 20)  # nginx's default limit is 1 MiB
    with running_upstream(reply(b"{}")) as upstream, running_proxy(tmp_path, upstream.url) as proxy:
        here = proxy.service.listen.port
        with nginx(tmp_path, (here, here), upstream.port) as port, RawClient(port) as client:
            client.send(post(body))
            assert client.read_reply() == (200, b"{}")
            assert upstream.requests[-1].body == body
    assert not [path for path in (tmp_path / "client_body").rglob("*") if path.is_file()]
