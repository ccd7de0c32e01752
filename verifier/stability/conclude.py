"""From saved runs to a verdict, and to whoever wants to read it."""

import argparse
import os
import random
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace

from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs
from verifier import exports
from verifier.stability import render, store
from verifier.stability.analysis import analyse
from verifier.stability.model import Fingerprint, Output
from verifier.stability.plan import AGAIN, BASELINE, CANDIDATE
from verifier.stability.result import EXIT_CODES, Analysis, ArmFacts, Facts, GateSettings, Precision
from verifier.stability.store import Arm, ArmWriter, Line, Run
from verifier.stability.witness import Evidence, look_up
from verifier.tokenizer import TokenizerShelf

_ROLES = (BASELINE, AGAIN, CANDIDATE)
_SETTLE = 2.0  # seconds: what the last requests left is in the logs by then


def conclude(options: argparse.Namespace, folders: Sequence[Path], broken: str | None) -> int:
    """Print and write the result. broken: why the run stopped; then the exit code is 3 whatever came so far."""
    runs = [store.load(folder) for folder in folders]
    if options.logs:
        witness(runs, options)
    run = joined(runs)
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    analysis = analysed(run, options, broken)
    outputs = [output for arm in run.arms.values() for output in arm.outputs.values()]
    write_files(options, analysis, decoder(options) if options.show_text else None, outputs)
    sys.stdout.write(f"{render.json(analysis).decode().rstrip()}\n" if options.json else render.text(analysis))
    return analysis.verdict.exit_code


def ready(options: argparse.Namespace) -> None:
    """Would the result of a run that takes hours get to whoever waits for it? Raises SparseetyError."""
    settings(options.gate)
    for path in options.logs:
        if not Path(path).is_dir():
            find_logs([path])
    for path in options.tokenizer or []:
        if not path.exists():
            raise SparseetyError(f"{path}: no such tokenizer")
    for path in filter(None, (options.junit, options.prom_textfile, options.html)):
        if path.is_dir() or not path.resolve().parent.is_dir():
            reason = "it is a folder" if path.is_dir() else "there is no such folder"
            raise SparseetyError(f"cannot write {path}: {reason}")


def write_files(
    options: argparse.Namespace, analysis: Analysis, decode: render.Decode | None, outputs: Sequence[Output] = ()
) -> None:
    if options.junit:
        exports.write(options.junit, render.junit(analysis))
    if options.prom_textfile:
        exports.write(options.prom_textfile, render.prometheus(analysis, time.time()))
    if options.html:
        exports.write(options.html, render.html(analysis, decode, outputs))


def analysed(run: Run, options: argparse.Namespace, broken: str | None = None) -> Analysis:
    arms = in_roles(run.arms, options.as_baseline, options.as_candidate, options.as_yardstick)
    outputs = [output for arm in arms.values() for output in arm.outputs.values()]
    forced = [each for arm in arms.values() for each in arm.forced.values()]
    needed = set(_ROLES) | set(arms)
    if options.as_baseline and "," not in options.as_baseline:
        needed.discard(AGAIN)  # that was asked for
    about = facts(run, arms, needed, broken)
    analysis = analyse(outputs, forced, settings(options.gate), options.contract, about)
    return analysis if broken is None else _broken_off(analysis, broken)


def _broken_off(analysis: Analysis, reason: str) -> Analysis:
    """Nothing is concluded from what came before, however much that is: why it stopped may be why it looks well."""
    reasons = [f"the run stopped: {reason}", *analysis.verdict.reasons]
    exit_code = EXIT_CODES["inconclusive"]
    verdict = replace(analysis.verdict, decision="inconclusive", exit_code=exit_code, reasons=reasons)
    return replace(analysis, verdict=verdict)


def joined(runs: Sequence[Run]) -> Run:
    """One run; or the baseline of the first and what the second has beside one."""
    first, *others = runs
    for other in others:
        for name in ("prompts_sha256", "repeats", "loads", "caches", "max_tokens"):
            if getattr(first.plan, name) != getattr(other.plan, name):
                raise SparseetyError(f"{first.folder} and {other.folder} cannot be compared: their {name} differ")
        for name, arm in other.arms.items():
            if name not in (BASELINE, AGAIN):
                if name in first.arms:
                    raise SparseetyError(f"{first.folder} and {other.folder} both have an arm {name}")
                first.arms[name] = arm
        first.notes += other.notes
    return first


def in_roles(
    arms: dict[str, Arm], baseline: str | None, candidate: str | None, yardsticks: Sequence[str] = ()
) -> dict[str, Arm]:
    """The arms under the names by which they are judged. Whoever was in the place of another one is left out."""
    wanted = {name: name for name in _ROLES if name in arms}
    if baseline:
        names = baseline.split(",")
        if len(names) > 2:
            raise SparseetyError(f"--as-baseline {baseline}: one arm, or two that are the same server twice")
        wanted.pop(AGAIN, None)  # of one arm, its repeats are the noise; never another server's outputs
        wanted |= dict(zip((BASELINE, AGAIN), names, strict=False))
    if candidate:
        wanted[CANDIDATE] = candidate
    if yardsticks:
        pairs = [text.rpartition("=")[::2] for text in yardsticks]
        if taken := [name for new, name in pairs if (new or name) in _ROLES]:
            raise SparseetyError(f"--as-yardstick {taken[0]} needs a name of its own: --as-yardstick NAME={taken[0]}")
        wanted |= {new or name: name for new, name in pairs}
    else:
        free = [name for name in arms if name not in _ROLES and name not in wanted.values()]
        wanted |= {name: name for name in free}
    if missing := [name for name in wanted.values() if name not in arms]:
        raise SparseetyError(f"no arm {', '.join(missing)} in this run; it has: {', '.join(arms) or 'none'}")
    return {role: renamed(arms[name], role) for role, name in wanted.items()}


