"""A page for a browser (begun)."""

from collections.abc import Sequence

from verifier.stability.diffing import Decode
from verifier.stability.model import Output
from verifier.stability.result import Analysis


def html(analysis: Analysis, decode: Decode | None = None, outputs: Sequence[Output] = ()) -> bytes:
    """One file that needs no network."""
    return b""
