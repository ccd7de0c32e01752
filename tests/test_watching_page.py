"""docs/watching.md lists every metric of a watch, and no other."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from verifier.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs/watching.md"


def test_the_page_on_watching_lists_every_metric_with_its_name():
    registry = CollectorRegistry()
    Metrics(registry)
    served = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert set(re.findall(r"^\| `(sparseety_\w+)`", PAGE.read_text(), re.MULTILINE)) == served
