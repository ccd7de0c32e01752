"""How finely sparsity is published, and how many series that makes at most."""

from sampler_hook.catalogue import ENGINES, EXPERT_TOKENS, WORKERS, WRITERS
from sampler_hook.settings import DETAILS
from sparseety.metrics import most_series

TOTALS, LAYER, EXPERT = DETAILS  # each says more than the one before


def series(detail: str | None = None, *, layers: int = 0, experts: int = 0, engines: int) -> int:
    """Of a server with so many data-parallel engines, in one scrape, at most. detail: None: without sparsity."""
    metrics = {*ENGINES, *WRITERS} | (set(WORKERS) if detail else set())
    if detail != EXPERT or not experts:
        metrics.discard(EXPERT_TOKENS)
    return most_series(metrics, engine=engines, expert=experts, layer=1 if detail == TOTALS else layers)


def affordable(wanted: str, most: int, *, layers: int, experts: int, engines: int) -> str | None:
    """The finest detail up to the wanted one that stays within so many series; None: not even totals do."""
    for detail in reversed(DETAILS[: DETAILS.index(wanted) + 1]):
        if series(detail, layers=layers, experts=experts, engines=engines) <= most:
            return detail
    return None
