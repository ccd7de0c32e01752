"""The commands as a user starts and stops them."""

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import sparseety
from sparseety import cli
from sparseety.records import Chunk, StreamDone
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    RawClient,
    chunk,
    chunked,
    post,
    records,
    reply,
    running_upstream,
)

ROOT = Path(__file__).parent.parent

# PYTHONPATH: the proxy of this checkout runs, from whichever folder.
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_")}
ENVIRON["PYTHONPATH"] = str(ROOT)

# What the banner asks an upstream: /health, /version, /v1/models.
BANNER = ((reply(),), (reply(b'{"version":"0.32.0"}'),), (reply(b'{"data":[{"id":"m-7b"}]}'),))


@contextlib.contextmanager
def started(
    tmp_path: Path, upstream: str, *flags: str, command: Sequence[str] = ("-m", "proxy.cli")
) -> Iterator[tuple[subprocess.Popen[str], list[str], int]]:
    """A proxy process that is ready, its banner, and its port."""
    command = [sys.executable, *command, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", upstream, "--log-dir", str(tmp_path / "logs"), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRON, cwd=tmp_path) as process:
        try:
            assert process.stderr is not None
            banner = []
            for line in process.stderr:
                banner.append(line)
                if line.startswith("Ready"):
                    break
            listen = re.search(r"listen +http://127\.0\.0\.1:(\d+)", "".join(banner))
            assert listen, banner
            yield process, banner, int(listen[1])
        finally:
            process.kill()


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    process.send_signal(number)
    _, stderr = process.communicate(timeout=WAIT)
    return stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_open_stream_is_finished_before_the_proxy_stops(tmp_path, number):
    go = threading.Event()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    steps = [chunked(EVENT_STREAM), chunk(event), go, chunk(b"data: [DONE]\n\n"), LAST_CHUNK]
    with running_upstream(*steps) as upstream:
        upstream.scripts[:0] = BANNER
        with started(tmp_path, upstream.url) as (process, banner, port), RawClient(port) as client:
            assert f"  upstream   {upstream.url}   up, vLLM 0.32.0, 1 model: m-7b\n" in banner
            client.send(post(b"{}"))
            client.read_until(event)
            process.send_signal(number)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Draining: 1 requests are open.")
            go.set()
            assert client.read_to_end().endswith(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    assert re.fullmatch(r"Stopped\. 1 requests, 0 of them broken off; \d+ records written, 0 lost\.\n", stderr)
    end = records(tmp_path / "logs")[-1]
    assert isinstance(end, StreamDone)
    assert end.outcome == "complete"


def test_a_stream_that_outlives_the_limit_is_broken_off_and_recorded_as_such(tmp_path):
    with running_upstream(chunked(EVENT_STREAM), chunk(b": hi\n\n"), AwaitHangUp) as upstream:
        upstream.scripts[:0] = BANNER
        with (
            started(tmp_path, upstream.url, "--drain-seconds", "0.2") as (process, _, port),
            RawClient(port) as client,
        ):
            client.send(post(b"{}"))
            client.read_until(b": hi\n\n")
            stderr = stop(process)
            assert not client.read_to_end().endswith(LAST_CHUNK)
            assert upstream.requests[-1].hung_up.wait(WAIT)
    assert process.returncode == 0
    assert "1 of them broken off" in stderr
    assert "Traceback" not in stderr
    end = records(tmp_path / "logs")[-1]
    assert isinstance(end, StreamDone)
    assert end.outcome == "shutdown"


def test_a_stream_whose_client_does_not_read_is_broken_off_and_its_end_recorded_last(tmp_path):
    more = [chunk(b": " + b"x" * 60_000 + b"\n\n")] * 400  # far more than all the buffers on the way hold
    with running_upstream(chunked(EVENT_STREAM), *more, AwaitHangUp) as upstream:
        upstream.scripts[:0] = BANNER
        with (
            started(tmp_path, upstream.url, "--drain-seconds", "0.2") as (process, _, port),
            RawClient(port) as client,
        ):
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.send(post(b"{}"))
            client.read_until(b"\r\n\r\n")
            stop(process)
            assert upstream.requests[-1].hung_up.wait(WAIT)
    *_, last_read, end = records(tmp_path / "logs")
    assert isinstance(end, StreamDone)
    assert end.outcome == "shutdown"
    assert isinstance(last_read, Chunk)
    assert (last_read.read or last_read.wire_index) == end.reads


def test_a_request_that_waits_for_its_reply_is_refused_at_a_second_signal(tmp_path):
    with running_upstream(AwaitHangUp) as upstream:
        upstream.scripts[:0] = BANNER
        with started(tmp_path, upstream.url) as (process, _, port), RawClient(port) as client:
            for _ in BANNER:
                upstream.next_request()
            client.send(post(b"{}"))
            assert upstream.next_request().body_arrived.wait(WAIT)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Draining")
            process.send_signal(signal.SIGINT)
            assert b"x-sparseety-error: shutdown\r\n" in client.read_to_end()
            _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    start, _ = records(tmp_path / "logs")
    assert stderr.startswith(f"Broken off, and incomplete in the log:\n  {start.uuid}   chat, 0 reads, 0 bytes\n")


def test_the_proxy_starts_without_its_upstream_and_says_so(tmp_path):
    with started(tmp_path, "http://127.0.0.1:1") as (process, banner, _):
        assert any("not usable yet" in line for line in banner)
        assert "0 lost" in stop(process)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--upstream", "vllm:8000"], 'error: --upstream="vllm:8000" is not a URL; example: http://vllm:8000\n'),
        (["--log-dir", "/proc/none"], "error: cannot write logs in /proc/none/: "),
        (["--log-dir", "/proc/none", "--workers", "2"], "error: cannot write logs in /proc/none/: "),
        (
            ["--upstream", "https://a", "--upstream-ca", "none.pem"],
            "error: none.pem: No such file or directory; --upstream-ca names a PEM file\n",
        ),
        (
            ["--upstream", "https://a", "--upstream-ca", __file__],
            f"error: {__file__}: holds no certificates; --upstream-ca names a PEM file\n",
        ),
    ],
)
def test_what_keeps_the_proxy_from_starting_is_said_without_a_traceback(flags, message):
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=WAIT, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_is_taken_is_named(tmp_path, workers):
    with running_upstream(b"") as taken:
        command = [sys.executable, "-m", "proxy.cli", "--listen", f"127.0.0.1:{taken.port}", "--log-dir", str(tmp_path)]
        command += ["--workers", workers]
        result = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=WAIT, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: cannot listen on 127.0.0.1:{taken.port}: Address already in use; choose another with --listen\n"
    )


