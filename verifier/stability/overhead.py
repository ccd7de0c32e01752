"""`sparseety stability overhead`: what a switch costs. The same requests, in turns, on a server without it and one with
it: capture off and on, or sparse off and on. Faster is not the same as sparser; this measures the first.
"""

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from sparseety.command import positive
from sparseety.errors import SparseetyError
from verifier.stability import prompts as prompt_files
from verifier.stability import store
from verifier.stability.arguments import limits
from verifier.stability.cost import arm_result
from verifier.stability.drive import Budget, Driver, Server, Stopped
from verifier.stability.intervals import median_limits
from verifier.stability.memory import Watch
from verifier.stability.plan import Job, Key, Plan, Stage, shuffled
from verifier.stability.progress import StageProgress
from verifier.stability.result import Estimate, GateSettings
from verifier.stability.store import Arm, ArmWriter, Line, Round

OFF, ON = "off", "on"
_ROUNDS = 6  # the least of which the smallest and the largest bound the median with 95 %


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """With the switch on, in units of without it. None: too few requests, or nothing says it."""

    requests: int  # that ended well, of both
    failed: int
    ttft: Estimate | None
    tpot: Estimate | None
    throughput: Estimate | None  # output tokens a second, all requests together
    memory_off: int | None  # most resident bytes seen
    memory_on: int | None
    same_ids: int  # requests that gave the same ids on both
    pairs: int
    notes: list[str] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--off", required=True, metavar="URL", help="the server without what is measured")
    parser.add_argument("--on", required=True, metavar="URL", help="the server with it")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the run; given again, it goes on")
    parser.add_argument("--model", metavar="NAME", help="as requests name it (default: the first one served)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines (default: a mixed set that ships)")
    parser.add_argument("--first", type=positive, metavar="N", help="take N of the prompts, evenly spread")
    parser.add_argument(
        "-n", "--rounds", type=positive, default=_ROUNDS, metavar="N", help=f"of all prompts (default {_ROUNDS})"
    )
    parser.add_argument("--concurrency", type=positive, default=8, metavar="N", help="requests at once (default 8)")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of each output (default 128)")
    parser.add_argument(
        "--max-slowdown",
        type=float,
        metavar="X",
        help="fail (1) where TTFT, TPOT or 1/throughput is proven to exceed X times without it, and say nothing (3) "
        "where it may or may not",
    )
    for name in (OFF, ON):
        parser.add_argument(f"--{name}-pid", type=positive, metavar="PID", help="its process, to watch its memory")
    limits(parser)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    prompts = prompt_files.some(prompt_files.load(options.prompts), options.first)
    wanted = Plan(
        name=secrets.token_hex(4),
        prompts_sha256=prompt_files.sha256(prompts),
        prompts=len(prompts),
        repeats=options.rounds,
        loads=[options.concurrency],
        caches=["cold"],
        max_tokens=options.max_tokens,
        top=0,
        forced=0,
        seed=0,
    )
    plan = store.begin(options.out, wanted, prompts)
    broken: str | None = None
    try:
        asyncio.run(_gather(options, plan, prompts))
    except Stopped as reason:
        broken = str(reason)
        print(f"stopped: {broken}; what came is in {options.out}, and the same command goes on", file=sys.stderr)
    arms = store.load(options.out).arms
    found = compare({name: arms.get(name) or Arm(name) for name in (OFF, ON)}, broken)
    print(msgspec.json.encode(found).decode() if options.json else "\n".join(lines(found)))
    return 3 if broken else exit_code(found, options.max_slowdown)


# ------------------------------------------------------------------------------------------------------- gathering


class _Side(NamedTuple):
    arm: Arm
    writer: ArmWriter
    driver: Driver
    watch: Watch


async def _gather(options: argparse.Namespace, plan: Plan, prompts: list[prompt_files.Prompt]) -> None:
    """Rounds in turns, each time the other one first, so that what drifts meets both alike."""
    loaded, limits_ = store.load(options.out), options.limits(options)
    budget, progress = Budget(limits_), StageProgress(wanted=not options.quiet)
    if options.concurrency > limits_.at_once:
        raise SparseetyError(f"{options.concurrency} at once are more than --max-concurrency {limits_.at_once}")
    async with AsyncExitStack() as stack:
        sides: list[_Side] = []
        for name, url, pid in ((OFF, options.off, options.off_pid), (ON, options.on, options.on_pid)):
            arm = loaded.arms.get(name) or Arm(name)
            writer = stack.enter_context(ArmWriter(options.out, name))
            server = await stack.enter_async_context(Server(url, limits_))
            fingerprint = await server.identity(name, options.model, plan)
            writer.write(Line(fingerprint=fingerprint))
            driver = Driver(plan, prompts, server, fingerprint.model, budget, progress)
            sides.append(_Side(arm, writer, driver, Watch(server, pid)))
            await driver.warm_up(f"{plan.name}-{name}-start")
        for number in range(plan.repeats):
            for side in sides if number % 2 == 0 else reversed(sides):
                await _round(plan, number, side)


