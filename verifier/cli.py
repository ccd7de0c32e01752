"""`verify-tokens`: judge the requests in a folder of logs. It only reads."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import sparseety
from sparseety.command import run_command
from sparseety.errors import SparseetyError
from sparseety.logreader import find_logs
from verifier import explain, exports, output
from verifier.executor import Inline, collect_seldom
from verifier.findings import Report
from verifier.judging import judge_cases, tokenizers
from verifier.run import Run, verify
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
    if options.watch:
        return _watch(options)
    collect_seldom()
    report = verify(find_logs(options.paths), _shelf(options), options.jobs)
    exit_code = report.exit_code(options.min_coverage)
    if options.junit:
        exports.write(options.junit, exports.junit(report))
    if options.prom_textfile:
        exports.write(options.prom_textfile, exports.prometheus(report, exit_code, time.time()))
    for line in [*output.problem_lines(report), *report.notes]:
        print(f"note: {output.printable(line)}", file=sys.stderr)
    if options.json:
        _print_json(report, options.show_text, exit_code)
    else:
        _print_text(report, options)
    return exit_code


def _watch(options: argparse.Namespace) -> int:
    """Follow logs until a signal comes."""
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
    return watching.run(settings, _shelf(options))


def _explain(options: argparse.Namespace) -> int:
    """Everything about one request."""
    shelf, wanted = _shelf(options), {}
    run = Run(find_logs(options.paths), shelf, Inline())
    for case in run.cases():
        if explain.is_named(case.capture, options.request):
            wanted[case.capture.log.writer, case.capture.number] = case
    if not wanted:
        raise SparseetyError(f'no request "{options.request}" in these logs; -v lists all of them')
    run.check_tokenizers()
    report = Report()
    for case in wanted.values():
        [verdict] = judge_cases([case], run.logs.engine_logs, shelf)
        for line in explain.lines(*case.unpack(), verdict, tokenizers(shelf).of, options.show_text):
            print(line)
        report.verdicts.append(verdict)
    return report.exit_code(1.0)


def _shelf(options: argparse.Namespace) -> TokenizerShelf:
    given = options.tokenizer or [Path(p) for p in [os.environ.get("SPARSEETY_VERIFY_TOKENIZER")] if p]
    return TokenizerShelf(given)


def _explain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify-tokens explain",
        description="Show one request: its timing, each chunk beside its tokens, its checks.",
    )
    parser.add_argument(
        "request", metavar="ID", help="the id in the reply, the proxy's UUID, or the client's X-Request-Id"
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
    parser.add_argument("--json", action="store_true", help="one JSON object a request, then one for the whole")
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
        "--jobs", type=_positive, metavar="N", help="processes to read and judge with (default: as many as CPUs)"
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
    parser.add_argument("--show-text", action="store_true", help="show the text and ids that it is about")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _print_json(report: Report, show_text: bool, exit_code: int) -> None:
    for verdict in report.verdicts:
        print(json.dumps(output.request_json(verdict, show_text)))
    print(json.dumps(output.summary_json(report, exit_code)))


def _print_text(report: Report, options: argparse.Namespace) -> None:
    lines: list[str] = []
    if not options.quiet:
        for verdict in report.verdicts:
            lines += output.request_lines(verdict, options.show_text, options.verbose)
    for line in [*lines, *([""] if lines else []), *report.totals.lines()]:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
