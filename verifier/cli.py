"""`verify-tokens`: judge the requests in a folder of logs. It only reads."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sparseety
from sparseety.command import run_command
from sparseety.logreader import find_logs
from verifier import output
from verifier.findings import Report
from verifier.run import verify
from verifier.tokenizer import TokenizerShelf

_EPILOG = """\
exit codes: 0 all passed; 1 a request failed; 2 wrong use; 3 nothing failed, but not all could be checked (nothing to
check is 3, never 0); 4 input damaged beyond use; 70 a bug; 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    given = options.tokenizer or [Path(p) for p in [os.environ.get("SPARSEETY_VERIFY_TOKENIZER")] if p]
    report = verify(find_logs(options.paths), TokenizerShelf(given))
    exit_code = report.exit_code(options.min_coverage)
    for line in [*output.problem_lines(report), *report.notes]:
        print(f"note: {output.printable(line)}", file=sys.stderr)
    if options.json:
        _print_json(report, options.show_text, exit_code)
    else:
        _print_text(report, options)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify-tokens",
        description="Say, request by request, whether the text a client received is the text of the sampled tokens.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="log folders, files or globs")
    parser.add_argument(
        "--tokenizer",
        action="append",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or the folder that holds it; may be given for each model served",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a request, then one for the whole")
    parser.add_argument("--show-text", action="store_true", help="show the text and ids that findings are about")
    parser.add_argument("-v", "--verbose", action="store_true", help="list passes and information too")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the sum only")
    parser.add_argument(
        "--min-coverage",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="share of ended, in-scope requests that must be judged for exit code 0 (default 1.0)",
    )
    parser.add_argument("--version", action="version", version=f"sparseety {sparseety.__version__}")
    return parser


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
    for line in [*lines, *([""] if lines else []), *output.summary_lines(report)]:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
