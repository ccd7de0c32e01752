"""docs/verdicts.md explains every finding that the verifier can make, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def codes_in_the_code() -> set[str]:
    constants = {
        node.value
        for path in [*(ROOT / "verifier").glob("*.py"), *(ROOT / "sparseety").glob("log*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {value for value in constants if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", value) and len(value) > 3} - {
        "EXACT",  # the absence of findings
        "SPARSEETY_VERIFY_TOKENIZER",
        "PLAIN",
        "FILE",
        "SHARE",
        "PATH",
        "HOST",
        "PORT",
    }


def test_every_code_is_explained_and_every_explanation_has_a_code():
    explained = set(re.findall(r"^### ([A-Z0-9_]+)$", (ROOT / "docs/verdicts.md").read_text(), re.MULTILINE))
    assert explained == codes_in_the_code()
