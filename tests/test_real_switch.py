"""Sparsity taken out and put in again by the control file, on a real vLLM: off, vLLM has its own methods back."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, Gap, LogClose, Sparsity, SparsityStart
from tests.torch_python import ROOT, answer, tiny

pytestmark = [pytest.mark.vllm, pytest.mark.e2e_full]

PROMPTS = [list(range(5, 45)), list(range(300, 320))]
MAX_TOKENS = 16
WITH, WITHOUT, OFF = '{"capture": ["tokens", "sparsity"]}', '{"capture": ["tokens"]}', '{"on": false}'


def switch(folder: Path, model: str, control: list[str], *, eager: bool) -> list[dict[str, Any]]:
    asked = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "engine": {"enforce_eager": eager}, "control": control}
    asked["engine"] |= {"enable_prefix_caching": False}  # each round computes all of its prompts
    variables = {
        "SPARSEETY_HOOK_DIR": str(folder / "logs"),
        "SPARSEETY_HOOK_CAPTURE": "tokens,sparsity",
        "SPARSEETY_HOOK_CONTROL": str(folder / "control.json"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to send a function to the worker
        "PYTHONPATH": f"{folder}:{ROOT}",
    }
    program = str(ROOT / "tests/vllm_switch.py")
    found: list[dict[str, Any]] = answer(program, str(tiny(model)), json.dumps(asked), cwd=folder, **variables)["found"]
    return found


# sitecustomize is imported by each of vLLM's processes, before the plugin.
FAULT = """
import sampler_hook.counting as counting
def broken(*args, **kwargs):
    raise RuntimeError("broken for the test")
counting.Counting.{} = broken
"""


def worker_logs(folder: Path) -> list[list[AnyRecord]]:
    paths = [path for path in find_logs([str(folder / "logs")]) if path.name.startswith("worker")]
    return [[record for _, record in read_log(path, print)] for path in paths]


@pytest.mark.parametrize(("model", "eager"), [("opt", True), ("llama", False)], ids=["eager", "compiled"])
def test_out_of_the_control_file_sparsity_leaves_the_worker_and_comes_back_into_a_log_of_its_own(
    tmp_path: Path, model: str, eager: bool
) -> None:
    # Off at last: vLLM may kill its workers before they have closed their logs.
    rounds = switch(tmp_path, model, [WITH, WITHOUT, WITH, OFF, WITH, OFF], eager=eager)
    assert all(each["outputs"] == rounds[0]["outputs"] for each in rounds)
    for number, each in enumerate(rounds):
        counting = number % 2 == 0
        assert ("execute_model" in each["methods"]) is counting
        assert (each["hooks"] > 0) is (counting or not eager)  # the graph's code reads the hooks: they stay
        assert each["live"] == counting  # and what they call returns at once
        assert counting or each["methods"] == []
    logs = worker_logs(tmp_path)
    assert len(logs) == 3
    for log in logs:
        (start,) = [record for record in log if isinstance(record, SparsityStart)]
        assert len(start.sites) == 4
        assert isinstance(log[-1], LogClose)
        counted = [record for record in log if isinstance(record, Sparsity)]
        # Twice the prompts, and all tokens of the replies but the last, in each site and nowhere else.
        tokens = 2 * sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
        assert sum(record.tokens for record in counted) == tokens
        assert [sum(column) for column in zip(*(record.elements for record in counted), strict=True)] == [
            tokens * site.width for site in start.sites
        ]
    print(f"\n{model}: seconds a round: {[round(each['seconds'], 3) for each in rounds]}")


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_a_fault_while_switching_ends_the_counting_and_no_reply_notices(tmp_path: Path, method: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(method))
    rounds = switch(tmp_path, "opt", [WITH, WITHOUT, WITH], eager=True)
    assert all(each["outputs"] == rounds[0]["outputs"] for each in rounds)
    assert rounds[0]["methods"] != []
    assert (rounds[-1]["methods"], rounds[-1]["hooks"], rounds[-1]["live"]) == ([], 0, 0)
    gaps = [record.reason for log in worker_logs(tmp_path) for record in log if isinstance(record, Gap)]
    assert gaps == ["counting sparsity switched itself off: RuntimeError"]
