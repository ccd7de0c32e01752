"""`sparseety diff`: where the outputs of two saved arms part, prompt by prompt."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparseety.command import run_command
from sparseety.errors import SparseetyError
from verifier.stability import render, store
from verifier.stability.analysis import analyse
from verifier.stability.arguments import positive_or_0
from verifier.stability.conclude import arm_facts, decoder, renamed, settings
from verifier.stability.differences import parting
from verifier.stability.model import Output
from verifier.stability.plan import BASELINE, CANDIDATE, Key
from verifier.stability.result import Analysis, Facts
from verifier.stability.store import Arm

_LISTED = 20


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    first, second = _arms(options.first, options.second)
    analysis = _analysis(first, second, options.gate)
    pairs = [
        (output, second.outputs[key]) for key, output in sorted(first.outputs.items()) if _wanted(key, options, second)
    ]
    pairs = [(a, b) for a, b in pairs if a.error is None and b.error is None]
    if not pairs:
        print("no two outputs to compare")
        return 3
    parted = [(a, b) for a, b in pairs if parting(a, b) is not None]
    if options.json:
        comparison = analysis.comparison("candidate")
        names = {a.request_id for a, _ in parted}
        found = [d for d in comparison.differences if d.first in names] if comparison else []
        said = {"pairs": len(pairs), "equal": len(pairs) - len(parted), "differences": found}
        print(msgspec.json.encode(said).decode())
    else:
        _print(pairs, parted, analysis, options)
    return 1 if parted else 0


def _print(
    pairs: list[tuple[Output, Output]],
    parted: list[tuple[Output, Output]],
    analysis: Analysis,
    options: argparse.Namespace,
) -> None:
    decode = decoder(options) if options.show_text else None
    if options.prompt is None:
        comparison = analysis.comparison("candidate")
        print(f"{len(pairs)} pairs: {len(pairs) - len(parted)} equal, {len(parted)} different")
        if comparison and comparison.unpaired:
            print(f"{comparison.unpaired} outputs have no counterpart, or it failed: nothing is said of them")
        differences = sorted(comparison.differences, key=lambda d: (d.prompt, d.repeat)) if comparison else []
        for each in differences[:_LISTED]:
            shift = "" if each.shift is None else f"   shift {each.shift:.2f}"
            ids = f"{_id(each.first_id)} {_id(each.second_id)}"
            print(f"  prompt {each.prompt:<4} token {each.index:<5}{each.kind:<10} {ids}{shift}")
        if len(parted) > _LISTED:
            print(f"  and {len(parted) - _LISTED} more; --json lists all")
        print()
    for first, second in (parted or pairs)[: None if options.prompt is not None else 1]:
        sys.stdout.write(render.diff(first, second, analysis, decode))


def _id(token: int | None) -> str:
    return "(end)" if token is None else str(token)


def _arms(first: str, second: str | None) -> tuple[Arm, Arm]:
    """RUN is arm a1 where it comes first and b where it comes second; RUN:ARM is that arm."""
    if second is None:
        run = _run(first)
        return _arm(run, first, BASELINE), _arm(run, first, CANDIDATE)
    return _named(first, BASELINE), _named(second, CANDIDATE)


def _named(text: str, default: str) -> Arm:
    folder, colon, name = text.rpartition(":")
    if colon and not Path(text).is_dir():
        run = _run(folder)
        if name not in run.arms:
            raise SparseetyError(f"{folder} has no arm {name}; it has: {', '.join(run.arms) or 'none'}")
        return run.arms[name]
    return _arm(_run(text), text, default)


def _arm(run: store.Run, text: str, default: str) -> Arm:
    if default in run.arms:
        return run.arms[default]
    if len(run.arms) == 1:
        return next(iter(run.arms.values()))
    raise SparseetyError(f"{text} has no arm {default}; say which: {text}:NAME, of {', '.join(run.arms) or 'none'}")


def _run(folder: str) -> store.Run:
    return store.load(Path(folder))


def _analysis(first: Arm, second: Arm, gate: Sequence[str]) -> Analysis:
    arms = {BASELINE: renamed(first, BASELINE), CANDIDATE: renamed(second, CANDIDATE)}
    outputs = [output for arm in arms.values() for output in arm.outputs.values()]
    known = {name: arm_facts(arm.fingerprint) for name, arm in arms.items() if arm.fingerprint}
    return analyse(outputs, (), settings(gate), facts=Facts(arms=known))


def _wanted(key: Key, options: argparse.Namespace, second: Arm) -> bool:
    return key in second.outputs and (options.prompt is None or key.prompt == options.prompt)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety diff",
        description="Where the outputs of two saved arms part. A is arm a1 of its run, B is arm b of its run, unless "
        "they are given as RUN:ARM; with one run alone, both are of it.",
        epilog="exit codes: 0 all equal; 1 there are differences; 2 wrong use; 3 nothing to compare",
    )
    parser.add_argument("first", metavar="RUN_A", help="folder of a run, or RUN:ARM")
    parser.add_argument("second", nargs="?", metavar="RUN_B", help="the same")
    parser.add_argument("--prompt", type=positive_or_0, metavar="N", help="show this one, by its place in the file")
    parser.add_argument("--gate", action="append", default=[], metavar="NAME=VALUE", help="as of stability run")
    parser.add_argument("--json", action="store_true", help="one object with all differences")
    parser.add_argument("--show-text", action="store_true", help="show the text too; needs --tokenizer")
    parser.add_argument("--tokenizer", action="append", type=Path, metavar="PATH", help="as of verify-tokens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
