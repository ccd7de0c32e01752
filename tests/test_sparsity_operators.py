"""What torch.compile and CUDA graphs ask of the counters' operators, as far as it can be checked without a GPU."""

import pytest

from tests.torch_python import evaluate

pytestmark = pytest.mark.vllm

CALLS = """
from sampler_hook import counters
ops = counters.operators()
counters.live[7] = 0.05
def calls(device="cpu"):
    values = torch.zeros(5, 16, dtype=torch.bfloat16, device=device)
    def buffer(columns):
        return torch.full((8, columns), -1, dtype=torch.int32, device=device)
    return {
        "count_activations": (values, 7, buffer(2)),
        "note_experts": (values, 7, buffer(2)),
        "note_choices": (torch.zeros(5, 2, dtype=torch.int32, device=device), 7, buffer(2)),
    }
"""


def test_torchs_own_check_of_operators_finds_nothing_to_say() -> None:
    """Schema and what is written, fake implementation, functionalization, static and dynamic shapes."""
    found = evaluate(
        f"""{CALLS}
found = {{name: torch.library.opcheck(getattr(ops, name).default, args) for name, args in calls().items()}}
"""
    )
    assert len(found) == 3
    assert all(set(results.values()) == {"SUCCESS"} and len(results) == 4 for results in found.values())


def test_operators_ask_the_device_nothing_and_have_no_shape_that_depends_on_data() -> None:
    """On tensors without data any question to the device, which would wait for it or stop a graph's capture, fails."""
    found = evaluate(
        f"""{CALLS}
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
bodies = {{name: getattr(counters, "_" + name) for name in calls()}}
bodies["asks"] = lambda values, number, out: out.fill_(int(values.sum()))
bodies["shape"] = lambda values, number, out: values.nonzero()
found = {{}}
with FakeTensorMode():
    args = calls()
    for name, body in bodies.items():
        try:
            body(*args.get(name, args["count_activations"]))
            found[name] = "passed"
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            found[name] = "asked"
"""
    )
    passed = dict.fromkeys(("count_activations", "note_experts", "note_choices"), "passed")
    assert found == passed | {"asks": "asked", "shape": "asked"}


@pytest.mark.parametrize("operator", ["count_activations", "note_experts", "note_choices"])
def test_a_compiled_graph_writes_into_the_very_buffer_it_was_given(operator: str) -> None:
    found = evaluate(
        f"""{CALLS}
values, number, buffer = calls()[{operator!r}]
operator, address = getattr(ops, {operator!r}), buffer.data_ptr()
@torch.compile(fullgraph=True, dynamic=True)
def graph(values):
    doubled = values * 2
    operator(values, number, buffer)
    return doubled + 1
found = []
for rows in (5, 3):
    buffer.fill_(-1)
    graph(values[:rows])
    found.append([int((buffer[:, 0] >= 0).sum()), buffer.data_ptr() == address])
"""
    )
    assert found == [[5, True], [3, True]]


def test_of_a_counting_that_has_ended_the_graph_goes_on_and_its_operators_write_nothing() -> None:
    found = evaluate(
        f"""{CALLS}
counters.live.pop(7)
found = []
for name, args in calls().items():
    getattr(ops, name)(*args)
    found.append(bool((args[2] == -1).all()))
found.append(counters.take_fault() is None)
"""
    )
    assert found == [True] * 4
