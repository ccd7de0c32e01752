"""Copies of a model that are another model, made by the Python that has vLLM: `python changed_models.py MODEL OUT`.

window: each layer attends to the last WINDOW positions alone. pruned: the smaller half of each matrix's weights is 0.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WINDOW = 64
_WEIGHTS = "model.safetensors"


def _copy(model: Path, out: Path) -> Path:
    out.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.name != _WEIGHTS:
            shutil.copy(file, out / file.name)
    return out


def window(model: Path, out: Path) -> None:
    folder = _copy(model, out)
    (folder / _WEIGHTS).symlink_to(model / _WEIGHTS)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"layer_types": ["sliding_attention"] * config["num_hidden_layers"], "sliding_window": WINDOW}
    path.write_text(json.dumps(config))


def pruned(model: Path, out: Path) -> None:
    folder = _copy(model, out)
    weights = load_file(model / _WEIGHTS)
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            size = weight.abs().float()
            weight[size <= size.flatten().kthvalue(weight.numel() // 2).values] = 0
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    source, target = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    window(source, target / "window")
    pruned(source, target / "pruned")
