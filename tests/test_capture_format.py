"""docs/capture-format.md and sparseety/records.py say the same. Run as a program, this rewrites the tables."""

import ast
import re
from pathlib import Path

from sparseety.records import FORMAT_VERSION

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/capture-format.md"
CODE = ROOT / "sparseety/records.py"


def tables() -> dict[str, str]:
    """Title -> table, for each struct in records.py, from its annotations and the comment behind each field."""
    source = CODE.read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name == "Record":
            continue
        tag = next((k.value.value for k in node.keywords if k.arg == "tag" and isinstance(k.value, ast.Constant)), None)
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                comment = lines[field.lineno - 1].partition("  # ")[2]
                assert comment, f"{node.name}.{field.target.id} has no comment that says its unit and origin"
                kind = ast.unparse(field.annotation).replace("|", "\\|")
                default = f"`{ast.unparse(field.value)}`" if field.value is not None else "required"
                rows.append(f"| `{field.target.id}` | `{kind}` | {default} | {comment} |")
        found[f"`{tag}`" if isinstance(tag, str) else f"{node.name}"] = "\n".join(rows)
    return found


def written(page: str) -> dict[str, str]:
    """Title -> table, as the page has them."""
    pairs = re.findall(r"^### (\S+)\n.*?(^\| field .*?)(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    return {title: table.rstrip() for title, table in pairs}


def test_the_page_lists_every_record_and_field_of_the_code():
    assert written(PAGE.read_text()) == tables()


def test_the_page_names_the_format_version_in_force():
    assert f"Format version: {FORMAT_VERSION}." in PAGE.read_text()


if __name__ == "__main__":
    text = PAGE.read_text()
    for title, table in tables().items():
        heading = f"### {title}\n"
        if heading not in text:
            text += f"\n{heading}\n{table}\n"
            continue
        start = text.index(heading)
        begin = text.index("| field ", start)
        end = text.find("\n\n", begin)
        text = text[:begin] + table + (text[end:] if end >= 0 else "\n")
    PAGE.write_text(text)
