"""What all command lines share: how an error, an interrupt and a bug end them."""

import os
import sys
import traceback
from collections.abc import Callable

from sparseety.errors import SparseetyError

BUG, INTERRUPTED = 70, 130


def run_command(main: Callable[[], int]) -> int:
    """Run a command line's body; returns its exit code. Only a bug leaves a traceback."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except SparseetyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has had enough (`| head`): no verdict was delivered in full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except Exception:  # noqa: BLE001 -- the outermost boundary of a program
        traceback.print_exc()
        print("error: this is a bug in SparSEEty; please report it with the lines above", file=sys.stderr)
        return BUG
