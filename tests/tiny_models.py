"""Tiny random models that vLLM and transformers both load. Run by the Python that has transformers:

python tests/tiny_models.py FOLDER TOKENIZER_FOLDER [NAME...] makes FOLDER/opt, llama, mixtral, ...
"""

import json
import sys
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY, POSITIONS, HIDDEN, LAYERS, HEADS = 49152, 2048, 128, 4, 4
SLIDING_WINDOW = 32
STD = 0.08  # of the weights: with transformers' own 0.02, the output is one token over and over


def configs() -> dict[str, object]:
    from transformers import (
        Glm4MoeConfig,
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        OPTConfig,
        Qwen2MoeConfig,
    )

    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "bfloat16"}
    plain = common | {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    grouped = plain | {"num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "initializer_range": STD}
    experts = {"num_experts_per_tok": 2}
    return {
        "opt": OPTConfig(
            **plain, ffn_dim=512, word_embed_proj_dim=HIDDEN, max_position_embeddings=POSITIONS, init_std=STD
        ),
        "llama": LlamaConfig(**grouped, intermediate_size=384),
        "mistral": MistralConfig(**grouped, intermediate_size=384, sliding_window=SLIDING_WINDOW),
        "mixtral": MixtralConfig(**grouped, **experts, intermediate_size=256, num_local_experts=8),
        "qwen-moe": Qwen2MoeConfig(
            **grouped,
            **experts,
            intermediate_size=256,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=256,
            num_experts=8,
            decoder_sparse_step=1,
        ),
        # Its router scores by sigmoid, adds a bias, and chooses among the experts of one of two groups.
        "glm-moe": Glm4MoeConfig(
            **grouped,
            **experts,
            intermediate_size=256,
            moe_intermediate_size=128,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            head_dim=HIDDEN // HEADS,
            num_nextn_predict_layers=0,
        ),
        "gpt2": GPT2Config(
            **common,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=POSITIONS,
            initializer_range=STD,
            activation_function="gelu_new",
        ),
    }


def make(folder: Path, tokenizer: Path, names: list[str]) -> None:
    """Write the named models into folders of their own names."""
    import torch
    from transformers import AutoModelForCausalLM

    for name, config in configs().items():
        target = folder / name
        if name not in names or (target / ".complete").exists():
            continue
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for buffer in (buffer for label, buffer in model.named_buffers() if label.endswith("e_score_correction_bias")):
            buffer.normal_(std=0.1)  # made as 0, which would correct nothing
        model.to(torch.bfloat16).save_pretrained(target)
        for file in TOKENIZER_FILES:
            (target / file).write_bytes((tokenizer / file).read_bytes())
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
        (target / ".complete").touch()


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(configs()))
