"""Take sparsity out of the control file and put it in again while a real vLLM runs. By the Python that has vLLM.

python tests/vllm_switch.py MODEL '{"prompts": [[ids]], "max_tokens": 16, "engine": {...}, "control": ["{...}", …]}'
prints one JSON object: for each content of the control file, what came of the prompts and what the worker had of ours.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def ours(wrapper: Any) -> dict[str, Any]:
    """In the worker: what it has that is not vLLM's own."""
    import sys

    worker = wrapper.worker if hasattr(wrapper, "worker") else wrapper
    model = worker.model_runner.get_model()
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    methods = [name for name in ("load_model", "execute_model", "compile_or_warm_up_model") if name in vars(worker)]
    return {"methods": methods, "hooks": hooks, "live": len(sys.modules["sampler_hook.counters"].live)}


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], max_model_len=1024, disable_log_stats=True, **asked["engine"])
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    control = Path(os.environ["SPARSEETY_HOOK_CONTROL"])
    found = []
    for content in asked["control"]:
        control.with_suffix(".new").write_text(content)
        control.with_suffix(".new").replace(control)
        time.sleep(2.5)  # it is looked at once a second, by the engine and by the worker
        done = llm.generate(prompts, params, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        outputs = [list(each.outputs[0].token_ids) for each in done]
        found.append({"outputs": outputs, "seconds": seconds} | llm.collective_rpc(ours)[0])
    print("\n" + json.dumps({"found": found}))


if __name__ == "__main__":
    main()
