"""`verify-tokens`: judge the requests in a folder of logs. It only reads."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import sparseety
from sparseety.command import named_path, positive, run_command
from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs
from verifier import explain, exports, output
from verifier.bundle import write_bundle
from verifier.executor import Inline, collect_seldom
from verifier.findings import Report
from verifier.judging import judge_cases, tokenizers
from verifier.known import Waivers, load_known
from verifier.options import JudgeOptions
from verifier.progress import Progress
from verifier.run import Run, verify
from verifier.selection import Selection, names_of, point_in_time
from verifier.tokenizer import TokenizerShelf

_EPILOG = """\
verify-tokens explain ID PATH... shows one request in full.

exit codes: 0 all passed; 1 a request failed; 2 wrong use; 3 nothing failed, but not all could be checked (nothing to
check is 3, never 0); 4 input damaged beyond use; 70 a bug; 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["explain"]:
        return _explain(_explain_parser().parse_args(arguments[1:]))
    options = _parser().parse_args(arguments)
    now = time.time()
    known = load_known(options.known, datetime.fromtimestamp(now, UTC).date()) if options.known else None
    if options.watch:
        return _watch(options, known)
    collect_seldom()
    selection = _selection(options, now)
    progress = Progress(wanted=not options.quiet)
    files, shelf, listed = find_logs(options.paths), _shelf(options), _lists_passes(options, selection)
    try:
        report = verify(files, shelf, options.jobs, _judge_options(options), progress, passes=listed)
    finally:
        progress.clear()
    _select(report, selection)
    if known is not None:
        for verdict in report.verdicts:
            known.apply(verdict)
        report.notes += known.notes()
    exit_code = report.exit_code(options.min_coverage)
    if options.junit:
        exports.write(options.junit, exports.junit(report))
    if options.prom_textfile:
        exports.write(options.prom_textfile, exports.prometheus(report, exit_code, time.time()))
    for line in [*output.problem_lines(report), *report.notes]:
        print(f"note: {output.printable(line)}", file=sys.stderr)
    if options.json or options.jsonl:
        _print_json(report, options, exit_code)
    else:
        _print_text(report, options)
    return exit_code


def _watch(options: argparse.Namespace, known: Waivers | None) -> int:
    """Follow logs until a signal comes."""
    for name in ("since", "until", "request_id", "jsonl", "junit", "prom_textfile"):
        if getattr(options, name):
            raise SparseetyError(f"--{name.replace('_', '-')} is for logs that have an end, not for --watch")
    from verifier import watching  # here: it needs the metrics' library, which a single run does not

    settings = watching.Settings(
        paths=options.paths,
        checkpoint=options.checkpoint,
        jobs=options.jobs,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        summary_seconds=options.summary_seconds,
        min_coverage=options.min_coverage,
        json=options.json,
        verbose=options.verbose,
        quiet=options.quiet,
        show_text=options.show_text,
    )
    return watching.run(settings, _shelf(options), _judge_options(options), known)


def _explain(options: argparse.Namespace) -> int:
    """Everything about one request."""
    shelf, wanted = _shelf(options), {}
    run = Run(find_logs(options.paths), shelf, Inline())
    for case in run.cases():
        if explain.is_named(case.capture, options.request):
            wanted[case.capture.log.writer, case.capture.number] = case
    if not wanted:
        raise SparseetyError(f'no request "{options.request}" in these logs; -v lists all of them')
    if options.bundle and len(wanted) > 1:
        raise SparseetyError(
            f'{len(wanted)} requests are called "{options.request}"; a bundle is of one: give its UUID'
        )
    run.check_tokenizers()
    report = Report()
    judge_options = JudgeOptions(drift=True, tool_parser=options.tool_call_parser)
    for case in wanted.values():
        [verdict] = judge_cases([case], run.logs.engine_logs, shelf, judge_options)
        capture, join = case.unpack()
        tokenizer_of = tokenizers(shelf).of
        for line in explain.lines(capture, join, verdict, tokenizer_of, options.show_text):
            print(output.printable(line))
        report.verdicts.append(verdict)
        if options.bundle:
            engines = [engine for engines in join.choices.values() for engine in engines]
            explained = explain.lines(capture, join, verdict, tokenizer_of, True)
            write_bundle(options.bundle, find_logs(options.paths), capture, engines, verdict, explained)
            print(
                f"note: {options.bundle} holds the text and the ids; look through it before it goes out",
                file=sys.stderr,
            )
    return report.exit_code(1.0)


def _shelf(options: argparse.Namespace) -> TokenizerShelf:
    given = options.tokenizer or [Path(p) for p in [os.environ.get("SPARSEETY_VERIFY_TOKENIZER")] if p]
    return TokenizerShelf(given, dict(options.model_map))


def _judge_options(options: argparse.Namespace) -> JudgeOptions:
    return JudgeOptions(drift=options.drift, tool_parser=options.tool_call_parser)


