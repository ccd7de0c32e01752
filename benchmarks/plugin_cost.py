"""What the plugin costs a real vLLM, in tokens a second: on and off by turns, in one server, by its control file.

    SPARSEETY_TEST_VLLM=… SPARSEETY_TEST_MODEL=… python -m benchmarks.plugin_cost [--on tokens,sparsity] [--off tokens]

Off, vLLM has its own methods back. All is measured in the same processes on the same cores, in short blocks of
decoding: off on on off, then on off off on, so that what grows slowly falls on both sides. A round is four blocks; its
ratio is on / off, and the interval is of the mean ratio, by Student's t over the rounds' logarithms. Beside tokens/s,
the CPU time of the server's processes for each token: a neighbour on the machine disturbs it less. Linux.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.vllm_server import VllmServer, serve

PROMPTS = ["Why is the sky blue?", "Tell me a story about a fox.", "Explain what a prime number is.", "Count to 100."]
SWITCH_SECONDS = 2.5  # the control file is looked at once a second, by the engine and by each worker
# Student's t, two-sided 95 %, by degrees of freedom; beyond, the next smaller one is on the safe side.
T = {1: 12.71, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 23: 2.069, 29: 2.045}


@dataclass(frozen=True)
class Block:
    rate: float  # tokens a second
    cpu: float  # CPU seconds a token, of all of the server's processes


async def decode(url: str, at_once: int, tokens: int) -> None:
    """Requests that begin together and all have as many tokens: next to nothing but decoding, at one batch size."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def one(number: int) -> None:
            body = {"model": "m", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": tokens, "ignore_eos": True}
            reply = await client.post("/v1/completions", json=body | {"temperature": 0})
            assert reply.status_code == 200, reply.text

        await asyncio.gather(*(one(number) for number in range(at_once)))


def cpu_seconds(group: int) -> float:
    """User and system time of a process group, threads included."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(server: VllmServer, control: Path, content: dict[str, object], at_once: int, tokens: int) -> Block:
    new = control.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(control)
    time.sleep(SWITCH_SECONDS)
    asyncio.run(decode(server.url, at_once, 4))  # workers switch at their next step
    cpu, began = cpu_seconds(server.process.pid), time.perf_counter()
    asyncio.run(decode(server.url, at_once, tokens))
    took = time.perf_counter() - began
    return Block(at_once * tokens / took, (cpu_seconds(server.process.pid) - cpu) / (at_once * tokens))


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(mean, low, high), geometric."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = max(known for known in T if known <= len(logs) - 1)
    half = T[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def report(name: str, on: list[float], off: list[float]) -> None:
    ratios = [mine / theirs for mine, theirs in zip(on, off, strict=True)]
    mean, low, high = interval(ratios)
    print(f"{name}: off {statistics.median(off):.4g}, on {statistics.median(on):.4g} (medians of rounds)")
    print(f"{name}: on / off {mean:.4f}, 95 % interval {low:.4f} to {high:.4f}, {len(ratios)} rounds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="tokens", help="what is recorded when on, as in SPARSEETY_HOOK_CAPTURE")
    parser.add_argument("--off", default="", help="and when off; default: nothing, the plugin is switched off")
    parser.add_argument("--rounds", type=int, default=16, help="of four blocks each")
    parser.add_argument("--at-once", type=int, default=5, help="requests of a block")
    parser.add_argument("--tokens", type=int, default=128, help="of a request")
    parser.add_argument("--compiled", action="store_true", help="without --enforce-eager")
    arguments = parser.parse_args()
    states: dict[bool, dict[str, object]] = {
        True: {"capture": arguments.on.split(",")},
        False: {"capture": arguments.off.split(",")} if arguments.off else {"on": False},
    }
    rounds: dict[bool, list[list[Block]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        control = folder / "control.json"
        hook = {"SPARSEETY_HOOK_CONTROL": str(control), "SPARSEETY_HOOK_CAPTURE": arguments.on}
        more = ("--no-enforce-eager",) if arguments.compiled else ()
        with serve(folder, hook_dir=folder / "logs", hook=hook, arguments=more) as server:
            asyncio.run(decode(server.url, arguments.at_once, arguments.tokens))  # warm
            load = os.getloadavg()[0]
            for number in range(arguments.rounds):
                blocks: dict[bool, list[Block]] = {True: [], False: []}
                first = bool(number % 2)
                for on in (first, not first, not first, first):
                    blocks[on].append(measure(server, control, states[on], arguments.at_once, arguments.tokens))
                for on in (True, False):
                    rounds[on].append(blocks[on])
                on_rate, off_rate = (statistics.fmean(block.rate for block in blocks[on]) for on in (True, False))
                print(f"round {number + 1}: off {off_rate:.1f}, on {on_rate:.1f} tokens/s", flush=True)
            logs = len(list((folder / "logs").iterdir()))
    for what in ("rate", "cpu"):
        on_values, off_values = (
            [statistics.fmean(getattr(block, what) for block in blocks) for blocks in rounds[on]]
            for on in (True, False)
        )
        report({"rate": "tokens/s", "cpu": "CPU s/token"}[what], on_values, off_values)
    print(f"{logs} logs were written; load of the machine at the start: {load:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
