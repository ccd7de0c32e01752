"""The commands as a user starts and stops them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparseety
from sparseety import cli
from sparseety.records import StreamDone
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
    running_upstream,
)

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEETY_")}


@contextlib.contextmanager
def started(tmp_path: Path, upstream: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str], int]]:
    """A proxy process that is ready, its banner, and its port."""
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
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
        upstream.scripts.insert(0, (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",))  # for the banner's question
        with started(tmp_path, upstream.url) as (process, banner, port), RawClient(port) as client:
            assert any("up" in line and upstream.url in line for line in banner)
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
        upstream.scripts.insert(0, (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",))
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


def test_a_request_that_waits_for_its_reply_is_refused_at_a_second_signal(tmp_path):
    with running_upstream(AwaitHangUp) as upstream:
        upstream.scripts.insert(0, (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",))
        with started(tmp_path, upstream.url) as (process, _, port), RawClient(port) as client:
            upstream.next_request()
            client.send(post(b"{}"))
            assert upstream.next_request().body_arrived.wait(WAIT)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Draining")
            process.send_signal(signal.SIGINT)
            assert b"x-sparseety-error: shutdown\r\n" in client.read_to_end()
            process.communicate(timeout=WAIT)
    assert process.returncode == 0


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
    ],
)
def test_what_keeps_the_proxy_from_starting_is_said_without_a_traceback(flags, message):
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=WAIT, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_named(tmp_path):
    with running_upstream(b"") as taken:
        command = [sys.executable, "-m", "proxy.cli", "--listen", f"127.0.0.1:{taken.port}", "--log-dir", str(tmp_path)]
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
    assert capsys.readouterr().err == 'error: no command "nothing"; there are: proxy, verify-tokens\n'
