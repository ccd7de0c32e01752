"""docs/vllm-plugin.md lists every setting of the plugin, and no other."""

import re
from pathlib import Path

from sampler_hook.settings import KINDS

PAGE = Path(__file__).parent.parent / "docs" / "vllm-plugin.md"
SETTINGS = Path(__file__).parent.parent / "sampler_hook" / "settings.py"


def test_the_page_has_every_setting_and_no_other() -> None:
    variables = set(re.findall(r"SPARSEETY_HOOK_[A-Z_]+", SETTINGS.read_text()))
    written = set(re.findall(r"^\| `(SPARSEETY_HOOK_[A-Z_]+)", PAGE.read_text(), re.MULTILINE))
    assert written == variables - {"SPARSEETY_HOOK_"}
    assert all(f"`{kind}`" in PAGE.read_text() for kind in KINDS)
