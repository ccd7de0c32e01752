"""The counters on torch and transformers, which vLLM's environment has. `make test-vllm`."""

import pytest

from tests.torch_python import ROOT, answer, evaluate, run, tiny

pytestmark = pytest.mark.vllm

OPERATOR = """
from sampler_hook import counters
count = counters.operators().count_activations
def counted(values, threshold, rows=8):
    counters.live[7] = threshold
    out = torch.full((rows, 2), -1, dtype=torch.int32)
    count(values, 7, out)
    return out.tolist()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_operator_counts_what_is_not_zero_and_what_is_not_near_zero(dtype: str) -> None:
    found = evaluate(
        f"""{OPERATOR}
values = torch.tensor([[0.0, -0.0, 1.0, -0.04, float("nan")], [0.05, -0.05, 0.051, 0.0, 5e-5]], dtype=torch.{dtype})
plain = [[int((row != 0).sum()), int((~(row.double().abs() <= 0.05)).sum())] for row in values]
found = [counted(values, 0.05), plain, counted(values, 0.0)[0]]
"""
    )
    assert found[0][:2] == found[1]
    assert found[0][2:] == [[-1, -1]] * 6  # rows that were not there stay as they were
    assert found[2] == [3, 3]


def test_rows_of_any_shape_and_more_than_there_is_room_for_do_no_harm() -> None:
    found = evaluate(
        f"""{OPERATOR}
found = [counted(torch.ones(2, 2, 3), 0.0), len(counted(torch.ones(99, 3), 0.0)), counters.take_fault() is None]
"""
    )
    assert found == [[[3, 3]] * 4 + [[-1, -1]] * 4, 8, True]


def test_a_fault_inside_the_operator_is_kept_and_not_raised() -> None:
    found = evaluate(f"{OPERATOR}\nfound = [counted(torch.ones(2, 3), 'no number')[0], str(counters.take_fault())]")
    assert found[0][1] == -1
    assert "'>' not supported" in found[1]


def test_a_compiled_graph_counts_at_every_call_and_by_the_threshold_of_the_day() -> None:
    found = evaluate(
        f"""{OPERATOR}
layer = torch.nn.Linear(4, 4, bias=False)
buffer = torch.full((8, 2), -1, dtype=torch.int32)
from sampler_hook.counting import _before_projection
layer.register_forward_pre_hook(_before_projection(count, 7, buffer))
model = torch.compile(torch.nn.Sequential(torch.nn.ReLU(), layer), fullgraph=True, dynamic=True)
found = []
with torch.inference_mode():
    for rows, threshold in ((2, 0.0), (3, 0.0), (3, 1.0)):
        counters.live[7] = threshold
        buffer.fill_(-1)
        model(torch.tensor([[-1.0, 0.5, 1.0, 2.0]]).expand(rows, 4))
        found.append(buffer[:4].tolist())
"""
    )
    unwritten = [-1, -1]
    assert found == [[[3, 3]] * 2 + [unwritten] * 2, [[3, 3]] * 3 + [unwritten], [[3, 1]] * 3 + [unwritten]]


OBSERVED = """
import msgspec
from transformers import AutoModelForCausalLM
from sampler_hook.transformers_hooks import observe
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
def generate(ids, mask=None, tokens=6):
    ids = torch.tensor(ids)
    mask = torch.ones_like(ids) if mask is None else torch.tensor(mask)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return out.tolist()
def of(records, event):
    return [record for record in map(msgspec.to_builtins, records) if record["event"] == event]
"""


def observed(name: str, code: str) -> object:
    return evaluate(f"MODEL = {str(tiny(name))!r}\n{OBSERVED}\n{code}")


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "mixtral", "qwen-moe"])
def test_counts_and_experts_are_those_of_a_plain_forward(name: str) -> None:
    outputs, sparsity, experts = observed(  # type: ignore[misc]
        name,
        """
records = []
with observe(model, records.append, threshold=0.05):
    outputs = [generate([[5, 6, 7, 8, 9]])[0], generate([[100, 200, 300]])[0]]
found = [outputs, of(records, "sparsity"), of(records, "experts")]
""",
    )
    asked = f'{{"sequences": {outputs}, "prompts": [5, 3], "threshold": 0.05}}'
    plain = answer(str(ROOT / "tests/reference_counts.py"), str(tiny(name)), asked)
    for record in sparsity:
        layers = plain[int(record["engine_id"].split("-")[1])][record["phase"]]
        assert [list(each) for each in zip(record["elements"], record["zeros"], record["near"], strict=True)] == layers
    for record in experts:
        number = int(record["engine_id"].split("-")[1])
        rows = slice(0, (5, 3)[number]) if record["phase"] == "prefill" else slice((5, 3)[number], None)
        for counts, layer in zip(record["counts"], plain[number]["experts"], strict=True):
            chosen = [expert for token in layer[rows] for expert in token]
            assert counts == [chosen.count(expert) for expert in range(8)]
    assert len(sparsity) == (0 if name == "mixtral" else 4)  # two requests, two phases
    assert len(experts) == (4 if name in ("mixtral", "qwen-moe") else 0)


def test_padding_is_not_counted() -> None:
    alone, padded = observed(  # type: ignore[misc]
        "opt",
        """
found = []
for ids, mask in (([[5, 6, 7]], None), ([[2, 2, 5, 6, 7], [9, 8, 7, 6, 5]], [[0, 0, 1, 1, 1], [1] * 5])):
    records = []
    with observe(model, records.append):
        model(input_ids=torch.tensor(ids), attention_mask=None if mask is None else torch.tensor(mask))
    found.append(of(records, "sparsity"))
