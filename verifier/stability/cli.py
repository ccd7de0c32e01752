"""The commands `sparseety stability` and `sparseety diff`."""

import argparse
import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sparseety.command import positive, run_command
from sparseety.errors import SparseetyError
from verifier.output import printable
from verifier.stability import overhead, same_prompt, store
from verifier.stability import prompts as prompt_files
from verifier.stability.arguments import (
    at_least_2,
    caches,
    gate,
    limits,
    named_url,
    numbers,
    outputs,
    positive_or_0,
    roles,
    witnesses,
)
from verifier.stability.conclude import conclude, decoder, ready
from verifier.stability.drive import Stopped
from verifier.stability.plan import AGAIN, BASELINE, CANDIDATE, Plan
from verifier.stability.progress import StageProgress
from verifier.stability.running import Gathering, gather

_REASONS = 3
_EPILOG = """\
exit codes: 0 accept; 1 reject; 2 wrong use; 3 inconclusive: too little, too noisy, or broken off (what came is kept);
70 a bug; 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety stability",
        description="Does a changed server still run the same model? Its outputs are compared with the noise that the "
        "unchanged one has with itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="run|compare|single|overhead")
    run = commands.add_parser("run", help="ask both servers, keep what they say, and give the verdict")
    _run_arguments(run)
    run.set_defaults(run=_run)
    compare = commands.add_parser("compare", help="the verdict on runs that are there")
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; a second one: b is there")
    compare.set_defaults(run=_compare)
    same_prompt.add_arguments(commands.add_parser("single", help="the same prompt N times: how many distinct outputs?"))
    overhead.add_arguments(commands.add_parser("overhead", help="what a switch costs: the same requests, off and on"))
    for command in (run, compare):
        witnesses(command)
        roles(command)
        gate(command)
        outputs(command)
    return parser


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the run; given again, it goes on")
    servers = parser.add_argument_group("servers (give those that are up; a run goes on with the others later)")
    servers.add_argument("--baseline", metavar="URL", help="arms a1 and a2: the same server twice, under other load")
    servers.add_argument("--candidate", metavar="URL", help="arm b")
    servers.add_argument(
        "--yardstick",
        action="append",
        type=named_url,
        default=[],
        metavar="NAME=URL",
        help="one more arm: a change known to be acceptable, or another candidate; may be given again",
    )
    servers.add_argument("--only", metavar="ARM,...", help="run these arms alone")
    servers.add_argument("--model", metavar="NAME", help="as requests name it (default: the first one served)")
    plan = parser.add_argument_group("what is asked")
    plan.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines (default: a mixed set that ships)")
    plan.add_argument("--first", type=positive, metavar="N", help="take N of the prompts, evenly spread over the file")
    plan.add_argument("-n", "--repeats", type=positive, default=1, metavar="N", help="of each prompt (default 1)")
    plan.add_argument(
        "--concurrency",
        type=numbers,
        default=[8],
        metavar="N,...",
        help="requests at once (default 8); a2 takes turns, or half",
    )
    plan.add_argument(
        "--cache", type=caches, default=["cold"], metavar="cold,warm", help="states of the prefix cache (default cold)"
    )
    plan.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of each output (default 256)")
    plan.add_argument(
        "--top-logprobs", type=at_least_2, default=5, metavar="N", help="alternatives at each position (default 5)"
    )
    plan.add_argument(
        "--teacher-forcing",
        type=positive_or_0,
        default=16,
        metavar="N",
        help="prompts whose baseline output is fed to each arm (default 16)",
    )
    plan.add_argument("--seed", type=int, default=0, metavar="N", help="of the order (default 0)")
    limits(parser)
    parser.add_argument(
        "--gather", action="store_true", help="no verdict: 0 if everything that was asked for is there, else 3"
    )


def _run(options: argparse.Namespace) -> int:
    ready(options)
    if options.show_text:
        decoder(options)
    prompts = prompt_files.some(prompt_files.load(options.prompts), options.first)
    wanted = Plan(
        name=secrets.token_hex(4),
        prompts_sha256=prompt_files.sha256(prompts),
        prompts=len(prompts),
        repeats=options.repeats,
        loads=options.concurrency,
        caches=options.cache,
        max_tokens=options.max_tokens,
        top=options.top_logprobs,
        forced=options.teacher_forcing,
        seed=options.seed,
    )
    urls = _urls(options)
    plan = store.begin(options.out, wanted, prompts)
    gathering = Gathering(options.out, plan, prompts, urls, options.model, options.limits(options))
    if not options.quiet:
        print(banner(plan, len(urls)), file=sys.stderr)
    broken: str | None = None
    try:
        asyncio.run(gather(gathering, StageProgress(wanted=not options.quiet)))
    except Stopped as reason:
        broken = str(reason)
        print(f"stopped: {broken}; what came is in {options.out}, and the same command goes on", file=sys.stderr)
    if options.gather:
        return _gathered(options.out, list(urls), broken)
    return conclude(options, [options.out], broken)


def banner(plan: Plan, arms: int) -> str:
    states = f"{len(plan.loads)} loads x {len(plan.caches)} cache states"
    asked = f"{plan.prompts} prompts x {plan.repeats} repeats x {arms} arms x {states}"
    return f"stability run {plan.name}: {asked} = {plan.cells * arms} requests, but for those that are there"


def _gathered(folder: Path, arms: list[str], broken: str | None) -> int:
    run = store.load(folder)
    missing = {name: run.plan.cells - sum(o.error is None for o in run.arms[name].outputs.values()) for name in arms}
    for name, count in missing.items():
        print(f"{name}: {run.plan.cells - count} of {run.plan.cells} outputs are there")
        for reason, failed in Counter(o.error for o in run.arms[name].outputs.values() if o.error).most_common(
            _REASONS
        ):
            print(f"  {failed} x {printable(reason or '')}")
    return 3 if broken or any(missing.values()) else 0


def _compare(options: argparse.Namespace) -> int:
    return conclude(options, options.runs, None)


def _urls(options: argparse.Namespace) -> dict[str, str]:
    urls: dict[str, str] = {}
    if options.baseline:
        urls |= {BASELINE: options.baseline, AGAIN: options.baseline}
    if options.candidate:
        urls[CANDIDATE] = options.candidate
        if options.candidate == options.baseline:
            print("note: --baseline and --candidate are one server: it is compared with itself", file=sys.stderr)
    for name, url in options.yardstick:
        if name in urls:
            raise SparseetyError(f'the arm "{name}" is named twice')
        urls[name] = url
    if options.only:
        wanted = options.only.split(",")
        if unknown := [name for name in wanted if name not in urls]:
            raise SparseetyError(f"--only {','.join(unknown)}: no URL is given for it")
        urls = {name: url for name, url in urls.items() if name in wanted}
    if not urls:
        raise SparseetyError("no server to ask: give --baseline, --candidate or --yardstick")
    return urls


if __name__ == "__main__":
    sys.exit(main())
