"""The command `sparseety sparsity`: count on a transformers model, or report what vLLM's workers have counted."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sampler_hook.sparsity_settings import NEAR_ZERO, near_zero
from sparseety.clock import monotonic_clock
from sparseety.command import run_command
from sparseety.errors import SparseetyError
from sparseety.logreader import LogProblem, find_logs, read_log
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Scope
from sparseety.sparsity import SparsityTable

CSV = "sparsity_report.csv"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return run_command(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety sparsity",
        description="Zeros among a model's activations, by layer and phase. A zero is no proof that work was skipped.",
    )
    commands = parser.add_subparsers(required=True, metavar="report|run")
    report = commands.add_parser("report", help="add up what vLLM's workers (or `run`) wrote into logs")
    report.add_argument("paths", nargs="+", metavar="PATH", help="folder, file or glob")
    report.set_defaults(run=_report)
    run = commands.add_parser("run", help="run prompts through a Hugging Face model, and count")
    run.add_argument("model", metavar="MODEL", help="folder, or name of a repository")
    run.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given again")
    run.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens to generate (default 32)")
    run.add_argument("--near-zero", default=str(NEAR_ZERO), metavar="X", help=f"threshold (default {NEAR_ZERO:g})")
    run.add_argument("--per-token", action="store_true", help="write counts of single tokens into the log")
    run.add_argument("--dtype", default="auto", metavar="NAME", help="of the weights, as torch calls it (default auto)")
    run.add_argument("--logs", metavar="FOLDER", help="keep the records there")
    run.set_defaults(run=_run)
    for command in (report, run):
        command.add_argument("--csv", default=CSV, metavar="FILE", help=f"the table (default {CSV})")
    return parser


def _report(arguments: argparse.Namespace) -> int:
    table = SparsityTable()
    for path in find_logs(arguments.paths):
        table.add_log(record for _, record in read_log(path, _say))
    if not table.counts:
        raise SparseetyError(
            f"{' '.join(arguments.paths)}: no log of a worker that counts sparsity; "
            "was vLLM started with SPARSEETY_HOOK_DIR and SPARSEETY_HOOK_CAPTURE=tokens,sparsity?"
        )
    return _tell(table, arguments.csv)


def _run(arguments: argparse.Namespace) -> int:
    threshold = near_zero(arguments.near_zero)
    model, tokenizer = _load(arguments.model, arguments.dtype)
    records: list[AnyRecord] = []
    _generate(model, tokenizer, arguments, threshold, records)
    if arguments.logs:
        writer = LogWriter(Path(arguments.logs), "worker", Scope(), clock=monotonic_clock())
        with closing(writer):
            for record in records:
                writer.put(record)
        print(f"records: {writer.path}", file=sys.stderr)
    table = SparsityTable()
    table.add_log(records)
    return _tell(table, arguments.csv)


def _load(name: str, dtype: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise SparseetyError(
            f"this needs torch and transformers ({error}); `sparseety sparsity report` does not"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model.eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SparseetyError(f"{name} cannot be loaded: {error}") from None


def _generate(
    model: Any, tokenizer: Any, arguments: argparse.Namespace, threshold: float, records: list[AnyRecord]
) -> None:
    import torch

    from sampler_hook.transformers_hooks import observe

    with (
        torch.inference_mode(),
        observe(model, records.append, threshold=threshold, per_token=arguments.per_token) as observation,
    ):
        for prompt in arguments.prompt:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            if not inputs["input_ids"].numel():
                raise SparseetyError("a prompt without tokens; give one with text")
            model.generate(**inputs, max_new_tokens=arguments.max_tokens, do_sample=False)
    for name, reason in observation.not_observed.items():
        print(f"not observed: {name}: {reason}", file=sys.stderr)


def _tell(table: SparsityTable, path: str) -> int:
    try:
        with Path(path).open("w", newline="") as file:
            table.write_csv(file)
    except OSError as error:
        raise SparseetyError(f"cannot write {path}: {error.strerror}") from None
    for line in _summary(table):
        print(line)
    print(f"table: {path}", file=sys.stderr)
    return 0


def _summary(table: SparsityTable) -> Iterator[str]:
    threshold = ", ".join(f"{value:g}" for value in sorted(table.thresholds))
    for phase in ("prefill", "decode"):
        counts = table.overall((phase,))
        if counts.zero_share is None or counts.near_zero_share is None:
            yield f"{phase:<8}not observed"
        else:
            yield (
                f"{phase:<8}{counts.zero_share:.2%} zeros, {counts.near_zero_share:.2%} near zero "
                f"(<= {threshold}), of {counts.elements} elements"
            )
    skipping = table.skipping()
    yield f"{len(skipping)} of {len(table.places())} modules skip more than half: {_names(skipping) or 'none'}"
    if unseen := table.unseen():
        yield f"{len(unseen)} not observed: {_names(unseen)}"
    for name, reason in table.not_observed.items():
        yield f"not counted: {name or 'the model'}: {reason}"


def _names(places: Iterable[Any]) -> str:
    return ", ".join(place.site for place in places)


def _say(problem: LogProblem) -> None:
    print(f"warning: {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