def renamed(arm: Arm, name: str) -> Arm:
    if arm.name == name:
        return arm
    return Arm(
        name,
        {key: replace(output, arm=name) for key, output in arm.outputs.items()},
        {key: replace(forced, arm=name) for key, forced in arm.forced.items()},
        arm.inputs,
        arm.fingerprint,
    )


def settings(pairs: Sequence[str]) -> GateSettings:
    """Raises SparseetyError."""
    values: dict[str, str | None] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in GateSettings.__struct_fields__:
            raise SparseetyError(
                f'--gate "{pair}" is not NAME=VALUE; names: {", ".join(GateSettings.__struct_fields__)}'
            )
        values[name] = None if value == "none" else value
    try:
        return msgspec.convert(values, GateSettings, strict=False)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).partition(" - at `$.")  # Expected `float` < 1.0 - at `$.p0`
        known = f"; one of: {', '.join(get_args(Precision))}" if name.startswith("dtype") else ""
        raise SparseetyError(f"--gate{f' {name}'.rstrip(' `')}: {reason.replace('`', '')}{known}") from None


def facts(run: Run, arms: dict[str, Arm], needed: Collection[str], broken: str | None = None) -> Facts:
    """needed: arms without which there is no verdict."""
    plan = run.plan
    order = list(range(plan.prompts))
    random.Random(f"{plan.seed} order").shuffle(order)
    return Facts(
        run=plan.name,
        planned=plan.cells * len(needed),
        order=order,
        arms={name: arm_facts(arm.fingerprint) for name, arm in arms.items() if arm.fingerprint is not None},
        notes=[*run.notes, *([f"the run stopped: {broken}"] if broken else [])],
    )


def arm_facts(fingerprint: Fingerprint) -> ArmFacts:
    engine = fingerprint.engine
    flags = {"root": fingerprint.root, "max_model_len": fingerprint.max_model_len}
    if engine is not None:
        flags |= {"model": engine.model, "attention": ", ".join(engine.attention), "block_size": engine.block_size}
        flags["batch_invariant"] = engine.batch_invariant
    version = engine.vllm if engine else fingerprint.version
    return ArmFacts(
        model=fingerprint.model,
        tokenizer=engine.tokenizer_sha256 if engine else None,
        dtype=engine.dtype if engine else None,
        engine=f"vllm {version}" if version else None,
        parameters={name: str(value) for name, value in fingerprint.parameters.items()},
        flags={name: str(value) for name, value in flags.items() if value is not None and value != ""},
    )


# ------------------------------------------------------------------------------------------------------ the logs


def witness(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Look up every output in the logs, and keep in the run what they say."""
    outputs = [output for run in runs for arm in run.arms.values() for output in arm.outputs.values()]
    given = options.tokenizer or [Path(p) for p in [os.environ.get("SPARSEETY_VERIFY_TOKENIZER")] if p]
    evidence = _looked_up(outputs, options.logs, TokenizerShelf(given), options.jobs)
    for run in runs:
        for arm in run.arms.values():
            _add(run, arm, evidence)


def _looked_up(outputs: list[Output], logs: list[str], shelf: TokenizerShelf, jobs: int | None) -> Evidence:
    """Programs that are still running write their last lines a little later: then once more."""
    evidence = look_up(outputs, find_logs(logs), shelf, jobs)
    unsettled = [each for each in evidence.checked.values() if each.verdict in (None, "open", "incomplete")]
    if unsettled or any(output.request_id not in evidence.checked for output in outputs if output.error is None):
        time.sleep(_SETTLE)
        evidence = look_up(outputs, find_logs(logs), shelf, jobs)
    return evidence


def _add(run: Run, arm: Arm, evidence: Evidence) -> None:
    known = {o.request_id: (o.verdict, o.served, o.epoch) for o in arm.outputs.values()}
    found = [evidence.checked[id_] for id_ in known if id_ in evidence.checked]
    new = [each for each in found if known[each.request_id] != (each.verdict, each.served, each.epoch)]
    lines = [Line(checked=each) for each in new]
    engine = evidence.engines.get(arm.name)
    if arm.fingerprint is not None and engine is not None and arm.fingerprint.engine != engine:
        lines.append(Line(fingerprint=replace(arm.fingerprint, engine=engine)))
    if not lines:
        return
    with ArmWriter(run.folder, arm.name) as writer:
        for line in lines:
            writer.write(line)
            arm.take(line)
    arm.check(new)


def decoder(options: argparse.Namespace) -> render.Decode:
    """Raises SparseetyError where no tokenizer is given."""
    if not options.tokenizer:
        raise SparseetyError("--show-text makes text of ids: give --tokenizer too")
    tokenizer = TokenizerShelf(options.tokenizer).find("", None)
    return lambda ids: tokenizer.text(list(ids))
