"""`sparseety doctor`: is all there, does it work, and what is to be done where not.

It changes nothing, but for a file in the log folder that is gone again at once. What only a program knows, that
program checks: see sparseety/checks.py. Here is what belongs to none of them.
"""

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import sparseety
from sparseety import log_checks, scrape_checks
from sparseety.checks import GROUP, Part, Result, Status, Subject, fail, ok, unknown, warn
from sparseety.command import named_path, run_command

UPSTREAM = "http://127.0.0.1:8000"  # vLLM's own default
AREAS = ("environment", "logs", "upstream", "prometheus", "proxy", "plugin", "verifier")

_EPILOG = """\
exit codes: 0 all that was looked at is as it should be (warnings are allowed); 1 a check failed; 2 wrong use; 3 nothing
failed, but something could not be looked at (--only leaves out what is not meant to be); 70 a bug; 130 interrupted
"""
_WORDS = {Status.FAIL: "FAIL", Status.WARN: "warn", Status.UNKNOWN: "?", Status.OK: "ok"}
_ORDER = list(_WORDS)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    results = list(examine(_subject(options)))
    if options.only:
        results = [result for result in results if result.name.partition(".")[0] in options.only]
    code = exit_code(results)
    if options.json:
        checks = [{"name": r.name, "status": r.status, "text": r.text, "fix": r.fix} for r in results]
        print(json.dumps({"schema": 1, "verdict": verdict(results), "checks": checks, "exit_code": code}))
    else:
        print("\n".join(lines(results)))
    return code


def examine(subject: Subject) -> Iterator[Result]:
    """All checks, of all programs that are here."""
    parts, absent = _parts()
    for part in parts.values():
        if part.settle:
            yield from part.settle(subject)
    subject.upstream = (subject.upstream or UPSTREAM).rstrip("/")
    yield from _environment(parts)
    yield from absent
    log_checks.find(subject)
    yield from log_checks.check(subject)
    yield from scrape_checks.look(subject)
    for part in parts.values():
        yield from part.check(subject)
    yield from scrape_checks.prometheus(subject)


# ------------------------------------------------------------------------------------------------- the environment


def _parts() -> tuple[dict[str, Part], list[Result]]:
    """The programs' checks by name, and what is to be said of those that cannot be loaded."""
    parts: dict[str, Part] = {}
    absent = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: [*AREAS, entry.name].index(entry.name)):
        try:
            parts[entry.name] = entry.load()
        except ModuleNotFoundError as error:
            fix = f"pip install 'sparseety[{entry.name}]', or look where it runs"
            absent.append(unknown(f"{entry.name}.installed", f"not checked: {error.name} is not installed here", fix))
        except Exception as error:  # noqa: BLE001 -- a broken package breaks in any way it likes
            text = f"its checks cannot be loaded: {type(error).__name__}: {error}"
            absent.append(fail(f"{entry.name}.installed", text, "install it anew, in an environment of its own"))
    return parts, absent


def _environment(parts: dict[str, Part]) -> Iterator[Result]:
    yield ok("environment.python", f"Python {platform.python_version()}, sparseety {sparseety.__version__}")
    wanted = _wanted()
    if not parts or not wanted:
        text = "the installed package does not name its parts: it is of another release, or not installed but copied"
        yield fail("environment.package", text, "pip install sparseety")
    for part in parts:
        if part not in wanted:
            continue  # it needs no packages of its own
        found = {name: _version(name) for name in wanted[part]}
        if lacking := [name for name, version in found.items() if version is None]:
            text = f"of what the {part} uses, {', '.join(lacking)} is not installed"
            yield warn("environment.packages", text, f"pip install 'sparseety[{part}]'")
        versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
        yield ok("environment.packages", f"{part}: {versions}")
    owners = set(metadata.packages_distributions().get("proxy", [])) - {"sparseety"}
    if owners:
        text = f"the import name proxy belongs to {', '.join(sorted(owners))} too"
        yield fail("environment.names", text, f"pip uninstall {' '.join(sorted(owners))}, or an environment for each")


