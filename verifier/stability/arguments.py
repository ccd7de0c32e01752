"""Options that several of the stability commands take."""

import argparse
import re
from math import inf
from pathlib import Path
from typing import get_args

from sparseety.command import positive
from verifier.stability.drive import Limits
from verifier.stability.plan import Cache
from verifier.stability.result import Contract

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_TAKEN = ("prompts", "plan")


def limits(parser: argparse.ArgumentParser) -> None:
    """Sets options.limits, which makes Limits of them."""
    default = Limits()
    group = parser.add_argument_group("limits, to be kind to a server that others use")
    group.add_argument(
        "--max-concurrency", type=positive, default=default.at_once, metavar="N", help=f"(default {default.at_once})"
    )
    group.add_argument("--rate", type=above_0, metavar="N", help="requests begun in a second, at most")
    group.add_argument("--max-requests", type=positive, metavar="N", help="send so many, then stop")
    group.add_argument(
        "--stop-after-errors",
        type=positive,
        default=default.errors,
        metavar="N",
        help=f"failed requests one after another (default {default.errors})",
    )
    group.add_argument(
        "--timeout", type=above_0, default=default.seconds, metavar="SECONDS", help=f"(default {default.seconds:g})"
    )
    parser.set_defaults(
        limits=lambda options: Limits(
            options.max_concurrency, options.rate, options.max_requests, options.stop_after_errors, options.timeout
        )
    )


def witnesses(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what logs say")
    group.add_argument(
        "--logs",
        action="append",
        default=[],
        metavar="PATH",
        help="logs of proxy and engine: every stream is verified, and what sparsity did is known; may be given again",
    )
    group.add_argument("--tokenizer", action="append", type=Path, metavar="PATH", help="as of verify-tokens")
    group.add_argument("--jobs", type=positive, metavar="N", help="processes to verify with")


def roles(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who is compared with whom")
    group.add_argument(
        "--as-baseline",
        metavar="ARM,ARM",
        help="arms that are the baseline (default a1,a2); of one, its repeats are the noise",
    )
    group.add_argument("--as-candidate", metavar="ARM", help="the arm that is judged (default b)")
    group.add_argument(
        "--as-yardstick",
        action="append",
        default=[],
        metavar="[NAME=]ARM",
        help="an arm that measures change; may be given again (default: all other arms)",
    )


def gate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the gate")
    group.add_argument("--contract", choices=get_args(Contract), default="same-model", help="(default same-model)")
    group.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="p0, p1, budget, dtype, yardstick and others, see docs/stability.md; may be given again",
    )


def outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="the result as one JSON object, instead of the text")
    group.add_argument("--junit", type=Path, metavar="FILE", help="for a CI")
    group.add_argument("--prom-textfile", type=Path, metavar="FILE", help="for Prometheus' node exporter")
    group.add_argument("--html", type=Path, metavar="FILE", help="one page that needs nothing else")
    group.add_argument("--show-text", action="store_true", help="show the text of outputs")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress")


def above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def at_least_2(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is not at least 2, which a margin takes")
    return value


def positive_or_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def numbers(text: str) -> list[int]:
    """Ascending, each once."""
    return sorted({positive(each) for each in text.split(",")})


def caches(text: str) -> list[str]:
    states = text.split(",")
    if not set(states) <= set(get_args(Cache)) or len(set(states)) < len(states):
        raise argparse.ArgumentTypeError(f'"{text}" is not cold, warm or both')
    return states


def named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or name in _TAKEN:
        raise argparse.ArgumentTypeError(f'"{text}" is not NAME=URL (letters, digits, dot, dash, underscore)')
    return name, url
