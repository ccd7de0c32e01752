"""A model server without a model: speaks vLLM's streaming dialect, replays really sampled ids, writes the engine's log.

    python -m deploy.demo.backend --port 8000 --log-dir logs

Raw ASGI, so that what goes over the wire is what stands here. It serves the demo and the tests.
"""

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvicorn
from tokenizers import Tokenizer

from deploy.demo.dialect import Reply
from deploy.demo.engine import VERSION, Engine, Identity, Running
from deploy.demo.faults import Fault, NotPossible, Plan, apply, parse_fault
from deploy.demo.replay import encoder, load_streams, pick, replay, together
from deploy.demo.requests import Ask, Endpoint, Model, Refused, read_ask
from sparseety.errors import SparseetyError

HERE = Path(__file__).parent

Message = dict[str, Any]
Scope = dict[str, Any]


class Receive(Protocol):
    async def __call__(self) -> Message: ...


class Send(Protocol):
    async def __call__(self, message: Message, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    log_dir: Path | None = None  # None: no engine log
    token_delay: float = 0.002  # seconds between two engine steps
    model: str = "SmolLM2-135M-Instruct"
    max_model_len: int = 2048
    tokenizer: Path = HERE / "tokenizer"
    streams: Path = HERE / "streams.jsonl"
    fault: Fault | None = None
    fault_every: int = 10  # every so many requests one gets the fault: this one, or the next that it can be done to


_ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class Backend:
    """The ASGI application."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer.from_file(str(settings.tokenizer / "tokenizer.json"))
        self._encode = encoder(self._tokenizer)
        self._streams = load_streams(settings.streams)
        config = msgspec.json.decode((settings.tokenizer / "tokenizer_config.json").read_bytes())
        eos_id = self._tokenizer.token_to_id(config["eos_token"])
        assert eos_id is not None  # else the two files are not of one tokenizer
        self._model = Model(settings.model, settings.max_model_len, eos_id)
        self._created = int(time.time())
        self._requests = 0
        self._faults_due = 0
        self._engine: Engine | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        settings = self._settings
        await receive()
        identity = Identity(
            settings.model, settings.tokenizer, self._tokenizer.get_vocab_size(), settings.max_model_len
        )
        try:
            self._engine = Engine(identity, settings.log_dir, settings.token_delay)
        except SparseetyError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        task = asyncio.create_task(self._engine.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await asyncio.wait([task])
        self._engine.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if endpoint := _ENDPOINTS.get(path):
            if method != "POST":
                await _json(send, {"detail": "Method Not Allowed"}, 405)
                return
            body = await _read_body(receive)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                await self._generate(endpoint, headers, body, receive, send)
            except Refused as refused:
                await _json(send, refused.body, refused.status)
        elif method == "GET" and path == "/health":
            await _reply(send, b"", 200, "application/json")
        elif method == "GET" and path == "/metrics":
            await _reply(send, self._metrics(), 200, "text/plain; version=0.0.4; charset=utf-8")
        elif method == "GET" and path == "/version":
            await _json(send, {"version": VERSION})
        elif method == "GET" and path == "/v1/models":
            await _json(send, self._models())
        else:
            await _json(send, {"detail": "Not Found"}, 404)

    async def _generate(
        self, endpoint: Endpoint, headers: dict[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        assert self._engine is not None  # uvicorn serves after lifespan startup only
        ask = read_ask(endpoint, body, headers.get("x-request-id"), self._model, self._encode)
        plan = self._plan(ask, headers.get("x-demo-fault"))
        running = self._engine.submit(ask, plan)
        gone = asyncio.create_task(self._abort_when_gone(running, receive))
        reply = Reply(ask, int(time.time()), self._spell, plan.usage_error)
        try:
            await (_stream if ask.stream else _whole)(running, reply, send)
        finally:
            gone.cancel()

    async def _abort_when_gone(self, running: Running, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        assert self._engine is not None
        self._engine.abort(running)

    def _plan(self, ask: Ask, header: str | None) -> Plan:
        """How the request will go. The header's fault must be possible; the settings' one waits for a request it can
        be done to."""
        sequences = []
        for number, prompt in enumerate(ask.prompts):
            for child in range(ask.n):
                stream = pick(self._streams, prompt.key, child, ask.greedy)
                sequences.append(replay(self._tokenizer, stream, prompt.ids, ask.sampling, number * ask.n + child))
        ticks = together(sequences)
        usage = ask.include_usage or not ask.stream
        try:
            if header is not None:
                return apply(parse_fault(header), ticks, spell=self._spell, stream=ask.stream, usage=usage)
        except ValueError as error:
            raise Refused(str(error), "X-Demo-Fault") from None
        self._requests += 1
        if self._settings.fault:
            self._faults_due += self._requests % self._settings.fault_every == 0
            if self._faults_due:
                with contextlib.suppress(NotPossible):
                    plan = apply(self._settings.fault, ticks, spell=self._spell, stream=ask.stream, usage=usage)
                    self._faults_due -= 1
                    return plan
        return Plan(ticks)

    def _spell(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id % self._tokenizer.get_vocab_size()], skip_special_tokens=False)
        return text

    def _metrics(self) -> bytes:
        """A few of vLLM's, as it names them: enough to see that something is scraped."""
        assert self._engine is not None
        labels = f'{{engine="0",model_name="{self._settings.model}"}}'
        lines = ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{labels} {self._engine.running}"]
        for name in ("prompt_tokens", "generation_tokens"):
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{labels} {self._engine.counts[name]}"]
        return "".join(f"{line}\n" for line in lines).encode()

    def _models(self) -> Message:
        card = {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._settings.max_model_len,
        }
        return {"object": "list", "data": [card]}


async def _stream(running: Running, reply: Reply, send: Send) -> None:
    """One SSE event a body message, which uvicorn makes one HTTP chunk of, as with vLLM."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        match await running.outbox.get():
            case "die":
                return  # with the body unfinished: uvicorn then closes the connection
            case "abort":
                return
            case "cut":
                break
            case "done":
                for event in reply.closing():
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                break
            case list() as pieces:
                for event in reply.events(pieces):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _whole(running: Running, reply: Reply, send: Send) -> None:
    pieces = []
    while isinstance(item := await running.outbox.get(), list):
        pieces += item
    if item == "done":
        await _reply(send, reply.whole(pieces), 200, "application/json")
    elif item == "die":
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        raise Refused(message, status=500, kind="InternalServerError")


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return body


async def _json(send: Send, body: Message, status: int = 200) -> None:
    await _reply(send, msgspec.json.encode(body), status, "application/json")


async def _reply(send: Send, body: bytes, status: int, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _config(settings: Settings, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        Backend(settings), host=host, port=port, lifespan="on", log_level="warning", timeout_graceful_shutdown=5
    )


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve in a thread, on a port of its own, while the block runs. Yields the base URL, without /v1."""
    server = uvicorn.Server(_config(settings, "127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(SystemExit):  # uvicorn's word for a start that failed, which it has logged
            server.run()

    thread = threading.Thread(target=run, name="demo-backend")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the demo backend did not start")
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.backend", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--log-dir", type=Path, help="where the engine's log goes (default: none is written)")
    parser.add_argument(
        "--token-delay", type=float, default=2.0, help="milliseconds between engine steps (%(default)s)"
    )
    parser.add_argument("--model-name", default=Settings().model)
    parser.add_argument("--fault", type=_fault, metavar="KIND[@N]", help="what to do wrong, and at which chunk or id")
    parser.add_argument("--fault-every", type=int, default=10, metavar="M", help="to each M-th request (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.fault_every < 1:
        parser.error("--fault-every must be at least 1")
    settings = Settings(
        log_dir=options.log_dir,
        token_delay=options.token_delay / 1000,
        model=options.model_name,
        fault=options.fault,
        fault_every=options.fault_every,
    )
    uvicorn.Server(_config(settings, options.host, options.port)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
