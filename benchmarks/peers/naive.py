"""The proxy one writes first: FastAPI, an httpx client, a JSON line for each chunk. The reference of every table."""

import json
import os
import time
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()
client = httpx.AsyncClient(base_url=os.environ["UPSTREAM"], timeout=None, limits=httpx.Limits(max_connections=None))


def record(entry: dict[str, object]) -> None:
    with open(os.environ["LOG"], "a") as log:  # noqa: PTH123 -- written as such proxies are
        log.write(json.dumps({"time": time.time(), **entry}) + "\n")


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def relay(path: str, request: Request) -> Response:
    body = await request.body()
    headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
    url = "/" + path + ("?" + request.url.query if request.url.query else "")
    if not json.loads(body or b"{}").get("stream"):
        reply = await client.request(request.method, url, content=body, headers=headers)
        record({"reply": reply.text})
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

    async def chunks() -> AsyncIterator[str]:
        async with client.stream(request.method, url, content=body, headers=headers) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    record({"chunk": line.removeprefix("data: ")})
                yield line + "\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")
