"""The command `sparseety`: finds its sub-commands by entry points and loads the one that is called."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import sparseety
from sparseety.command import run_command

GROUP = "sparseety.commands"


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: _main(argv))  # around the loading too: an interrupt may come then


def _main(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    commands = {command.name: command for command in entry_points(group=GROUP)}
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(_help(sorted(commands)))
            return 0 if arguments else 2
        case ["--version", *_]:
            print(f"sparseety {sparseety.__version__}")
            return 0
        case [name, *rest] if name in commands:
            return _call(commands[name], rest)
        case _:
            print(f'error: no command "{arguments[0]}"; there are: {", ".join(sorted(commands))}', file=sys.stderr)
            return 2


def proxy() -> int:
    """Console script `sparseety-proxy`: through here, so that a missing extra is said and not a traceback."""
    return main(["proxy", *sys.argv[1:]])


def verify_tokens() -> int:
    """Console script `verify-tokens`."""
    return main(["verify-tokens", *sys.argv[1:]])


def _call(command: EntryPoint, arguments: list[str]) -> int:
    try:
        run: Callable[[list[str]], int] = command.load()
    except ModuleNotFoundError as error:
        # The folder of a program and the extra that carries what it needs have the same name.
        program = command.module.partition(".")[0]
        if (error.name or "").partition(".")[0] in (program, "sparseety"):
            raise  # not a package that could be installed: a fault of this one
        print(
            f'error: "{command.name}" needs the package {error.name}, which is not installed; '
            f"try: pip install 'sparseety[{program}]'",
            file=sys.stderr,
        )
        return 2
    return run(arguments)


def _help(names: list[str]) -> str:
    return "\n".join(
        [
            "usage: sparseety COMMAND [ARGUMENTS]",
            "",
            "Proves that the text an LLM client received is the text of the tokens the engine sampled.",
            "",
            "commands:",
            *(f"  {name:<16}sparseety {name} --help says more" for name in names),
            "",
            "options:",
            "  -h, --help      show this text",
            "  --version       show the version",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