async def _round(plan: Plan, number: int, side: _Side) -> None:
    """One that broke off is asked again as a whole: its throughput would be of a part."""
    if any(each.number == number for each in side.arm.rounds):
        return
    load = plan.loads[0]
    keys = shuffled([Key(prompt, number, "cold") for prompt in range(plan.prompts)], plan, f"round {number}")
    stage = Stage(side.arm.name, load, "cold", [Job(side.arm.name, key, load) for key in keys])
    begin = time.monotonic()
    async with side.watch:
        await side.driver.stage(stage, side.arm, side.writer)
    tokens = sum(len(side.arm.outputs[key].ids) for key in keys)
    line = Line(
        round=Round(
            number=number,
            seconds=round(time.monotonic() - begin, 6),
            tokens=tokens,
            failed=sum(side.arm.outputs[key].error is not None for key in keys),
            memory=side.watch.most,
            memory_of=side.watch.what,
        )
    )
    side.arm.take(line)
    side.writer.write(line)


# -------------------------------------------------------------------------------------------------------- the sums


def compare(arms: Mapping[str, Arm], broken: str | None = None) -> Overhead:
    """Pure."""
    off, on = arms[OFF], arms[ON]
    settings = GateSettings()
    result = arm_result(ON, list(on.outputs.values()), list(off.outputs.values()), settings)
    pairs = [
        (output, on.outputs[key])
        for key, output in off.outputs.items()
        if key in on.outputs and output.error is None and on.outputs[key].error is None
    ]
    rates = {name: {r.number: r.tokens / r.seconds for r in arm.rounds if not r.failed} for name, arm in arms.items()}
    ratios = [rates[ON][n] / rates[OFF][n] for n in sorted(rates[OFF].keys() & rates[ON].keys()) if rates[OFF][n]]
    ended = [output for arm in (off, on) for output in arm.outputs.values()]
    failed = sum(output.error is not None for output in ended)
    notes = [f"the run stopped: {broken}"] if broken else []
    if len(ratios) < _ROUNDS:
        notes.append(f"{len(ratios)} whole rounds: from {_ROUNDS} on there is an interval of the throughput")
    what = sorted({each.memory_of for arm in (off, on) for each in arm.rounds if each.memory_of})
    notes += [f"memory: {each}" for each in what]
    return Overhead(
        requests=len(ended) - failed,
        failed=failed,
        ttft=result.ttft_ratio,
        tpot=result.tpot_ratio,
        throughput=_estimate(ratios, settings.confidence),
        memory_off=_most(off.rounds),
        memory_on=_most(on.rounds),
        same_ids=sum(a.ids == b.ids for a, b in pairs),
        pairs=len(pairs),
        notes=notes,
    )


def _estimate(ratios: Sequence[float], confidence: float) -> Estimate | None:
    if not ratios:
        return None
    low, high = median_limits(ratios, confidence)
    return Estimate(value=median(ratios), low=low, high=high, method="order statistics of ratios by round")


def _most(rounds: Sequence[Round]) -> int | None:
    return max((each.memory for each in rounds if each.memory is not None), default=None)


def exit_code(found: Overhead, most: float | None) -> int:
    """3 where nothing was measured, or it cannot be told whether the bound holds."""
    estimates = [found.ttft, found.tpot, _inverse(found.throughput)]
    if any(each is None or each.value is None for each in estimates) or found.failed:
        return 3
    if most is None:
        return 0
    known = [each for each in estimates if each is not None]
    if any(each.low is not None and each.low > most for each in known):
        return 1
    return 0 if all(each.high is not None and each.high <= most for each in known) else 3


def _inverse(estimate: Estimate | None) -> Estimate | None:
    """A throughput as a slowdown."""
    if estimate is None or not estimate.value:
        return None
    low, high = estimate.low, estimate.high
    return Estimate(
        value=1 / estimate.value, low=1 / high if high else None, high=1 / low if low else None, method=estimate.method
    )


def lines(found: Overhead) -> list[str]:
    """For a terminal."""
    memory = None
    if found.memory_off and found.memory_on:
        memory = (
            f"{found.memory_on / found.memory_off:.3f}   {found.memory_off >> 20} MiB -> {found.memory_on >> 20} MiB"
        )
    return [
        "with it on, in units of without it (median, 95 %):",
        f"  TTFT        {_told(found.ttft)}",
        f"  TPOT        {_told(found.tpot)}",
        f"  throughput  {_told(found.throughput)}",
        f"  memory      {memory or 'not known'}",
        f"  same ids    {found.same_ids} of {found.pairs} requests",
        f"{found.requests} requests, {found.failed} failed",
        *(f"note: {note}" for note in found.notes),
    ]


def _told(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "not known"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}   (too few for an interval)"
    return f"{estimate.value:.3f}   ({estimate.low:.3f} to {estimate.high:.3f})"
