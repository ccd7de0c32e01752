"""`sparseety doctor` where what it looks at is broken in odd ways: it says so, soon, and nothing that is untrue."""

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparseety import doctor
from tests.test_doctor import Checks, log, make_old, run, settings

__all__ = ["settings"]  # a fixture that is used by itself

LOCAL = ["--only", "logs", "--only", "plugin", "--only", "proxy"]
EVERYWHERE = ["--only", "upstream", "--only", "proxy", "--only", "plugin", "--only", "verifier", "--only", "prometheus"]


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body.encode()


def drip(connection: socket.socket, first: bytes) -> None:
    """A byte now and then, for ever."""
    connection.sendall(first)
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def reset(connection: socket.socket) -> None:
    connection.sendall(reply("{", "404 Not Found", 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Accepts, reads a request, and lets `answer` do what it does."""

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            answer(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def asked(capsys: pytest.CaptureFixture[str], url: str, *flags: str) -> tuple[int, Checks]:
    places = [flag for name in ("upstream", "admin", "verifier", "prometheus") for flag in (f"--{name}", url)]
    return run(capsys, *places, *EVERYWHERE, *flags)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: time.sleep(60),
        lambda connection: drip(connection, b"H"),
        lambda connection: drip(connection, reply("", length=1 << 20)),
        lambda connection: drip(connection, reply("", "500 Internal Server Error", 1 << 20)),
    ],
    ids=["silent", "a head that takes for ever", "a body that does", "an error's body that does"],
)
def test_a_server_that_never_comes_to_an_end_is_given_up_in_time(answer, capsys):
    with server(answer) as url:
        began = time.monotonic()
        code, checks = asked(capsys, url, "--timeout", "0.3")
        assert time.monotonic() - began < 15  # four servers, one question to each: 1.2 s
    assert code == 1
    for name in ("upstream.reachable", "proxy.alive", "verifier.watch", "prometheus.reachable"):
        assert checks[name][0] == "fail"
        assert "no answer in time" in checks[name][1]


def test_an_error_whose_body_breaks_off_is_no_answer(capsys):
    with server(reset) as url:
        code, checks = asked(capsys, url)
    assert code == 1
    assert checks["upstream.reachable"][0] == checks["proxy.alive"][0] == "fail"


@pytest.mark.parametrize(
    "body", ['{"data": null}', '{"data": ["m"]}', '{"data": {"id": 1}}', '{"version": 1}', "[]", "7"]
)
def test_json_of_another_form_is_another_server(body, capsys):
    with server(lambda connection: connection.sendall(reply(body))) as url:
        code, checks = asked(capsys, url)
    assert code == 1
    assert checks["proxy.metrics"][0] == "fail"


def test_not_ready_is_said_whatever_comes_with_it(capsys):
    answers = iter([reply("{}"), reply("[]", "503 Service Unavailable"), reply("")])
    with server(lambda connection: connection.sendall(next(answers))) as url:
        _, checks = run(capsys, "--admin", url, "--only", "proxy")
    assert checks["proxy.ready"][:2] == ("fail", "it takes no requests: it tells why to who has the admin token")


def test_values_on_a_page_that_count_nothing_are_none(capsys):
    page = (
        'sparseety_plugin_hooks{engine="0",site="ffn_act",state="expected"} NaN\nvllm:x 1\n'
        'sparseety_verify_requests_total{verdict="pass"} +Inf\nsparseety_build_info x\n'
    )
    with server(lambda connection: connection.sendall(reply(page))) as url:
        _, checks = asked(capsys, url)
    assert checks["upstream.metrics"][0] == "ok"
    assert checks["verifier.watch"][1].endswith(": 0 pass")


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Not root, for whom everything can be read."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_logs_that_this_user_cannot_read_are_not_said_to_be_missing(closed, tmp_path, capsys):
    tmp_path.chmod(0o700)
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o755)
        folder = Path(outer) / "logs"
        writer = log(folder)
        folder.chmod(0o755 if closed == "file" else 0o311)
        writer.path.chmod(0)
        with somebody_else():
            code = doctor.main(["--json", "--log-dir", str(folder), *LOCAL])
        folder.chmod(0o700)
        writer.close()
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert code == 1
    assert checks["proxy.settings"]["status"] == "fail"  # nor can it enter the folder that it is in
    assert "sparseety.toml: Permission denied; --config" in checks["proxy.settings"]["text"]
    assert checks["logs.readable"]["status"] == "fail"
    assert "cannot be read by this user" in checks["logs.readable"]["text"]
    assert checks["plugin.alive"]["status"] == "unknown"  # neither gone nor never installed: that is not known


def test_a_file_that_does_not_begin_as_a_log_is_warned_of(tmp_path, capsys):
    folder = tmp_path / "logs"
    log(folder).close()
    (folder / "engine-a-1-17.00000.jsonl").write_bytes(os.urandom(300))
    (folder / "engine-a-2-17.00000.jsonl").write_bytes(b"")  # just made: there is nothing in it yet
    make_old(folder)
    _, checks = run(capsys, "--log-dir", folder, "--only", "logs")
    assert checks["logs.readable"][0] == "warn"
    assert checks["logs.readable"][1].startswith("1 log files or folders do not begin as logs do: ")
    assert "engine-a-1-17" in checks["logs.readable"][1]


@pytest.mark.parametrize("flag", ["--upstream", "--admin"])
def test_a_clients_base_url_is_wrong_use(flag, capsys):
    with pytest.raises(SystemExit) as raised:
        doctor.main([flag, "http://127.0.0.1:8000/v1"])
    assert raised.value.code == 2
    assert "has a path; give scheme, host and port" in capsys.readouterr().err
