"""The command `sparseety-proxy`."""

import asyncio
import json
import logging
import signal
import sys
import time
from typing import Any

import httpx
import uvloop
from prometheus_client import CollectorRegistry

import sparseety
from proxy.capture import ENDPOINTS
from proxy.config import Loaded, load_config
from proxy.service import Service
from proxy.serving import rest_collector
from proxy.upstream import Upstream, nothing
from proxy.values import show_bytes, show_seconds
from proxy.worker import Summary
from sparseety.clock import monotonic_clock
from sparseety.command import run_command
from sparseety.records import FORMAT_VERSION
from sparseety.segments import Rotation

ASK_SECONDS = 2.0  # for the upstream to say what it is, before the banner goes without it
SHOWN = 10  # names of models, requests that were broken off: more are counted only


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    started = time.monotonic()
    loaded = load_config(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    service = Service(loaded.config, clock=monotonic_clock(), registry=CollectorRegistry())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rest_collector()
        summary = runner.run(_serve(service, loaded, started))
    _say(_last_words(summary))
    return 0


async def _serve(service: Service, loaded: Loaded, started: float) -> Summary:
    stop, hurry = asyncio.Event(), asyncio.Event()
    config = loaded.config

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    state = await _state(service.upstream)

    def on_ready() -> None:
        _say(_banner(service, loaded, state))
        seconds = time.monotonic() - started
        _say(f"Ready in {seconds:.1f} s. Press Ctrl-C to drain and stop ({show_seconds(config.drain_seconds)}).")

    def on_drain(open_requests: int) -> None:
        if config.drain_delay:
            _say(f"Not ready any more; new requests are served for another {show_seconds(config.drain_delay)}.")
        if open_requests:
            _say(f"Draining: {open_requests} requests are open. Press Ctrl-C again to break them off.")

    return await service.run(stop, hurry, on_ready, on_drain)


def _banner(service: Service, loaded: Loaded, state: str) -> str:
    config = loaded.config
    reach = "(loopback only)" if service.listen.loopback else "(other machines can connect)"
    token = "   asks for the token" if config.admin_token else ""
    facts = [
        ("listen", f"http://{service.listen}   {reach}"),
        ("upstream", f"{config.upstream}   {state}"),
        ("capture", _capture(service, loaded)),
        ("admin", f"http://{service.admin}   /healthz /readyz /metrics /streams{token}"),
        ("", "(on the other port all paths are the upstream's)"),
    ]
    if config.workers > 1:
        facts.append(("workers", f"{config.workers} processes"))
    if config.capture:
        facts.append(("retention", str(Rotation(**config.rotation()))))
    if loaded.file:
        facts.append(("settings", f"{loaded.file}; `sparseety config show` tells where each came from"))
    warnings = ["clients keep their own API keys; they are passed on and never written"]
    if not config.capture:
        warnings.append("--no-capture: nothing is recorded, so nothing can be verified")
    if not service.listen.loopback:
        warnings.append("--allow-remote: whoever can reach the listening port can use it; no password is asked for")
    lines = [f"SparSEEty proxy {sparseety.__version__}    capture format {FORMAT_VERSION}"]
    lines += [f"  {name:<10} {fact}" for name, fact in facts]
    lines += [f" ! {warning}" for warning in warnings]
    return "\n".join(lines)


def _capture(service: Service, loaded: Loaded) -> str:
    if not loaded.config.capture:
        return "off"
    where = service.writer.path if service.writer else f"{loaded.config.log_dir}/ (a file for each worker)"
    return (
        f"{where}   REPLY TEXT (content!), all requests to {', '.join(ENDPOINTS)};"
        f" bodies up to {show_bytes(loaded.config.capture_body_bytes)}"
    )


async def _state(upstream: Upstream) -> str:
    """Whether the upstream answers; and what it is, where it says so without being given a key."""
    if trouble := await upstream.trouble():
        return f"not usable yet ({trouble}); the proxy serves on, /readyz is 503"
    version = (await _ask(upstream, b"/version")).get("version")
    models = (await _ask(upstream, b"/v1/models")).get("data")
    words = ["up"]
    if isinstance(version, str):
        words.append(f"vLLM {_plain(version)}")
    if isinstance(models, list) and models:
        names = [_plain(str(model.get("id"))) for model in models if isinstance(model, dict)]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        words.append(f"{len(names)} model{'s'[: len(names) != 1]}: {', '.join(names[:SHOWN])}{more}")
    return ", ".join(words)


async def _ask(upstream: Upstream, target: bytes) -> dict[str, Any]:
    """A JSON object that the upstream answers with; empty: it does not."""
    data = b""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reply = await upstream.send("GET", target, [(b"host", upstream.authority)], nothing())
            try:
                async for read in reply.stream:
                    data += read
                    if len(data) > 1 << 20:
                        return {}
            finally:
                await reply.stream.aclose()
        found = json.loads(data) if reply.status == 200 else {}
    except (TimeoutError, httpx.TransportError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(text: str) -> str:
    """What a server says of itself, fit for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80])


def _last_words(summary: Summary) -> str:
    lines = []
    if summary.broken:
        lines.append("Broken off, and incomplete in the log:")
        lines += [
            f"  {each.id}   {each.endpoint}, {each.reads} reads, {each.bytes} bytes" for each in summary.broken[:SHOWN]
        ]
        if len(summary.broken) > SHOWN:
            lines.append(f"  and {len(summary.broken) - SHOWN} more")
    if not summary.log_closed:
        lines.append("The log was not closed in order: its disk did not take the rest, or a worker was killed.")
    lines.append(
        f"Stopped. {summary.requests} requests, {len(summary.broken)} of them broken off; "
        f"{summary.written} records written, {summary.lost} lost."
    )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
