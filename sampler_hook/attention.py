"""How much of its context a model's attention reads, by its configuration. Derived, not measured."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from sparseety.records import AttentionLayers

# Names of Hugging Face configurations -> ours.
_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


def layers(text_config: Any) -> list[AttentionLayers]:
    """The layers of each kind; empty where the configuration does not say how many layers there are."""
    count = getattr(text_config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return []
    window = _size(text_config, "sliding_window")
    if getattr(text_config, "use_sliding_window", True) is False:  # Qwen2 names a window that it does not use
        window = None
    chunk = _size(text_config, "attention_chunk_size")
    names: Iterable[str] = getattr(text_config, "layer_types", None) or []
    types = Counter(_TYPES.get(str(name), "sparse") for name in names)
    if not types:
        types = Counter({"sliding" if window else "full": count})
    windows = {"sliding": window, "chunked": chunk}
    return [
        AttentionLayers(layer_type=name, layers=number, window=windows.get(name))
        for name, number in sorted(types.items())
        if name not in windows or windows[name]  # without the size nothing can be derived
    ]


def _size(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def read(kind: AttentionLayers, prompt_len: int, outputs: int) -> tuple[int, int] | None:
    """(positions read, positions there were) in one such layer, summed over the outputs; None: cannot be derived.

    The i-th output token comes of a query with prompt_len + i positions before and at it.
    """
    total = _sum(prompt_len, prompt_len + outputs - 1)
    if kind.layer_type == "full":
        return total, total
    if kind.window is None:
        return None
    if kind.layer_type == "sliding":
        last = prompt_len + outputs - 1
        full_until = min(last, max(kind.window, prompt_len - 1))
        return _sum(prompt_len, full_until) + (last - full_until) * kind.window, total
    if kind.layer_type == "chunked":
        return sum(((prompt_len + i - 1) % kind.window) + 1 for i in range(outputs)), total
    return None


def _sum(first: int, last: int) -> int:
    """first + ... + last; 0 where there is none."""
    return (first + last) * (last - first + 1) // 2 if last >= first else 0
