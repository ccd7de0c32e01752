"""Run prompts through a real vLLM without a server, by the Python that has it. Prints one JSON object.

python tests/vllm_generate.py MODEL '{"prompts": [[ids]], "max_tokens": 16, "engine": {...}}'
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], max_model_len=1024, disable_log_stats=True, **asked["engine"])
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
    print("\n" + json.dumps({"outputs": [list(each.outputs[0].token_ids) for each in done]}))


if __name__ == "__main__":
    main()
