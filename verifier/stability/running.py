"""Gather what a plan asks for: each arm on its server, one after the other, into the run's folder."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparseety.errors import SparseetyError
from verifier.stability import store
from verifier.stability.drive import Budget, Driver, Limits, Progress, Server
from verifier.stability.model import Fingerprint, Output
from verifier.stability.plan import BASELINE, Key, Plan, Stage, loads_of, stages, to_do
from verifier.stability.prompts import Prompt
from verifier.stability.store import Arm, ArmWriter, Line


@dataclass(frozen=True, slots=True)
class Gathering:
    """A run that is to be gathered, or gathered on."""

    folder: Path
    plan: Plan
    prompts: list[Prompt]
    urls: Mapping[str, str]  # of the arms that are to run now, in this order
    model: str | None
    limits: Limits
    texts: dict[tuple[int, ...], str] | None = None  # is filled with the text of each distinct output


async def gather(gathering: Gathering, progress: Progress) -> None:
    """Raises Stopped, with everything kept that came before, and SparseetyError."""
    plan, loads = gathering.plan, gathering.plan.loads
    highest = max(load for arm in gathering.urls for load in loads_of(arm, loads))
    if highest > gathering.limits.at_once:
        raise SparseetyError(f"{highest} requests at once are more than --max-concurrency {gathering.limits.at_once}")
    budget = Budget(gathering.limits)
    for name, url in gathering.urls.items():
        run = store.load(gathering.folder)
        arm = run.arms.get(name) or Arm(name)
        left = [stage for stage in (to_do(stage, arm.outputs.values()) for stage in stages(plan, name)) if stage.jobs]
        references = forced_references(plan, arm if name == BASELINE else run.arms.get(BASELINE))
        if left or any(not _done(arm, output) for output, _ in references):
            await _arm(gathering, arm, left, url, budget, progress)


async def _arm(gathering: Gathering, arm: Arm, left: list[Stage], url: str, budget: Budget, progress: Progress) -> None:
    plan = gathering.plan
    with ArmWriter(gathering.folder, arm.name) as writer:
        async with Server(url, gathering.limits) as server:
            fingerprint = await server.identity(arm.name, gathering.model, plan)
            same_server(arm.fingerprint, fingerprint)
            writer.write(Line(fingerprint=fingerprint))
            driver = Driver(plan, gathering.prompts, server, fingerprint.model, budget, progress, gathering.texts)
            if left:
                await driver.warm_up(f"{plan.name}-{arm.name}-start")
            for stage in left:
                await driver.stage(stage, arm, writer)
            baseline = arm if arm.name == BASELINE else store.load(gathering.folder).arms.get(BASELINE)
            await driver.force(arm, forced_references(plan, baseline), writer)


def same_server(before: Fingerprint | None, now: Fingerprint) -> None:
    """Raises SparseetyError where an arm would go on with something else than it began with."""
    if before is None:
        return
    names = ("version", "model", "root", "max_model_len")
    if changed := [name for name in names if getattr(before, name) != getattr(now, name)]:
        said = ", ".join(f"{name} {getattr(before, name)} -> {getattr(now, name)}" for name in changed)
        raise SparseetyError(f"arm {now.arm} was begun on another server ({said}); take a new --out")


def forced_references(plan: Plan, baseline: Arm | None) -> list[tuple[Output, list[int]]]:
    """Outputs of the baseline that are fed to every arm, each with the ids of its prompt."""
    if baseline is None:
        return []
    numbers = random.Random(f"{plan.seed} forced").sample(range(plan.prompts), min(plan.forced, plan.prompts))
    outputs = [baseline.outputs.get(Key(number, 0, plan.caches[0])) for number in sorted(numbers)]
    return [
        (output, baseline.inputs[output.prompt])
        for output in outputs
        if output is not None and output.error is None and output.prompt in baseline.inputs
    ]


def _done(arm: Arm, output: Output) -> bool:
    forced = arm.forced.get(output.request_id)
    return forced is not None and forced.error is None