def test_the_proxy_loads_no_model_library():
    code = "import proxy.app, proxy.cli, sys; print({'torch', 'transformers', 'vllm', 'tokenizers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "set()\n"


def test_the_capture_core_knows_neither_server_nor_client():
    code = "import proxy.capture, sys; print({'httpx', 'uvicorn', 'fastapi', 'asyncio', 'socket'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "set()\n"


def test_the_sparseety_command_lists_its_sub_commands_without_loading_them(capsys):
    code = (
        "import sys; from sparseety.cli import main; main(['--help']); print({'proxy', 'verifier'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "\n  proxy " in result.stdout
    assert result.stdout.endswith("set()\n")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparseety {sparseety.__version__}\n"


def test_the_sparseety_command_hands_the_rest_to_its_sub_command(capsys):
    assert cli.main(["proxy", "--upstream", "nonsense"]) == 2
    assert '--upstream="nonsense" is not a URL' in capsys.readouterr().err
    assert cli.main(["nothing"]) == 2
    assert capsys.readouterr().err.startswith('error: no command "nothing"; there are: ')


def test_every_command_that_the_distribution_declares_can_be_called(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][cli.GROUP]
    assert {"config", "proxy", "verify-tokens"} <= declared.keys()
    for name, value in declared.items():
        command = EntryPoint(name, value, cli.GROUP).load()
        with contextlib.suppress(SystemExit):
            assert command(["--help"]) == 0
        assert "usage: " in "".join(capsys.readouterr())


def test_a_pure_relay_needs_no_folder_and_says_that_it_records_nothing(tmp_path):
    (tmp_path / "logs").write_text("a file is in the way")
    with running_upstream(reply(b"{}")) as upstream, started(tmp_path, upstream.url, "--no-capture") as running:
        process, banner, port = running
        assert "  capture    off\n" in banner
        assert " ! --no-capture: nothing is recorded, so nothing can be verified\n" in banner
        with RawClient(port) as client:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"{}")
        assert stop(process).endswith("Stopped. 1 requests, 0 of them broken off; 0 records written, 0 lost.\n")
    assert process.returncode == 0


