"""What the plugin was asked to do: the SPARSEETY_HOOK_* variables. Nothing, unless a folder is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparseety.errors import SparseetyError

# What can be recorded. Token ids always are: everything else is about them.
KINDS = frozenset({"tokens", "kv", "sparsity", "experts", "weights"})
# Of these, what the workers record. sampler_hook/worker.py has it; the engine tells it the step and the choice.
WORKER_KINDS = frozenset({"sparsity", "experts", "weights"})

# How finely sparsity is published: sampler_hook/detail.py.
DETAILS = ("totals", "layer", "expert")

_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class HookSettings:
    folder: Path  # where the engine's log goes; absolute
    untested: bool = False  # work with a vLLM that no test has seen
    capture: frozenset[str] = frozenset({"tokens"})  # of KINDS
    sample: float = 1.0  # share of requests recorded, 0..1
    sample_key: bytes = b""  # of the hash that chooses them
    near_zero: float = 1e-6  # activations no larger than this count as near zero
    control: Path | None = None  # a file with what changes while vLLM runs; absolute
    metrics: bool = True  # publish on vLLM's own /metrics
    detail: str = "layer"  # of DETAILS
    max_series: int = 20_000  # of ours in one scrape of vLLM's /metrics; above it, less is published

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "HookSettings | None":
        """None: capture was not asked for. Raises SparseetyError."""
        folder = environ.get("SPARSEETY_HOOK_DIR", "")
        if not folder:
            return None
        control = environ.get("SPARSEETY_HOOK_CONTROL", "")
        return cls(
            Path(folder).expanduser().absolute(),
            _flag(environ, "SPARSEETY_HOOK_UNTESTED"),
            _kinds(environ, "SPARSEETY_HOOK_CAPTURE"),
            _number(environ, "SPARSEETY_HOOK_SAMPLE", default=1.0, most=1.0),
            _key(environ, "SPARSEETY_HOOK_SAMPLE_KEY"),
            _number(environ, "SPARSEETY_HOOK_NEAR_ZERO", default=1e-6, most=1e9),
            Path(control).expanduser().absolute() if control else None,
            _flag(environ, "SPARSEETY_HOOK_METRICS", default="1"),
            _one_of(DETAILS, environ, "SPARSEETY_HOOK_METRICS_DETAIL", default="layer"),
            int(_number(environ, "SPARSEETY_HOOK_MAX_SERIES", default=20_000, most=1e9)),
        )


def _flag(environ: Mapping[str, str], name: str, default: str = "") -> bool:
    value = environ.get(name, default).strip().lower()
    if value in _YES:
        return True
    if value in _NO:
        return False
    raise SparseetyError(f"{name}={environ[name]!r} is neither yes nor no; example: {name}=1")


def _one_of(names: tuple[str, ...], environ: Mapping[str, str], name: str, *, default: str) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in names:
        raise SparseetyError(f"{name}={environ[name]!r} is not one of {', '.join(names)}")
    return value


def _kinds(environ: Mapping[str, str], name: str) -> frozenset[str]:
    names = {part.strip() for part in environ.get(name, "tokens").split(",")} - {""}
    if unknown := names - KINDS:
        raise SparseetyError(
            f"{name}={environ[name]!r}: {', '.join(sorted(unknown))} is not one of {', '.join(sorted(KINDS))}"
        )
    return frozenset(names | {"tokens"})


def _number(environ: Mapping[str, str], name: str, *, default: float, most: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:  # not a number is not between either
        raise SparseetyError(f"{name}={environ[name]!r} is no number from 0 to {most:g}; example: {name}={default:g}")
    return value


def _key(environ: Mapping[str, str], name: str) -> bytes:
    key = environ.get(name, "").encode("utf-8", "surrogateescape")
    if len(key) > 64:
        raise SparseetyError(f"{name} has {len(key)} bytes; at most 64 are used")
    return key
