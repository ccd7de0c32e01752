"""The capture inside the server: mounted on ASGI applications, under a real uvicorn and without one."""

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from deploy.demo.backend import Backend, Settings
from proxy.asgi import App
from proxy.middleware import LOG_DIR, Capture
from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, Chunk, LogClose, LogOpen, RequestStart, Response, StreamDone
from tests.raw_upstream import RawClient, post, records, running_proxy
from verifier import cli as verify_tokens

PATH = b"/v1/chat/completions"
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"caf\xc3\xa9"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
SSE = [(b"content-type", b"text/event-stream")]


class Scripted:
    """An application that reads the request and sends what it is told to; a message may be an exception to raise."""

    def __init__(self, *messages: Any, listen: bool = False) -> None:
        self.messages, self.listen = messages, listen
        self.seen: list[Any] = []
        self.left = threading.Event()
        self.go = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        while True:
            self.seen.append(message := await receive())
            if not message.get("more_body"):
                break
        for message in self.messages:
            if isinstance(message, BaseException):
                raise message
            await send(message)
        if self.listen:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()


def start(headers: Any = SSE, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


STREAM = (start(), body(EVENT), body(DONE), body(b"", more=False))


@pytest.fixture(autouse=True)
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOG_DIR, str(tmp_path / "logs"))
    return tmp_path / "logs"


