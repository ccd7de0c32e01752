"""A tiny random LoRA adapter for one of tests/tiny_models.py, in PEFT's format. By the Python that has torch.

python tests/tiny_adapter.py FOLDER LAYERS HIDDEN
"""

import json
import sys
from pathlib import Path

RANK = 4


def main(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(7)
    folder.mkdir(parents=True)
    weights = {}
    for layer in range(layers):
        for name in ("q_proj", "o_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, dtype=torch.bfloat16)
            weights[f"{place}.lora_B.weight"] = torch.randn(hidden, RANK, dtype=torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
