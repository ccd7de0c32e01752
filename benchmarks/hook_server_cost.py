"""Tokens a second of a real vLLM with the plugin switched on and off by turns, in one server by its control file.

    SPARSEETY_TEST_VLLM=… SPARSEETY_TEST_MODEL=… python -m benchmarks.hook_server_cost [--rounds 12] [--capture tokens]

Off, vLLM has its own methods back. Each round measures both, which first by turns; its ratio is on / off, and the
interval is a bootstrap of the rounds' mean ratio. Needs a quiet machine; says how busy it was.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from tests.vllm_server import serve

AT_ONCE, TOKENS = 5, 64
PROMPTS = ["Why is the sky blue?", "Tell me a story about a fox.", "Explain what a prime number is."]


async def tokens_a_second(url: str, requests: int) -> float:
    limit = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def one(number: int) -> None:
            body = {"model": "m", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS, "ignore_eos": True}
            async with limit:
                reply = await client.post("/v1/completions", json=body | {"temperature": 0})
                assert reply.status_code == 200, reply.text

        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(requests)))
    return requests * TOKENS / (time.perf_counter() - began)


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the mean, by bootstrap."""
    chance = random.Random(7)
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return means[250], means[9750]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=20, help="of one measurement; 5 at once, 64 tokens each")
    parser.add_argument("--capture", default="tokens")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        control = folder / "control.json"
        hook = {"SPARSEETY_HOOK_CONTROL": str(control), "SPARSEETY_HOOK_CAPTURE": arguments.capture}
        with serve(folder, hook_dir=folder / "logs", hook=hook) as server:
            measured: dict[bool, list[float]] = {True: [], False: []}

            def measure(on: bool) -> None:
                control.write_text(json.dumps({"on": on}))
                time.sleep(1.5)  # it looks once a second
                measured[on].append(asyncio.run(tokens_a_second(server.url, arguments.requests)))

            asyncio.run(tokens_a_second(server.url, arguments.requests))  # warm
            for number in range(arguments.rounds):
                for on in (True, False) if number % 2 else (False, True):
                    measure(on)
                print(
                    f"round {number + 1}: off {measured[False][-1]:.1f}, on {measured[True][-1]:.1f} tokens/s",
                    flush=True,
                )
            logs = len(list((folder / "logs").iterdir()))
    ratios = [on / off for on, off in zip(measured[True], measured[False], strict=True)]
    low, high = interval(ratios)
    print(
        f"off {statistics.median(measured[False]):.1f}, on {statistics.median(measured[True]):.1f} tokens/s (medians)"
    )
    print(f"on / off: {statistics.fmean(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}, {len(ratios)} rounds")
    print(f"{logs} logs were written; load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
