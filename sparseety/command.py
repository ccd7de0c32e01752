"""What all command lines share: some types of arguments, and how an error, an interrupt and a bug end them."""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from sparseety.errors import SparseetyError

BUG, INTERRUPTED = 70, 130

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)


def run_command(main: Callable[[], int]) -> int:
    """Run a command line's body; returns its exit code. Only a bug leaves a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a character gets it escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        if sys.stdout is not None:  # None: it was closed by the caller
            sys.stdout.flush()
        return code
    except SparseetyError as error:
        print(f"error: {_shown(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            return _bug()
        # The reader of stdout has had enough (`| head`), or its disk is full: the result was not delivered in full.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        return INTERRUPTED
    except Exception:  # noqa: BLE001 -- the outermost boundary of a program
        return _bug()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.rpartition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f'"{text}" is not NAME=PATH')
    return name, Path(path)


def _shown(error: SparseetyError) -> str:
    """It may quote a server or a file: what would move the cursor is escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(error))


def _bug() -> int:
    traceback.print_exc()
    print("error: this is a bug in SparSEEty; please report it with the lines above", file=sys.stderr)
    return BUG
