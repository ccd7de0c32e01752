"""Prompts through a real vLLM without a server, the counters on; and what transformers' own forward says of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseety.logreader import read_log
from sparseety.records import AnyRecord, Phase, Sparsity
from tests.torch_python import ROOT, answer, last_json, run, tiny

PROMPTS = [list(range(5, 45)), list(range(300, 320)), list(range(1000, 1100))]
MAX_TOKENS = 32
THRESHOLD = 0.05
ALL = "tokens,sparsity,experts,weights"


@dataclass(frozen=True)
class Run:
    """One run of PROMPTS."""

    outputs: list[list[int]]
    records: list[AnyRecord]
    said: str = ""  # on stdout

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def generate(
    model: str,
    folder: Path,
    *,
    eager: bool = True,
    max_tokens: int = MAX_TOKENS,
    engine: dict[str, Any] | None = None,
    **variables: str,
) -> Run:
    asked = {"prompts": PROMPTS, "max_tokens": max_tokens, "engine": {"enforce_eager": eager} | (engine or {})}
    said = run(
        *(str(ROOT / "tests/vllm_generate.py"), str(tiny(model)), json.dumps(asked)),
        cwd=folder,
        **{"SPARSEETY_HOOK_DIR": str(folder / "logs"), "SPARSEETY_HOOK_NEAR_ZERO": str(THRESHOLD)} | variables,
    )
    problems: list[object] = []
    records = [
        record for path in (folder / "logs").glob("worker-*.jsonl") for _, record in read_log(path, problems.append)
    ]
    assert problems == []
    return Run(last_json(said)["outputs"], records, said)


def plain(model: str, run: Run) -> list[dict[str, Any]]:
    """What transformers' own forward makes of the same tokens."""
    sequences = [prompt + output for prompt, output in zip(PROMPTS, run.outputs, strict=True)]
    asked = {"sequences": sequences, "prompts": [len(prompt) for prompt in PROMPTS], "threshold": THRESHOLD}
    found: list[dict[str, Any]] = answer(str(ROOT / "tests/reference_counts.py"), str(tiny(model)), json.dumps(asked))
    return found


def summed(run: Run) -> dict[tuple[int, Phase], list[list[int]]]:
    """Per request and phase, per site: [elements, zeros, near zeros]."""
    sums: dict[tuple[int, Phase], list[list[int]]] = {}
    for record in run.of(Sparsity):
        into = sums.setdefault((int(record.engine_id.split("-")[0]), record.phase), [[0, 0, 0] for _ in record.zeros])
        for site, numbers in zip(into, zip(record.elements, record.zeros, record.near, strict=True), strict=True):
            site[:] = [a + b for a, b in zip(site, numbers, strict=True)]
    return sums


def worst_difference(model: str, run: Run) -> float:
    """Of the share of zeros or near zeros, over requests, phases and layers."""
    sums = summed(run)
    worst = 0.0
    for number, phases in enumerate(plain(model, run)):
        for phase in ("prefill", "decode"):
            for mine, theirs in zip(sums[number, phase], phases[phase], strict=True):
                assert mine[0] == theirs[0]  # each token of the prompt, and all but the last of the output, once
                worst = max(worst, *(abs(a - b) / theirs[0] for a, b in zip(mine[1:], theirs[1:], strict=True)))
    return worst
