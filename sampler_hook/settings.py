"""What the plugin was asked to do: the SPARSEETY_HOOK_* variables. Nothing, unless a folder is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparseety.errors import SparseetyError

_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class HookSettings:
    folder: Path  # where the engine's log goes; absolute
    untested: bool = False  # work with a vLLM that no test has seen

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "HookSettings | None":
        """None: capture was not asked for. Raises SparseetyError."""
        folder = environ.get("SPARSEETY_HOOK_DIR", "")
        if not folder:
            return None
        return cls(Path(folder).expanduser().absolute(), _flag(environ, "SPARSEETY_HOOK_UNTESTED"))


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _YES:
        return True
    if value in _NO:
        return False
    raise SparseetyError(f"{name}={environ[name]!r} is neither yes nor no; example: {name}=1")
