"""`sparseety stability single N`: the same prompt N times, and how many distinct outputs come of it."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparseety.command import positive
from sparseety.errors import SparseetyError
from verifier.stability import prompts as prompt_files
from verifier.stability import render, store
from verifier.stability.analysis import analyse
from verifier.stability.arguments import at_least_2, caches, gate, limits, numbers, outputs, witnesses
from verifier.stability.conclude import facts, ready, settings, witness, write_files
from verifier.stability.drive import Stopped
from verifier.stability.plan import BASELINE, Plan
from verifier.stability.progress import StageProgress
from verifier.stability.prompts import Message, Prompt
from verifier.stability.result import Analysis
from verifier.stability.running import Gathering, gather


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repeats", type=positive, metavar="N", help="times, at each load and cache state")
    parser.add_argument("--url", required=True, metavar="URL", help="the server, or a proxy before it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="as the one message of a chat")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="its first prompt, see docs/stability.md")
    parser.add_argument("--model", metavar="NAME", help="as requests name it (default: the first one served)")
    parser.add_argument("--concurrency", type=numbers, default=[1], metavar="N,...", help="(default 1)")
    parser.add_argument("--cache", type=caches, default=["cold"], metavar="cold,warm", help="(default cold)")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of each output (default 256)")
    parser.add_argument("--top-logprobs", type=at_least_2, default=5, metavar="N", help="(default 5)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the run there (default: it is not kept)")
    limits(parser)
    witnesses(parser)
    gate(parser)
    outputs(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    ready(options)
    if options.out:
        return _in(options.out, options)
    with tempfile.TemporaryDirectory(prefix="stability-") as folder:
        return _in(Path(folder) / "run", options)


def _in(folder: Path, options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    wanted = Plan(
        name=secrets.token_hex(4),
        prompts_sha256=prompt_files.sha256([prompt]),
        prompts=1,
        repeats=options.repeats,
        loads=options.concurrency,
        caches=options.cache,
        max_tokens=options.max_tokens,
        top=options.top_logprobs,
        forced=0,
        seed=0,
    )
    texts: dict[tuple[int, ...], str] = {}
    plan = store.begin(folder, wanted, [prompt])
    urls = {BASELINE: options.url}
    broken: str | None = None
    try:
        gathering = Gathering(folder, plan, [prompt], urls, options.model, options.limits(options), texts)
        asyncio.run(gather(gathering, StageProgress(wanted=not options.quiet)))
    except Stopped as reason:
        broken = str(reason)
        print(f"stopped: {broken}", file=sys.stderr)
    loaded = store.load(folder)
    if options.logs:
        witness([loaded], options)
    arm = loaded.arms[BASELINE]
    ended = list(arm.outputs.values())
    about = facts(loaded, {BASELINE: arm}, {BASELINE}, broken)
    analysis = analyse(ended, (), settings(options.gate), options.contract, about)

    def decode(ids: Sequence[int]) -> str:
        """The text that came with these ids; outputs of an earlier call are known by their ids alone."""
        return texts.get(tuple(ids), "(its text was not kept)")

    write_files(options, analysis, None)
    if options.json:
        sys.stdout.write(f"{render.json(analysis).decode().rstrip()}\n")
    else:
        sys.stdout.write(render.single(analysis, ended, decode if options.show_text else None))
    return 3 if broken else exit_code(analysis, options.contract == "bitwise")


def exit_code(analysis: Analysis, bitwise: bool) -> int:
    """A healthy server parts at ties: only what no tie explains is a failure, unless bitwise equality was asked for."""
    found = next((each for each in analysis.repeats if each.arm == BASELINE and each.prompts), None)
    if found is None:
        return 3
    if found.hard_forks or (bitwise and found.trees):
        return 1
    return 3 if found.unknown_forks or not analysis.valid else 0  # too many failed, or a stream was not right


def _prompt(options: argparse.Namespace) -> Prompt:
    if options.prompts:
        return prompt_files.load(options.prompts)[0]
    if not options.prompt:
        raise SparseetyError("--prompt is empty")
    return Prompt(messages=[Message("user", options.prompt)])