@contextlib.contextmanager
def served(app: App) -> Iterator[int]:
    """Under uvicorn in a thread, as vLLM is; yields the port. The log is complete when the block has ended."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=2)  # type: ignore[arg-type]
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def all_records(folder: Path) -> list[AnyRecord]:
    (path,) = find_logs([str(folder)])
    return [record for _, record in read_log(path, lambda problem: pytest.fail(str(problem)))]


def test_a_stream_reaches_the_client_and_the_log_as_the_application_sent_it(log_dir):
    ask = b'{"model":"m","stream":true}'
    with served(Capture(Scripted(*STREAM))) as port, RawClient(port) as client:
        client.send(post(ask, b"authorization: Bearer secret", b"x-request-id: r-1"))
        assert client.read_reply() == (200, EVENT + DONE)
    opening, began, chunk, done, end, closing = all_records(log_dir)
    assert isinstance(opening, LogOpen)
    assert (opening.scope.mounting, opening.scope.upstream) == ("middleware", None)
    assert opening.scope.endpoints == ["chat", "completions", "responses", "messages"]
    assert isinstance(began, RequestStart)
    assert (began.endpoint, began.x_request_id, began.parameters.model) == ("chat", "r-1", "m")
    assert isinstance(chunk, Chunk)
    assert (chunk.delta_text, chunk.response_id) == ("café", "chatcmpl-1")
    assert isinstance(done, Chunk)
    assert isinstance(end, StreamDone)
    assert (end.outcome, end.bytes, end.end_marker, end.reads) == ("complete", len(EVENT + DONE), True, 2)
    assert end.stamps.sent <= end.stamps.headers <= end.stamps.first_token <= end.stamps.end
    assert isinstance(closing, LogClose)
    assert b"secret" not in next(log_dir.iterdir()).read_bytes()


def test_a_client_that_leaves_is_recorded_as_one_that_left(log_dir):
    app = Scripted(*STREAM[:2], listen=True)
    with served(Capture(app)) as port:
        with RawClient(port) as client:
            client.send(post(b"{}"))
            client.read_until(EVENT)
        assert app.left.wait(10)  # the application learns of it as it would without us
    *_, chunk, end = records(log_dir)
    assert isinstance(chunk, Chunk)
    assert isinstance(end, StreamDone)
    assert (end.outcome, end.error, end.bytes) == ("client_gone", None, len(EVENT))


@pytest.mark.parametrize(
    ("messages", "outcome", "error"),
    [
        ((*STREAM[:2], RuntimeError("secret")), "upstream_broken", "RuntimeError"),
        (STREAM[:2], "upstream_broken", None),
        ((*STREAM, RuntimeError("after the end")), "complete", None),
    ],
)
def test_a_reply_that_the_application_leaves_unfinished_is_no_complete_one(log_dir, messages, outcome, error, caplog):
    with served(Capture(Scripted(*messages))) as port, RawClient(port) as client:
        client.send(post(b"{}"))
        client.read_until(EVENT)
        client.read_to_end() if outcome != "complete" else client.read_until(b"0\r\n\r\n")
    end = records(log_dir)[-1]
    assert isinstance(end, StreamDone)
    assert (end.outcome, end.error) == (outcome, error)
    assert b"secret" not in next(log_dir.iterdir()).read_bytes()


def test_an_application_that_fails_before_it_replies_is_recorded_without_a_status(log_dir, caplog):
    with served(Capture(Scripted(RuntimeError("x")))) as port, RawClient(port) as client:
        client.send(post(b"{}"))
        assert client.read_reply()[0] == 500  # uvicorn's own answer
    end = records(log_dir)[-1]
    assert isinstance(end, Response)
    assert (end.outcome, end.status, end.error) == ("upstream_broken", None, "RuntimeError")


def test_a_whole_reply_and_a_path_of_no_endpoint_are_recorded_as_by_the_proxy(log_dir):
    reply = b'{"id":"a","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'
    coded = gzip.compress(reply)
    length = [(b"content-length", b"%d" % len(coded)), (b"content-encoding", b"gzip")]
    with served(Capture(Scripted(start(length), body(coded, more=False)))) as port:
        for path in (PATH, b"/v1/embeddings"):
            with RawClient(port) as client:
                client.send(post(b"{}", path=path))
                assert client.read_reply() == (200, coded)
    _, first, _, second = records(log_dir)
    assert isinstance(first, Response)
    assert isinstance(second, Response)
    assert ([choice.text for choice in first.choices], first.response_id) == (["x"], "a")
    assert (second.choices, second.bytes, second.sha256) == ([], len(coded), None)


def run(app: App, scope: dict[str, Any], incoming: list[Any]) -> list[Any]:
    """Drive an application without a server. An exception among `incoming` is raised by `receive`."""
    sent: list[Any] = []
    waiting = list(incoming)

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


HTTP = {"type": "http", "method": "POST", "path": PATH.decode(), "headers": []}


def test_the_very_messages_pass_in_both_directions(log_dir):
    incoming = [
        {"type": "http.request", "body": b'{"mod', "more_body": True},
        {"type": "http.request", "body": b'el":"m"}', "extra": object()},
    ]
    app = Scripted(*STREAM)
    capture = Capture(app)
    sent = run(capture, dict(HTTP), incoming)
    assert all(a is b for a, b in zip(app.seen, incoming, strict=True))
    assert all(a is b for a, b in zip(sent, STREAM, strict=True))
    run(capture, {"type": "lifespan"}, [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    assert records(log_dir)[0].parameters.model == "m"


def test_odd_messages_and_other_scopes_are_none_of_our_business(log_dir, caplog):
    odd = [{"type": "http.response.start"}, {"type": "x"}, body(b"", more=False), {"type": "http.response.trailers"}]
    capture = Capture(Scripted(*odd))
    assert run(capture, dict(HTTP), [{"type": "http.request"}]) == odd
    assert "could not be read" in caplog.text

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await send(await receive())

    assert run(Capture(echo), {"type": "websocket"}, [{"type": "websocket.connect"}]) == [{"type": "websocket.connect"}]


def test_a_server_that_says_by_an_error_that_the_client_left_is_understood(log_dir):
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError

    async def receive() -> Any:
        return {"type": "http.request"}

    capture = Capture(Scripted(*STREAM))
    with pytest.raises(OSError):  # noqa: PT011 -- it is the server's, with nothing in it
        asyncio.run(capture(dict(HTTP), receive, send))
    run(capture, {"type": "lifespan"}, [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    assert records(log_dir)[-1].outcome == "client_gone"


def test_a_request_that_the_server_cancels_is_no_fault_of_the_application(log_dir):
    async def cancelled() -> None:
        forever = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STREAM[0])
            await forever.wait()

        task = asyncio.create_task(capture_of(app)(dict(HTTP), receive, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    made: list[Capture] = []

    def capture_of(app: App) -> Capture:
        made.append(Capture(app))
        return made[0]

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        pass

    asyncio.run(cancelled())
    made[0]._close()
    assert records(log_dir)[-1].outcome == "shutdown"


def test_a_prefix_that_the_application_is_mounted_under_does_not_hide_its_endpoints(log_dir):
    capture = Capture(Scripted(*STREAM))
    run(capture, HTTP | {"path": "/llm/v1/messages", "root_path": "/llm"}, [{"type": "http.request"}])
    run(capture, {"type": "lifespan"}, [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    assert records(log_dir)[0].endpoint == "messages"


def test_without_a_folder_nothing_is_recorded_and_one_line_says_so(monkeypatch, caplog, log_dir):
    monkeypatch.delenv(LOG_DIR)
    with served(Capture(Scripted(*STREAM))) as port, RawClient(port) as client:
        client.send(post(b"{}"))
        assert client.read_reply() == (200, EVENT + DONE)
    assert not log_dir.exists()
    assert [record.getMessage() for record in caplog.records if record.name == "sparseety.proxy"] == [
        "sparseety: nothing is recorded: SPARSEETY_PROXY_LOG_DIR is not set"
    ]


def test_a_folder_that_cannot_be_written_does_not_keep_the_server_from_serving(log_dir, caplog):
    log_dir.write_text("a file is in the way")
    with served(Capture(Scripted(*STREAM))) as port, RawClient(port) as client:
        client.send(post(b"{}"))
        assert client.read_reply() == (200, EVENT + DONE)
    assert "nothing is recorded: cannot write logs in" in caplog.text


def test_both_mountings_record_the_same(tmp_path, log_dir):
    """Proxy before a server that has the middleware: two logs of the same requests, and the verdict on each."""
    engine = tmp_path / "engine"
    backend = Backend(Settings(log_dir=engine, token_delay=0, model="m"))
    ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    with served(Capture(backend)) as port, running_proxy(tmp_path / "hop", f"http://127.0.0.1:{port}") as proxy:
        url = f"http://{proxy.service.listen}"
        for number, more in enumerate([{"stream": True}, {}, {"stream": True, "n": 2}, {"messages": 7}]):
            httpx.post(f"{url}/v1/chat/completions", json=ask | more, headers={"X-Request-Id": f"r{number}"})
    inside, hop = records(log_dir), records(proxy.log_dir)
    assert comparable(inside) == comparable(hop)
    assert len([record for record in inside if isinstance(record, StreamDone)]) == 2
    assert verify_tokens.main([str(log_dir), str(engine)]) == 0


def comparable(found: list[AnyRecord]) -> list[dict[str, Any]]:
    plain = [msgspec.to_builtins(record) for record in found]
    for record in plain:
        for name in ("ts", "uuid", "read", "reads", "stamps"):
            record.pop(name, None)
    return plain


def test_it_loads_nothing_that_serves_or_calls():
    code = "import sys, json, proxy.middleware; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(run.stdout))
    assert not loaded & {"httpx", "uvicorn", "fastapi", "starlette", "prometheus_client", "httptools", "pydantic"}
