"""A stand-in for vLLM: a scheduler that treats requests, steps and ids as vLLM 0.32's does. No model, no torch."""

import os

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
