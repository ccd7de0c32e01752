"""Tokens per second of a real vLLM with its sparsity counters on and off, in turns. Run by the Python that has vLLM:

python benchmarks/sparsity_cost.py MODEL [ROUNDS]

One engine, eager, tokens captured all the time; the counters are taken off its model and put on again between batches,
so that both are measured in the same processes on the same cores. The ratio is of neighbouring batches.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

REQUESTS, TOKENS = 5, 64


def switch(wrapper: Any, on: bool) -> None:
    """In the worker: the counters' hooks and read-out, as WorkerPart has them."""
    worker = wrapper.worker if hasattr(wrapper, "worker") else wrapper
    part = worker.execute_model.sparseety_part
    if part._counting is not None:
        part.idle = part._counting
    part.idle.detach()
    part._counting = None
    if on:
        part.idle.attach()
        part._counting = part.idle


def main(model: str, rounds: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=1024, disable_log_stats=True, enforce_eager=True)
    prompts = [{"prompt_token_ids": list(range(100 + 50 * n, 140 + 50 * n))} for n in range(REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def rate(on: bool) -> float:
        llm.collective_rpc(switch, args=(on,))
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return REQUESTS * TOKENS / (time.perf_counter() - began)

    rate(True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for on in random.sample([True, False], 2):
            rates[on].append(rate(on))
    ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
    medians = sorted(statistics.median(random.choices(ratios, k=rounds)) for _ in range(5000))
    print(f"off    {statistics.median(rates[False]):7.1f} tokens/s (median)")
    print(f"on     {statistics.median(rates[True]):7.1f} tokens/s (median)")
    print(f"ratio  {statistics.median(ratios):7.3f} (95 %: {medians[125]:.3f} to {medians[-126]:.3f}; {rounds} rounds)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        os.environ |= {"SPARSEETY_HOOK_DIR": logs, "SPARSEETY_HOOK_CAPTURE": "tokens,sparsity,experts"}
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send `switch` to the worker
        main(sys.argv[1], int((sys.argv[2:] or ["16"])[0]))
