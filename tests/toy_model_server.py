"""A server with a toy language model, for stability runs: what comes next is a hash of the context, so it is greedy and
deterministic, and can be made to differ in the ways that a run is to tell apart. Speaks vLLM's dialect where needed.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

_VOCAB = 500


@dataclass
class Toy:
    """What it serves, and how it misbehaves."""

    weights: str = "one"  # other weights are another model
    window: int | None = None  # sees so many last positions: other output, once the context is longer
    noise: float = 0.0  # nats by which a request's scores are off, as by another batch
    die_after: int | None = None  # generations, then streams break off and nothing is answered any more
    ids: bool = True  # knows return_token_ids and return_tokens_as_token_ids
    hidden: int = 0  # first tokens that it does not name, as some parsers make vLLM do
    forced: bool = True  # knows prompt_logprobs
    token_seconds: float = 0.0
    models: Any = None  # what /v1/models says instead
    stream: bytes | None = None  # what every generation is answered with instead
    refused_at: list[float] = field(default_factory=list)
    fail_every: int = 0  # one generation in so many is refused
    refusal: tuple[int, Any] | None = None  # status and body, the same
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies, with their X-Request-Id and how many ran
    running: int = 0

    def scores(self, context: list[int], request_id: str) -> list[tuple[int, float]]:
        """(id, log probability) of six tokens, best first. One position in ten has two that are all but equal."""
        seen = context if self.window is None else context[-self.window :]
        digest = hashlib.sha256(f"{self.weights} {seen}".encode()).digest()
        values = [digest[i] / 32 for i in range(6)]
        if digest[6] < 26:
            values[1] = values[0] = max(values) + 1
        source = random.Random(f"{request_id} {len(context)}")
        values = [value + source.gauss(0, self.noise) for value in values]
        total = math.log(sum(math.exp(value) for value in values))
        ids = [2 + int.from_bytes(digest[8 + 2 * i : 10 + 2 * i], "big") % (_VOCAB - 2) for i in range(6)]
        pairs = dict(zip(ids, (value - total for value in values), strict=True))  # two hashes may name one id
        return sorted(pairs.items(), key=lambda pair: -pair[1])

    def generate(self, prompt: list[int], count: int, request_id: str) -> list[list[tuple[int, float]]]:
        context, tops = list(prompt), []
        for _ in range(count):
            tops.append(self.scores(context, request_id))
            context.append(tops[-1][0][0])
        return tops


def tokens(text: str) -> list[int]:
    """A word is a token."""
    return [
        2 + int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % (_VOCAB - 2) for word in text.split()
    ]


class ToyServer:
    """The ASGI application."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/v1/models":
            card = {"id": "toy", "root": f"toy/{self.toy.weights}", "max_model_len": 2048}
            await _json(send, self.toy.models or {"data": [card]})
        elif path == "/version":
            await _json(send, {"version": "0.32.0"})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            await self._generate(path, json.loads(body), headers.get("x-request-id", ""), send)
        else:
            await _json(send, {"error": {"message": "Not Found"}}, 404)

    async def _generate(self, path: str, body: dict[str, Any], request_id: str, send: Any) -> None:
        toy = self.toy
        if toy.die_after is not None and len(toy.requests) >= toy.die_after:
            raise ConnectionError("dead")
        toy.running += 1
        try:
            toy.requests.append(body | {"x_request_id": request_id, "running": toy.running})
            await self._answer(path, body, request_id, send)
        finally:
            toy.running -= 1

    async def _answer(self, path: str, body: dict[str, Any], request_id: str, send: Any) -> None:
        toy, chat = self.toy, "chat" in path
        prompt = body.get("prompt")
        if chat:
            prompt = tokens(" ".join(f"<{message['role']}> {message['content']}" for message in body["messages"]))
        elif isinstance(prompt, str):
            prompt = tokens(prompt)
        if toy.fail_every and len(toy.requests) % toy.fail_every == 0:
            await _json(send, {"error": {"message": "busy"}}, 503)
            return
        if toy.refusal is not None:
            toy.refused_at.append(time.monotonic())
            busy = [(b"retry-after", b"1")] if toy.refusal[0] == 429 else []
            await _json(send, toy.refusal[1], toy.refusal[0], busy)
            return
        if toy.stream is not None:
            start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            await send(start)
            await send({"type": "http.response.body", "body": toy.stream})
            return
        if body.get("prompt_logprobs"):
            await self._forced(prompt, request_id, send)
            return
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        count = body["max_tokens"]
        first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}} if chat else {}
        if chat:
            await _event(send, {"id": id_, "choices": [first], "prompt_token_ids": prompt})
        for index, top in enumerate(toy.generate(prompt, count, request_id)):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if index == count - 1 else None}
            choice |= {"delta": {"content": f" {top[0][0]}"}} if chat else {"text": f" {top[0][0]}"}
            if toy.ids and index >= toy.hidden:
                choice["token_ids"] = [top[0][0]]
                choice["logprobs"] = _chat_logprobs(top) if chat else _completion_logprobs(top)
                if not chat and not index:
                    choice["prompt_token_ids"] = prompt
            await _event(send, {"id": id_, "choices": [choice]})
            if toy.die_after is not None and len(toy.requests) >= toy.die_after:
                raise ConnectionError("died in the middle")
            if toy.token_seconds:
                await asyncio.sleep(toy.token_seconds)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        await _event(send, {"id": id_, "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _forced(self, prompt: list[int], request_id: str, send: Any) -> None:
        if not self.toy.forced:
            await _json(send, {"error": {"message": "prompt_logprobs is not supported"}}, 400)
            return
        entries: list[dict[str, Any] | None] = [None]
        for place in range(1, len(prompt)):
            top = self.toy.scores(prompt[:place], request_id)
            named = {str(prompt[place]): {"logprob": dict(top).get(prompt[place], -20.0)}}
            entries.append(named | {str(id_): {"logprob": value} for id_, value in top[:5]})
        await _json(send, {"choices": [{"text": "", "prompt_logprobs": entries}]})


def _chat_logprobs(top: list[tuple[int, float]]) -> dict[str, Any]:
    entries = [{"token": f"token_id:{id_}", "logprob": value} for id_, value in top[:5]]
    return {"content": [entries[0] | {"top_logprobs": entries}]}


def _completion_logprobs(top: list[tuple[int, float]]) -> dict[str, Any]:
    return {"top_logprobs": [{f"token_id:{id_}": value for id_, value in top[:5]}]}


async def _event(send: Any, body: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _json(send: Any, body: Any, status: int = 200, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    headers = [(b"content-type", b"application/json"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@contextlib.contextmanager
def toy_serving(toy: Toy) -> Iterator[str]:
    """Serve in a thread, on a port of its own, while the block runs. Yields the base URL."""
    config = uvicorn.Config(ToyServer(toy), host="127.0.0.1", port=0, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="toy-model")
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
