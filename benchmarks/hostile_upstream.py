"""The server of the hostile soak: good streams whose bytes are known, and every way of being a bad server."""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections.abc import AsyncIterator

EVENTS = 60  # of a healthy stream
EVENT_SECONDS = 0.02

_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def healthy_events(number: int) -> list[bytes]:
    """The events of one healthy stream; its number decides each byte."""
    rng = random.Random(number)
    events = []
    for _ in range(EVENTS):
        text = "".join(rng.choice("abc é世🙂\u2028\n") for _ in range(rng.randrange(1, 40)))
        delta = {"id": f"chatcmpl-{number}", "choices": [{"index": 0, "delta": {"content": text}}]}
        events.append(b"data: " + json.dumps(delta, ensure_ascii=False).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


def healthy_body(number: int) -> bytes:
    return b"".join(healthy_events(number))


class HostileUpstream:
    KINDS = ("random", "endless-head", "reset", "reset-in-stream", "close", "bad-chunks", "bad-head", "short", "more")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._port = 0

    async def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["HostileUpstream"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096, limit=1 << 20)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while await self._serve(await reader.readuntil(b"\r\n\r\n"), reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False: the connection is done with."""
        path = head.split(b" ", 2)[1].decode()
        if path.startswith("/hostile/"):
            await self._misbehave(path.removeprefix("/hostile/"), writer)
            return False
        if length := re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE):
            await reader.readexactly(int(length[1]))
        elif b"chunked" in head.lower():
            await reader.readuntil(b"0\r\n\r\n")
        if number := re.search(r"\?n=(\d+)", path):
            await self._stream(healthy_events(int(number[1])), EVENT_SECONDS, writer)
        elif path == "/endless":
            await self._stream([b"data: x\n\n"] * 10_000, 0.01, writer)
        elif path == "/flood":
            await self._stream([b"data: " + b"x" * 60_000 + b"\n\n"] * 1000, 0, writer)
        elif path == "/silent":
            await reader.read()
            return False
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
        return True

    async def _stream(self, events: list[bytes], pause: float, writer: asyncio.StreamWriter) -> None:
        writer.write(_SSE)
        for event in events:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(pause)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _misbehave(self, kind: str, writer: asyncio.StreamWriter) -> None:
        rng = self._rng
        if kind == "random":
            writer.write(rng.choice([b"", b"HTTP/1.1 ", _SSE]) + rng.randbytes(rng.randrange(5000)))
        elif kind == "endless-head":
            writer.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(1000):
                writer.write(b"x: y\r\n" * 1000)
                await writer.drain()
        elif kind == "bad-chunks":
            writer.write(_SSE + b"3\r\nabc\r\nzz\r\n")
        elif kind == "bad-head":
            writer.write(b"HTTP/1.1 200 OK\r\nx\x00: \x01\r\n\r\n")
        elif kind == "short":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
        elif kind == "more":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}" + b"HTTP/1.1 200 OK\r\n" * 5)
        elif kind == "reset-in-stream":
            writer.write(_SSE + b"9\r\ndata: x\n\n\r\n")
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 0.2))
        if kind.startswith("reset"):
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