def test_a_server_that_says_odd_things_of_itself_cannot_write_on_the_terminal(tmp_path):
    with running_upstream(reply(b"{}")) as upstream:
        odd = b'{"data":[{"id":"a\\u001b[2Jb"},7,{}]}'
        upstream.scripts[:0] = ((reply(),), (reply(b"[" * 100_000),), (reply(odd),))
        with started(tmp_path, upstream.url) as (process, banner, _):
            assert f"  upstream   {upstream.url}   up, 2 models: a?[2Jb, None\n" in banner
            stop(process)


TLS = ROOT / "tests" / "data" / "upstream-tls"


def test_an_upstream_with_a_certificate_of_its_own_is_used_with_that_and_refused_without(tmp_path):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    with server, context.wrap_socket(server.socket, server_side=True) as server.socket:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"https://127.0.0.1:{server.server_port}"
            for flags, words in (((), "not usable yet"), (("--upstream-ca", str(TLS / "cert.pem")), "up")):
                with started(tmp_path, url, *flags) as (process, banner, _):
                    assert any(line.startswith(f"  upstream   {url}   {words}") for line in banner), banner
                    stop(process)
        finally:
            server.shutdown()
            thread.join(WAIT)


def test_while_it_drains_it_is_not_ready_and_still_serves_until_the_delay_is_over(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        started(tmp_path, upstream.url, "--drain-delay", "1h") as (process, banner, port),
    ):
        admin = admin_port(banner)
        assert get(admin, "/readyz") == (200, b'{"ready":true,"reasons":[]}')
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.readline() == "Not ready any more; new requests are served for another 3600 s.\n"
        assert get(admin, "/readyz") == (503, b'{"ready":false,"reasons":["draining"]}')
        with RawClient(port) as client:
            client.send(post(b"{}"))
            assert client.read_reply() == (200, b"{}")
        assert "Stopped. 1 requests, 0 of them" in stop(process)  # the second signal ends the delay
    assert process.returncode == 0


def test_the_admin_port_with_a_token_tells_strangers_yes_or_no_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRON, "SPARSEETY_PROXY_ADMIN_TOKEN", "let me in")
    with running_upstream(reply(b"{}")) as upstream, started(tmp_path, upstream.url) as (process, banner, _):
        assert not any("let me in" in line for line in banner)
        port = admin_port(banner)
        assert get(port, "/healthz") == (200, b'{"status":"ok"}')
        assert get(port, "/readyz") == (200, b'{"ready":true}')
        for path in ("/metrics", "/streams"):
            for given in ("", "Authorization: Bearer let me", "Authorization: let me in", "Authorization: Bearer \xff"):
                assert get(port, path, given)[0] == 401
            assert get(port, path, "Authorization: Bearer let me in")[0] == 200
        assert b'"reasons":[]' in get(port, "/readyz", "Authorization: Bearer let me in")[1]
        stop(process)


def test_the_live_list_shows_what_is_open_and_none_of_its_content(tmp_path):
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a secret"}}]}\n\n'
    with running_upstream(chunked(EVENT_STREAM), chunk(event), AwaitHangUp) as upstream:
        upstream.scripts[:0] = BANNER
        flags = ("--drain-seconds", "0")
        with started(tmp_path, upstream.url, *flags) as (process, banner, port), RawClient(port) as client:
            client.send(post(b'{"model":"my model"}', b"authorization: Bearer sk-1"))
            client.read_until(event)
            body = get(admin_port(banner), "/streams")[1]
            stop(process)
    start = records(tmp_path / "logs")[0]
    (stream,) = json.loads(body)["streams"]
    shown = {"id": start.uuid, "endpoint": "chat", "began": start.ts, "reads": 1, "bytes": len(event), "captured": True}
    assert stream == shown


def admin_port(banner: list[str]) -> int:
    found = re.search(r"admin +http://127\.0\.0\.1:(\d+)", "".join(banner))
    assert found, banner
    return int(found[1])


def get(port: int, path: str, *headers: str) -> tuple[int, bytes]:
    lines = [f"GET {path} HTTP/1.1", "host: a", "connection: close", *filter(None, headers)]
    with RawClient(port) as client:
        client.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return client.read_reply()
