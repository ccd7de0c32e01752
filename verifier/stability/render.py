"""A result for people and for programs. Pure; none of these shows text unless `decode` is given."""

from collections.abc import Callable, Sequence

from verifier.stability.model import Output
from verifier.stability.result import Analysis

Decode = Callable[[Sequence[int]], str]


def text(analysis: Analysis) -> str:
    """For a terminal."""
    raise NotImplementedError


def json(analysis: Analysis) -> bytes:
    """One object on one line."""
    raise NotImplementedError


def junit(analysis: Analysis) -> bytes:
    """A test case for each check, bound and gate."""
    raise NotImplementedError


def prometheus(analysis: Analysis, now: float) -> bytes:
    """For node_exporter's textfile collector. now: Unix seconds."""
    raise NotImplementedError


def html(analysis: Analysis, decode: Decode | None = None) -> bytes:
    """One file that needs no network."""
    raise NotImplementedError


def single(analysis: Analysis, outputs: Sequence[Output], decode: Decode | None = None) -> str:
    """The same prompt N times: each request's time and length, each distinct output with its count."""
    raise NotImplementedError


def diff(first: Output, second: Output, analysis: Analysis, decode: Decode | None = None) -> str:
    """Two outputs to one prompt around their first difference."""
    raise NotImplementedError
