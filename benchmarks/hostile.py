"""A bounded soak: hostile clients and hostile servers around one proxy, healthy streams beside them.

    python -m benchmarks.hostile [SECONDS] [--seed N] [--connections N]

Everything stays on loopback. The proxy is a process of its own; this one plays all the others. A first tenth of the
time warms the proxy up, so that what is compared afterwards is growth and not the first use of a buffer. Exits 1 where
a healthy stream was not byte for byte what it should be, where memory or descriptors did not return to where they
were, or where the proxy died or wrote a traceback.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hostile_upstream import HostileUpstream, healthy_body

HEALTHY_STREAMS = 8
ATTACKERS = 4  # of each kind, at a time
SETTLE_SECONDS = (
    40  # longer than any limit of the proxy's but the one for idle connections, which end with their client
)
SLACK_DESCRIPTORS = 16  # log segments, pooled connections
SLACK_MEMORY = 16 << 20  # bytes, beside a quarter of what was used before
RESET = struct.pack("ii", 1, 0)  # struct linger


@dataclass
class Usage:
    memory: int  # bytes resident
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory / 1e6:6.1f} MB, {self.descriptors} descriptors"


@dataclass
class Soak:
    port: int
    rng: random.Random
    connections: int  # of one flood
    attacks: Counter[str] = field(default_factory=Counter)
    healthy: int = 0  # streams that arrived as they should
    errors: list[str] = field(default_factory=list)  # of healthy streams

    @contextlib.asynccontextmanager
    async def connect(self, receive_buffer: int | None = None) -> AsyncIterator[tuple[socket.socket, "Wire"]]:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        try:
            sock.setblocking(False)
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            async with asyncio.timeout(30):
                await loop.sock_connect(sock, ("127.0.0.1", self.port))
            yield sock, Wire(sock)
        finally:
            sock.close()


class Wire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._loop = sock, asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def read(self, size: int = 1 << 16) -> bytes:
        return await self._loop.sock_recv(self._sock, size)

    async def read_for(self, seconds: float) -> bytes:
        got = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while data := await self.read():
                    got = (got + data)[-4096:]
        return got


def post(path: str, body: bytes = b"{}", *lines: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path.encode(), b"host: h", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


# ------------------------------------------------------------------------------------------------ healthy streams


async def healthy(soak: Soak) -> None:
    number = soak.rng.randrange(1 << 30)
    try:
        async with asyncio.timeout(60), soak.connect() as (_, wire):
            await wire.send(post(f"/v1/chat/completions?n={number}", b'{"stream":true}', b"connection: close"))
            got = b""
            while data := await wire.read():
                got += data
    except (OSError, TimeoutError) as error:
        soak.errors.append(f"stream {number}: {type(error).__name__}")
        return
    head, _, body = got.partition(b"\r\n\r\n")
    expected = healthy_body(number)
    if not head.startswith(b"HTTP/1.1 200 ") or _dechunk(body) != expected:
        soak.errors.append(f"stream {number}: {head[:40]!r}, {len(body)} bytes with framing, ends in {body[-160:]!r}")
    else:
        soak.healthy += 1


def _dechunk(data: bytes) -> bytes | None:
    """None: it does not end where it should."""
    parts = []
    while True:
        size, found, data = data.partition(b"\r\n")
        if not found:
            return None
        length = int(size, 16)
        parts.append(data[:length])
        if data[length : length + 2] != b"\r\n":
            return None
        data = data[length + 2 :]
        if not length:
            return b"".join(parts) if not data else None


# -------------------------------------------------------------------------------------------------- hostile clients


async def random_bytes(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        beginning = soak.rng.choice([b"", b"GET ", b"POST / HTTP/1.1\r\n", post("/quick")[:-2], b"\x16\x03\x01"])
        await wire.send(beginning + soak.rng.randbytes(soak.rng.randrange(1, 9000)))
        await wire.read_for(1)


async def half_open(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        await wire.send(soak.rng.choice([b"", b"G", post("/quick")[:30], post("/quick", b"x" * 1000)[:-500]]))
        await asyncio.sleep(soak.rng.uniform(0, 5))


async def slow_loris(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        for byte in post("/quick", b"", b"x: " + b"y" * 500)[: soak.rng.randrange(100)]:
            await wire.send(bytes([byte]))
            await asyncio.sleep(0.1)


async def reset_in_request(soak: Soak) -> None:
    async with soak.connect() as (sock, wire):
        request = post("/v1/completions", b"x" * 100_000)
        await wire.send(request[: soak.rng.randrange(1, len(request))])
        await asyncio.sleep(soak.rng.uniform(0, 0.1))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def reset_in_stream(soak: Soak) -> None:
    async with soak.connect() as (sock, wire):
        await wire.send(post(soak.rng.choice(["/endless", "/silent", "/v1/chat/completions?n=1"])))
        await wire.read_for(soak.rng.uniform(0, 1))
        if soak.rng.random() < 0.7:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def slow_reader(soak: Soak) -> None:
    async with soak.connect(receive_buffer=4096) as (_, wire):
        await wire.send(post("/flood"))
        for _ in range(soak.rng.randrange(100)):
            await wire.read(100)
            await asyncio.sleep(0.05)


async def pipelining(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        await wire.send(post("/quick") * soak.rng.randrange(1, 300) + soak.rng.choice([b"", b"\x00\x01"]))
        await wire.read_for(soak.rng.uniform(0, 1))


async def endless_head(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        line = soak.rng.choice([b"x: y\r\n", b"a", b"\r\n"])
        await wire.send(soak.rng.choice([b"GET / HTTP/1.1\r\n", b"GET /"]) + line * 100_000)
        await wire.read_for(1)


async def hostile_server(soak: Soak) -> None:
    async with soak.connect() as (_, wire):
        await wire.send(post("/hostile/" + soak.rng.choice(HostileUpstream.KINDS), b'{"stream":true}'))
        await wire.read_for(2)


async def flood(soak: Soak) -> None:
    """Many connections at once: silent, asking, half-closed, reset; all held for a second."""

    async def one() -> None:
        async with soak.connect() as (sock, wire):
            kind = soak.rng.randrange(4)
            if kind:
                await wire.send(post("/quick"))
            if kind == 2:
                sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(1)
            if kind == 3:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    await asyncio.gather(*(one() for _ in range(soak.connections)), return_exceptions=True)
    await asyncio.sleep(8)


ATTACKS: list[tuple[Callable[[Soak], Awaitable[None]], int]] = [
    (random_bytes, ATTACKERS),
    (half_open, 10 * ATTACKERS),
    (slow_loris, 10 * ATTACKERS),
    (reset_in_request, ATTACKERS),
    (reset_in_stream, ATTACKERS),
    (slow_reader, ATTACKERS),
    (pipelining, 1),
    (endless_head, 1),
    (hostile_server, ATTACKERS),
    (flood, 1),
]


async def attack_for(soak: Soak, seconds: float) -> None:
    """All kinds at once, and the healthy streams; returns when the last of them has ended."""
    until = time.monotonic() + seconds

    async def keep_on(attack: Callable[[Soak], Awaitable[None]]) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, TimeoutError):
                await attack(soak)
            soak.attacks[attack.__name__] += 1
            await asyncio.sleep(soak.rng.uniform(0.02, 0.1))  # the machine is not the proxy's alone

    async def keep_well() -> None:
        while time.monotonic() < until:
            await healthy(soak)

    workers = [keep_on(attack) for attack, count in ATTACKS for _ in range(count)]
    await asyncio.gather(*workers, *(keep_well() for _ in range(HEALTHY_STREAMS)))


# ------------------------------------------------------------------------------------------------------- the proxy


@contextlib.contextmanager
def running_proxy(folder: Path, upstream: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    stderr = folder / "stderr"
    command = [sys.executable, "-m", "proxy.cli", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", upstream, "--log-dir", str(folder / "logs"), "--drain-seconds", "5"]
    with stderr.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            while b"Ready" not in stderr.read_bytes():
                if process.poll() is not None:
                    raise SystemExit(stderr.read_text())
                time.sleep(0.05)
            found = re.search(rb"listen +http://127\.0\.0\.1:(\d+)", stderr.read_bytes())
            assert found
            yield process, int(found[1]), stderr
        finally:
            if process.poll() is None:
                process.kill()


def usage(pid: int) -> Usage:
    """Of a process and its children."""
    total = Usage(0, 0)
    for child in [pid, *_children(pid)]:
        status = Path(f"/proc/{child}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        total.memory += int(resident[1]) * 1024 if resident else 0
        total.descriptors += sum(1 for _ in Path(f"/proc/{child}/fd").iterdir())
    return total


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


async def settle(pid: int, before: Usage | None = None) -> Usage:
    """What is used when nothing goes on any more: once it is steady, and back where it was if it ever will be."""
    until = time.monotonic() + SETTLE_SECONDS
    last = usage(pid)
    while time.monotonic() < until:
        await asyncio.sleep(5)
        now = usage(pid)
        if now.descriptors == last.descriptors and not (before and growth(before, now)):
            break
        last = now
    return now


def growth(before: Usage, after: Usage) -> list[str]:
    """What did not return to near where it was."""
    found = []
    if after.descriptors > before.descriptors + SLACK_DESCRIPTORS:
        found.append(f"descriptors rose from {before.descriptors} to {after.descriptors}")
    if after.memory > before.memory * 1.25 + SLACK_MEMORY:
        found.append(f"memory rose from {before.memory / 1e6:.1f} to {after.memory / 1e6:.1f} MB")
    return found


async def soak_for(seconds: float, seed: int, connections: int) -> list[str]:
    """Returns what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        async with HostileUpstream(random.Random(seed)).serving() as upstream:
            with running_proxy(Path(folder), await upstream.url()) as (process, port, stderr):
                soak = Soak(port, random.Random(seed), connections)
                cold = usage(process.pid)
                await attack_for(soak, min(seconds / 10, 30))
                before = await settle(process.pid)
                watch = asyncio.create_task(_peak(process.pid))
                await attack_for(soak, seconds)
                watch.cancel()
                after = await settle(process.pid, before)
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.wait, 60)
                said = stderr.read_text()
            peak = await watch
    print(f"cold     {cold}")
    print(f"warm     {before}")
    print(f"peak     {peak}")
    print(f"after    {after}")
    print(f"healthy  {soak.healthy} streams, {len(soak.errors)} errors")
    print(f"attacks  {json.dumps(soak.attacks)}")
    print(
        f"proxy    exit {process.returncode}, {len(said.splitlines())} lines on stderr, the last: {said[-200:].strip()}"
    )
    wrong = soak.errors[:10]
    if not soak.healthy:
        wrong.append("no healthy stream came through")
    wrong += growth(before, after)
    if process.returncode or "Traceback" in said:
        wrong.append("the proxy failed; its last words:\n" + said[-3000:])
    return wrong


async def _peak(pid: int) -> Usage:
    peak = Usage(0, 0)
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            now = usage(pid)
            peak = Usage(max(peak.memory, now.memory), max(peak.descriptors, now.descriptors))
            await asyncio.sleep(0.5)
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--connections", type=int, default=2000, help="in one flood (default: 2000)")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the proxy inherits it
    connections = min(options.connections, hard // 4)  # both ends of a connection to the upstream are in here
    print(f"seed {options.seed}, floods of {connections} connections, {options.seconds:g} s", flush=True)
    wrong = asyncio.run(soak_for(options.seconds, options.seed, connections))
    for line in wrong:
        print(f"FAILED   {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
