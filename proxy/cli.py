"""The command `sparseety-proxy`."""

import asyncio
import logging
import os
import signal
import sys
import time

import uvloop
from prometheus_client import CollectorRegistry

import sparseety
from proxy.config import ProxyConfig, read_config
from proxy.service import Service, Summary
from sparseety.clock import monotonic_clock
from sparseety.command import run_command
from sparseety.records import FORMAT_VERSION


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    started = time.monotonic()
    config = read_config(argv, os.environ)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    service = Service(config, clock=monotonic_clock(), registry=CollectorRegistry())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(_serve(service, config, started))
    _say(_summary_line(summary))
    return 0


async def _serve(service: Service, config: ProxyConfig, started: float) -> Summary:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    _say(_banner(service, config, await service.upstream.trouble()))

    def on_ready() -> None:
        seconds = time.monotonic() - started
        _say(f"Ready in {seconds:.1f} s. Press Ctrl-C to drain and stop ({config.drain_seconds:g} s).")

    def on_drain(open_requests: int) -> None:
        if open_requests:
            _say(f"Draining: {open_requests} requests are open. Press Ctrl-C again to break them off.")

    return await service.run(stop, hurry, on_ready, on_drain)


def _banner(service: Service, config: ProxyConfig, trouble: str | None) -> str:
    state = f"not usable yet ({trouble}); the proxy serves on, /readyz is 503" if trouble else "up"
    reach = "(loopback only)" if service.listen.loopback else "(other machines can connect)"
    lines = [
        f"SparSEEty proxy {sparseety.__version__}    capture format {FORMAT_VERSION}",
        f"  listen     http://{service.listen}   {reach}",
        f"  upstream   {config.upstream}   {state}",
        f"  capture    {service.writer.path}   REPLY TEXT (content!), all requests to /v1/chat/completions"
        " and /v1/completions",
        f"  admin      http://{service.admin}   /healthz /readyz /metrics   (on the other port all paths are the"
        " upstream's)",
        f"  retention  {service.writer.rotation}",
        " ! clients keep their own API keys; they are passed on and never written",
    ]
    if config.allow_remote:
        lines.append(" ! --allow-remote: whoever can reach these ports can use them; no password is asked for")
    return "\n".join(lines)


def _summary_line(summary: Summary) -> str:
    return (
        f"Stopped. {summary.requests} requests, {summary.aborted} of them broken off; "
        f"{summary.written} records written, {summary.lost} lost."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