""",
    )
    assert [(each["tokens"], each["positions"], each["elements"][0]) for each in padded] == [
        (3, [[0, 3]], 3 * 512),
        (5, [[0, 5]], 5 * 512),
    ]
    assert all(abs(a - b) < 20 for a, b in zip(alone[0]["zeros"], padded[0]["zeros"], strict=True))


def test_counts_of_single_tokens_add_up_to_those_of_the_request() -> None:
    whole, single, start = observed(  # type: ignore[misc]
        "llama",
        """
found = []
for per_token in (False, True):
    records = []
    with observe(model, records.append, threshold=0.05, per_token=per_token):
        generate([[5, 6, 7, 8]])
    found.append(of(records, "sparsity"))
found.append(of(records, "sparsity_start")[0])
""",
    )
    assert start["per_token"] is True
    assert [each["tokens"] for each in single] == [4, 1, 1, 1, 1, 1]
    for phase in ("prefill", "decode"):
        (total,) = [each for each in whole if each["phase"] == phase]
        parts = [each for each in single if each["phase"] == phase]
        assert [sum(column) for column in zip(*(part["near"] for part in parts), strict=True)] == total["near"]
        assert all([sum(site) for site in part["token_near"]] == part["near"] for part in parts)


def test_a_module_that_is_never_called_is_reported_and_has_no_zeros() -> None:
    sparsity, gaps, missing = observed(  # type: ignore[misc]
        "opt",
        """
import types
layer = model.model.decoder.layers[1]
own = layer.fc2
layer.fc2.forward = own.forward
layer.fc1.__class__.__call__  # the module stays; its layer goes around it, as a fused kernel would
class Fused(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        object.__setattr__(self, "hidden", inner)
        self.fc2 = inner
    def forward(self, *args, **kwargs):
        return self.fc2.forward(*args, **kwargs)
layer.fc2 = Fused(own)
records = []
with observe(model, records.append) as observation:
    generate([[5, 6, 7]])
found = [of(records, "sparsity"), of(records, "gap"), observation.not_observed]
""",
    )
    assert all(each["elements"][1] == 0 and each["zeros"][1] == 0 and each["elements"][0] > 0 for each in sparsity)
    (gap,) = gaps
    assert "model.decoder.layers.1.fc2" in gap["reason"]
    assert any(name.startswith("model.decoder.layers.1.fc2") for name in missing)


def test_a_fault_of_the_counters_ends_the_counting_and_not_the_generation() -> None:
    plain, counted, gaps, hooks = observed(  # type: ignore[misc]
        "opt",
        """
from sampler_hook.counting import Counting
plain = generate([[5, 6, 7]])
found = [plain, [], [], []]
for method in ("before_step", "computed", "finished", "close"):
    own = getattr(Counting, method)
    def broken(*args, **kwargs):
        raise RuntimeError("broken for the test")
    setattr(Counting, method, broken)
    records = []
    with observe(model, records.append):
        found[1].append(generate([[5, 6, 7]]))
    setattr(Counting, method, own)
    found[2].append([gap["reason"] for gap in of(records, "gap")])
    found[3].append(sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()))
""",
    )
    assert counted == [plain] * 4
    assert gaps == [["counting sparsity switched itself off: RuntimeError"]] * 4
    assert hooks == [0] * 4


def test_another_threshold_from_a_step_on_is_said_before_the_numbers_that_it_holds_for() -> None:
    kinds = observed(
        "llama",
        """
records = []
with observe(model, records.append, threshold=0.0) as observation:
    model(input_ids=torch.tensor([[5, 6, 7]]))
    observation.counting.set_threshold(1000.0)
    model(input_ids=torch.tensor([[5, 6, 7]]))
found = [[each["event"], each.get("threshold"), each.get("near") == each.get("elements")]
         for each in map(msgspec.to_builtins, records) if each["event"] != "weights"]
""",
    )
    assert kinds == [
        ["sparsity_start", 0.0, True],
        ["sparsity", None, False],
        ["sparsity_start", 1000.0, True],
        ["sparsity", None, True],
    ]


def test_the_weights_zeros_are_counted_exactly() -> None:
    found = observed(
        "opt",
        """
weight = model.model.decoder.layers[2].fc1.weight
with torch.no_grad():
    weight[:3] = 0
from sampler_hook import counting
counting._AT_ONCE = 1000  # as if the weight were too large to be looked at in one go
(found,) = [each for each in msgspec.to_builtins(counting.weights(model, 0.0))["parameters"]
            if each["name"] == "model.decoder.layers.2.fc1.weight"]
found["plain"] = int((weight == 0).sum())
""",
    )
    assert found["zeros"] == found["plain"] >= 3 * 128  # type: ignore[index]
    assert found["elements"] == 512 * 128  # type: ignore[index]


def test_the_command_counts_prompts_and_writes_the_table(tmp_path: object) -> None:
    out = run(
        *("-m", "sampler_hook.sparsity_cli", "run", str(tiny("opt")), "--prompt", "The sky", "--max-tokens", "4"),
        *("--csv", f"{tmp_path}/sparsity_report.csv", "--logs", f"{tmp_path}/logs"),
    )
    assert "modules skip more than half" in out
    again = run(
        *("-m", "sampler_hook.sparsity_cli", "report", f"{tmp_path}/logs", "--csv", f"{tmp_path}/again.csv"),
    )
    assert again == out
