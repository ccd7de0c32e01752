"""A result for people and for programs, in one place. None of these shows text of a model unless `decode` is given."""

from verifier.stability.diffing import Decode, diff
from verifier.stability.exports import json, junit, prometheus
from verifier.stability.page import html
from verifier.stability.single import single
from verifier.stability.terminal import text

__all__ = ["Decode", "diff", "html", "json", "junit", "prometheus", "single", "text"]