def _wanted() -> dict[str, list[str]]:
    """The packages that each extra asks for."""
    wanted: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("sparseety") or []
    except metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra:
            wanted.setdefault(extra[1], []).append(name[0])
    return wanted


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------- the verdict


def exit_code(results: Sequence[Result]) -> int:
    found = {result.status for result in results}
    if Status.FAIL in found:
        return 1
    return 3 if Status.UNKNOWN in found or not results else 0


def verdict(results: Sequence[Result]) -> str:
    return {0: "ok", 1: "fail", 3: "incomplete"}[exit_code(results)]


def lines(results: Sequence[Result]) -> Iterator[str]:
    """The verdict, then the evidence, what is wrong first."""
    counts = {status: sum(result.status is status for result in results) for status in _ORDER}
    warnings = "warning" if counts[Status.WARN] == 1 else "warnings"
    words = {Status.FAIL: "failed", Status.WARN: warnings, Status.UNKNOWN: "not checked", Status.OK: "ok"}
    told = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    yield f"sparseety doctor: {verdict(results).upper()}   {told or 'nothing was looked at'}"
    yield ""
    for result in sorted(results, key=lambda result: _ORDER.index(result.status)):
        yield f"{_WORDS[result.status]:<5} {result.name:<21} {_plain(result.text)}"
        if result.fix:
            yield f"{'':<28}fix: {_plain(result.fix)}"


def _plain(text: str) -> str:
    """What others said may be in it: fit for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:1000])


# --------------------------------------------------------------------------------------------------- the options


def _subject(options: argparse.Namespace) -> Subject:
    return Subject(
        config=options.config,
        log_dirs=options.log_dir or [],
        upstream=options.upstream,
        admin=options.admin and options.admin.rstrip("/"),
        verifier=options.verifier and options.verifier.rstrip("/"),
        prometheus=options.prometheus,
        tokenizers=options.tokenizer or [],
        model_map=dict(options.model_map),
        seconds=options.timeout,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety doctor",
        description="Look at everything that has to work together, and say what to do where it does not.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="the proxy's settings (default: as sparseety-proxy finds them)")
    add("--log-dir", action="append", type=Path, metavar="FOLDER", help="logs (default: the proxy's, or the plugin's)")
    add("--upstream", type=_server, metavar="URL", help=f"the server behind (default: the proxy's, else {UPSTREAM})")
    add("--admin", type=_server, metavar="URL", help="the proxy's admin port (default: as its settings say)")
    add(
        "--verifier",
        type=_url,
        metavar="URL",
        help="the metrics of verify-tokens --watch (default: not asked)",
    )
    add("--prometheus", type=_url, metavar="URL", help="Prometheus (default: not asked)")
    add("--tokenizer", action="append", type=Path, metavar="PATH", help="as for verify-tokens")
    add("--model-map", action="append", type=named_path, default=[], metavar="NAME=PATH", help="as for verify-tokens")
    add("--only", action="append", choices=AREAS, metavar="AREA", help=f"of {', '.join(AREAS)}; may be repeated")
    add("--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="for each answer (default 5)")
    add("--json", action="store_true", help="one JSON object")
    add("--version", action="version", version=f"sparseety {sparseety.__version__}")
    return parser


def _url(text: str) -> str:
    if not re.match(r"https?://[^/@]+(/|$)", text):
        raise argparse.ArgumentTypeError(f'"{text}" is not a URL; example: http://127.0.0.1:8000')
    return text


def _server(text: str) -> str:
    """What has its pages at places of its own: with the /v1 that clients are given, all of them would be 404."""
    if not re.fullmatch(r"https?://[^/]+/?", _url(text)):
        raise argparse.ArgumentTypeError(f'"{text}" has a path; give scheme, host and port')
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 600")
    return value


if __name__ == "__main__":
    sys.exit(main())
