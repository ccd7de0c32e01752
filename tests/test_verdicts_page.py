"""docs/verdicts.md explains every finding that the verifier can make, and no other."""

import ast
import re
from pathlib import Path

from verifier.findings import CODES

ROOT = Path(__file__).parent.parent


def codes_in_the_code() -> set[str]:
    nodes = [
        node
        for path in [*(ROOT / "verifier").glob("*.py"), *(ROOT / "sparseety").glob("log*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    metavars = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "metavar"}
    constants = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in metavars
    }
    return {value for value in constants if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", value) and len(value) > 3} - {
        "EXACT",  # the absence of findings
        "SPARSEETY_VERIFY_TOKENIZER",
        "PLAIN",
    }


def test_the_closed_set_of_codes_that_metrics_use_is_that_of_the_page():
    page = (ROOT / "docs/verdicts.md").read_text()
    assert set(re.findall(r"^### ([A-Z0-9_]+)$", page, re.MULTILINE)) == CODES


def test_every_code_is_explained_and_every_explanation_has_a_code():
    explained = set(re.findall(r"^### ([A-Z0-9_]+)$", (ROOT / "docs/verdicts.md").read_text(), re.MULTILINE))
    assert explained == codes_in_the_code()
