"""Zeros and experts counted the plain way, by transformers' own forward. Run by the Python that has it.

python tests/reference_counts.py MODEL '{"sequences": [[ids]], "prompts": [length], "threshold": 0.0}' prints one JSON
object: for each sequence and phase, per layer, [elements, zeros, near zeros]; per layer and token, the experts. The
last token of a sequence was sampled and never computed. Deliberately nothing of sampler_hook: the other witness.
"""

import json
import sys


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.loads(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    def chosen(out: "torch.Tensor | tuple[torch.Tensor, ...]", k: int) -> list[list[int]]:
        """A router's choice: its own where it tells it, as the last of three; else the top k of its logits."""
        if isinstance(out, tuple) and len(out) == 3 and not out[-1].is_floating_point():
            found: list[list[int]] = out[-1].tolist()
            return found
        return (out[0] if isinstance(out, tuple) else out).flatten(0, -2).topk(k).indices.tolist()

    seen: list[torch.Tensor] = []
    experts: list[list[list[int]]] = []
    for name, module in model.named_modules():
        if ".experts." not in name and name.endswith(("down_proj", "fc2", "mlp.c_proj")):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
        elif name.endswith(".gate"):
            k = model.config.num_experts_per_tok
            module.register_forward_hook(lambda _, args, out, k=k: experts.append(chosen(out, k)))
    result = []
    for ids, prompt in zip(asked["sequences"], asked["prompts"], strict=True):
        seen.clear()
        experts.clear()
        with torch.inference_mode():
            model(torch.tensor([ids[:-1]]))
        phases = {}
        for phase, rows in {"prefill": slice(prompt), "decode": slice(prompt, None)}.items():
            layers = [layer[rows].float().abs() for layer in seen]
            phases[phase] = [
                [layer.numel(), int((layer == 0).sum()), int((layer <= asked["threshold"]).sum())] for layer in layers
            ]
        result.append(phases | {"experts": [list(layer) for layer in experts]})
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
