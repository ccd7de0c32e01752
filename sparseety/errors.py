"""The one exception that a user can act on."""


class SparseetyError(Exception):
    """Something the user can act on. Command lines print it without a traceback and exit with `exit_code`."""

    exit_code = 2
