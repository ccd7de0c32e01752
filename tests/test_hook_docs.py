"""docs/vllm-plugin.md against the code: metrics and settings, both ways. Run as a program it rewrites the table."""

import re
from pathlib import Path

from sampler_hook import figures
from sampler_hook.settings import KINDS

PAGE = Path(__file__).parent.parent / "docs" / "vllm-plugin.md"
SETTINGS = Path(__file__).parent.parent / "sampler_hook" / "settings.py"

LABELS = {
    figures.PROMPT: "model_name engine status=computed,reused_local,reused_external",
    figures.EVICTED: "model_name engine reason=preemption,capacity",
    figures.CONTEXT: "model_name engine layer_type=full,sliding,chunked",
    figures.ATTENDED: "model_name engine layer_type=full,sliding,chunked",
    figures.DRAFTS: "model_name engine outcome=accepted,rejected",
    figures.ACCEPTED: "model_name engine",
    figures.REQUESTS: "source=plugin decision=captured,forced,skipped",
    figures.RATE: "source=plugin",
    figures.RECORDS: "source=plugin kind=the record's event",
    figures.DROPPED: "source=plugin reason=other",
    figures.PAUSED: "source=plugin reason=operator,errors",
    figures.HOOKS: "engine site state=expected,attached,fired",
    figures.STEPS: "engine",
    figures.ERRORS: "engine site=tokens,kv,events,workers",
    figures.LAST: "engine",
}


def table() -> str:
    rows = []
    for metric in figures.ALL:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        labels = re.sub(r"(^| )(\w+)", r"\1`\2`", LABELS[metric])
        rows.append(f"| `{name}` ({metric.kind}) | {labels} | {metric.help.removeprefix('ALPHA ')} |\n")
    return "".join(rows)


def test_the_page_has_every_metric_as_it_is_published() -> None:
    assert table() in PAGE.read_text()


def test_the_page_has_every_setting_and_no_other() -> None:
    variables = set(re.findall(r"SPARSEETY_HOOK_[A-Z_]+", SETTINGS.read_text()))
    written = set(re.findall(r"^\| `(SPARSEETY_HOOK_[A-Z_]+)", PAGE.read_text(), re.MULTILINE))
    assert written == variables - {"SPARSEETY_HOOK_"}
    assert all(f"`{kind}`" in PAGE.read_text() for kind in KINDS)


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition("| metric | labels | meaning |\n|---|---|---|\n")
    PAGE.write_text(head + "| metric | labels | meaning |\n|---|---|---|\n" + table() + rest[rest.index("\nSeveral") :])