def _lists_passes(options: argparse.Namespace, selection: Selection) -> bool:
    """Does anything that was asked for look at the verdicts on requests that pass? There may be millions."""
    wanted = (options.verbose, options.json, options.jsonl, options.junit, options.prom_textfile)
    return any(wanted) or selection != Selection()


def _selection(options: argparse.Namespace, now: float) -> Selection:
    times: dict[str, float | None] = {}
    for name in ("since", "until"):
        text = getattr(options, name)
        try:
            times[name] = None if text is None else point_in_time(text, now)
        except (ValueError, OverflowError):
            raise SparseetyError(
                f'--{name} "{text}" is no time; examples: 2h, 2026-11-29T17:00, 2026-11-29T17:00:00Z'
            ) from None
    return Selection(times["since"], times["until"], frozenset(options.request_id or ()))


def _select(report: Report, selection: Selection) -> None:
    """Leave only the requests that are wanted."""
    count = len(report.verdicts)
    report.verdicts = [verdict for verdict in report.verdicts if selection.takes(verdict)]
    if count and not report.verdicts:
        report.notes.append(f"none of the {count} requests in these logs is of that time and name; nothing to check")
    names = {name for verdict in report.verdicts for name in names_of(verdict)}
    missing = sorted(selection.names - names)
    report.notes += [f'no request "{name}" of that time in these logs' for name in missing]
    report.whole = report.whole and not missing


def _explain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify-tokens explain",
        description="Show one request: its timing, each chunk beside its tokens, its checks.",
    )
    parser.add_argument(
        "request", metavar="ID", help="the id in the reply, the proxy's UUID, or the client's X-Request-Id"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="FOLDER", help="write its records and the verdict there, for a bug report"
    )
    _common(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify-tokens",
        description="Say, request by request, whether the text a client received is the text of the sampled tokens.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(parser)
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--json", action="store_true", help="one JSON object a request, then one for the whole")
    machine.add_argument("--jsonl", action="store_true", help="one JSON object a finding, then one for the whole")
    _choosing(parser)
    parser.add_argument(
        "--known", type=Path, metavar="FILE", help="TOML file of faults that are known: counted apart, no failure"
    )
    parser.add_argument(
        "--drift", action="store_true", help="tokenize each text anew too (information, and several times the work)"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts for a CI too, without content")
    parser.add_argument(
        "--prom-textfile", type=Path, metavar="FILE", help="write gauges of this run for Prometheus' node exporter too"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="list passes and information too")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the sum only")
    parser.add_argument(
        "--min-coverage",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="share of ended, in-scope requests that must be judged for exit code 0 (default 1.0)",
    )
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="processes to read and judge with (default: as many as CPUs)"
    )
    watch = parser.add_argument_group("following logs that grow")
    watch.add_argument(
        "--watch",
        action="store_true",
        help="judge each request soon after it ends, until SIGINT or SIGTERM; prints what does not pass",
    )
    watch.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="where to go on after a restart (default: verify-tokens.checkpoint in the first folder)",
    )
    watch.add_argument("--metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics there (0: any port)")
    watch.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST", help="address to serve them on")
    watch.add_argument(
        "--summary-seconds", type=float, default=60.0, metavar="N", help="sum up on stderr as often (0: never)"
    )
    parser.add_argument("--version", action="version", version=f"sparseety {sparseety.__version__}")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="log folders, files or globs")
    parser.add_argument(
        "--tokenizer",
        action="append",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or the folder that holds it; may be given for each model served",
    )
    parser.add_argument(
        "--model-map",
        action="append",
        type=named_path,
        default=[],
        metavar="NAME=PATH",
        help="the tokenizer of one model; may be given several times",
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="what vllm serve was given as --tool-call-parser; its engine, whose log this reads, does not know it",
    )
    parser.add_argument("--show-text", action="store_true", help="show the text and ids that it is about")


def _choosing(parser: argparse.ArgumentParser) -> None:
    """Which requests."""
    parser.add_argument(
        "--since", metavar="TIME", help="only requests that began then or later: ISO 8601, or so long ago, such as 2h"
    )
    parser.add_argument("--until", metavar="TIME", help="only requests that began before")
    parser.add_argument(
        "--request-id",
        action="append",
        metavar="ID",
        help="only this request: the id in the reply, the proxy's UUID or X-Request-Id; may be given several times",
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _print_json(report: Report, options: argparse.Namespace, exit_code: int) -> None:
    for verdict in report.verdicts:
        if options.json:
            print(json.dumps(output.request_json(verdict, options.show_text)))
        else:
            for line in output.finding_lines_json(verdict, options.show_text):
                print(json.dumps(line))
    print(json.dumps(output.summary_json(report, exit_code)))


def _print_text(report: Report, options: argparse.Namespace) -> None:
    lines: list[str] = []
    if not options.quiet:
        for verdict in report.verdicts:
            lines += output.request_lines(verdict, options.show_text, options.verbose)
    for line in [*lines, *([""] if lines else []), *report.totals.lines()]:
        print(output.printable(line))


if __name__ == "__main__":
    sys.exit(main())
