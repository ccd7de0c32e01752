"""What follows a worker, on a stand-in for one that runs a small torch model. `make test-vllm` has torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch_python import evaluate

pytestmark = pytest.mark.vllm

WORKER = """
import time
from pathlib import Path
from types import SimpleNamespace as S
import msgspec
from sampler_hook import counters, worker
from sampler_hook.settings import HookSettings
from sampler_hook.sparsity_settings import SparsitySettings
from sparseety.logreader import find_logs, read_log
worker._LOOK_SECONDS = 0.01
folder = Path(FOLDER)
control = folder / "control.json"

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj = torch.nn.Linear(4, 4)
    def forward(self, values):
        return self.down_proj(values)

class Worker:
    rank = 0
    def __init__(self, eager):
        self.vllm_config = S(
            model_config=S(model="m", served_model_name="m", enforce_eager=eager, hf_text_config=None),
            parallel_config=S(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0),
            scheduler_config=S(max_num_batched_tokens=64, async_scheduling=False),
            cache_config=S(), speculative_config=None,
        )
        model = torch.nn.ModuleDict({"mlp": Mlp()})
        self.model_runner = S(device=torch.device("cpu"), get_model=lambda: model, input_batch=S(req_ids=[]))
    def load_model(self): pass
    def compile_or_warm_up_model(self): pass
    def shutdown(self): pass
    def execute_model(self, output):
        self.model_runner.input_batch.req_ids = list(output.num_scheduled_tokens)
        with torch.inference_mode():
            self.model_runner.get_model()["mlp"](torch.ones(output.total_num_scheduled_tokens, 4))

class Engine:
    def __init__(self, eager=True):
        self.worker = Worker(eager)
        hook = HookSettings(folder, capture=frozenset({"tokens", "sparsity"}), control=control)
        self.part = worker.WorkerPart(self.worker, hook, SparsitySettings(frozenset({"sparsity"})))
        self.part.attach()
        self.worker.load_model()
        self.computed, self.finished = {}, []
    def step(self, told=("sparsity",), skip=(), **counts):
        new = [name for name in counts if name not in self.computed]
        cached = [name for name in counts if name in self.computed]
        output = S(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[
                S(req_id=name, prompt_token_ids=[0] * counts[name], num_computed_tokens=0) for name in new],
            scheduled_cached_reqs=S(req_ids=cached, num_computed_tokens=[self.computed[name] for name in cached]),
            scheduled_spec_decode_tokens={}, finished_req_ids=self.finished,
        )
        if told is not None:
            output._sparseety = {"step": 0, "skip": list(skip), "capture": list(told), "near_zero": 1e-6}
        for name, count in counts.items():
            self.computed[name] = self.computed.get(name, 0) + count
        self.finished = []
        self.worker.execute_model(output)
    def ends(self, *names):
        self.finished += names
    def switch(self, content):
        control.write_text(content)
        on = json.loads(content)["on"]
        for _ in range(500):
            if self.part._wanted is on and ("execute_model" in vars(self.worker)) >= on:
                return
            time.sleep(0.01)
        raise TimeoutError(content)
    def state(self):
        hooks = sum(len(each._forward_pre_hooks) for each in self.worker.model_runner.get_model().modules())
        return [sorted(vars(self.worker).keys() & {"execute_model", "load_model"}), hooks, len(counters.live)]
    def close(self):
        self.part.close()
        self.part.detach()
        for _ in range(500):
            logs = [[msgspec.to_builtins(record) for _, record in read_log(path, print)]
                    for path in find_logs([str(folder)])]
            if all(log[-1]["event"] == "log_close" for log in logs):
                break
            time.sleep(0.01)
        counters.live.clear()
        return [[[each["event"], each.get("engine_id", each.get("reason")), each.get("tokens", each.get("count"))]
                 for each in log if each["event"] in ("sparsity", "gap")] for log in logs]
"""


def followed(folder: Path, code: str) -> Any:
    return evaluate(f"FOLDER = {json.dumps(str(folder))}\n{WORKER}\ncounters.live.clear()\n{code}")


def test_a_step_that_the_engine_says_nothing_about_is_not_counted_nor_one_it_leaves_out(tmp_path: Path) -> None:
    logs = followed(
        tmp_path,
        """
engine = Engine()
engine.step(a=3, b=2, skip=["b"])
engine.step(told=None, c=5)
engine.step(told=["tokens"], d=5)
found = engine.close()
""",
    )
    assert logs == [[["sparsity", "a", 3]]]


def test_switched_off_the_worker_has_its_own_methods_and_switched_on_it_counts_requests_that_begin(
    tmp_path: Path,
) -> None:
    states, logs = followed(
        tmp_path,
        """
engine, states = Engine(), []
engine.step(a=3)
states.append(engine.state())
engine.switch('{"on": false}')
engine.step(a=1, b=4)
states.append(engine.state())
engine.switch('{"on": true}')
engine.step(a=1, b=1, c=5)
states.append(engine.state())
engine.ends("a", "b", "c")
engine.step(d=1)
found = [states, engine.close()]
""",
    )
    on, off = [["execute_model"], 1, 1], [[], 0, 0]
    assert states == [[["execute_model", "load_model"], 1, 1], off, on]
    assert logs == [
        [["sparsity", "a", 3], ["gap", "counting was switched off by the operator", 1]],
        [["sparsity", "c", 5], ["sparsity", "d", 1]],  # a and b were under way
    ]


def test_hooks_that_the_operator_took_off_are_not_expected(tmp_path: Path) -> None:
    """Else their absence would be told as a fault."""
    found = followed(
        tmp_path,
        """
engine, found = Engine(), []
for on in ("true", "false", "true"):
    engine.switch('{"on": %s}' % on)
    engine.step(a=1)
    hooks = engine.part._counting.hooks()["ffn_act"]
    found.append([hooks["expected"], hooks["attached"]])
engine.close()
""",
    )
    assert found == [[1, 1], [0, 0], [1, 1]]


def test_hooks_of_a_compiled_model_stay_and_count_for_no_one(tmp_path: Path) -> None:
    states, logs = followed(
        tmp_path,
        """
engine, states = Engine(eager=False), []
engine.step(a=3)
engine.switch('{"on": false}')
engine.step(a=1)
states.append(engine.state())
engine.switch('{"on": true}')
engine.step(b=2)
states.append(engine.state())
found = [states, engine.close()]
""",
    )
    assert states == [[[], 1, 0], [["execute_model"], 1, 1]]
    assert [[each[:2] for each in log] for log in logs] == [
        [["sparsity", "a"], ["gap", "counting was switched off by the operator"]],
        [["sparsity", "b"]],
    ]


def test_a_fault_gives_the_worker_its_methods_back_and_the_step_goes_on(tmp_path: Path) -> None:
    state, logs = followed(
        tmp_path,
        """
engine = Engine()
engine.step(a=3)
engine.part._counting.computed = lambda *args: 1 / 0
engine.step(a=1)
engine.step(a=1)
found = [engine.state(), engine.close()]
""",
    )
    assert state == [[], 0, 0]
    assert logs == [[["gap", "counting sparsity switched itself off: ZeroDivisionError", 1]]]


PUBLISHED = """
import os
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
published = folder / "metrics"
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
os.environ["SPARSEETY_METRICS_DIR"] = str(published)
def scrape():
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(published))
    return {f"{sample.name} {' '.join(sorted(sample.labels.values()))}": sample.value
            for family in registry.collect() for sample in family.samples}
"""


def test_what_a_worker_publishes_goes_on_over_a_pause_and_shows_that_it_was_one(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    paused, found = followed(
        tmp_path,
        f"""{PUBLISHED}
engine = Engine()
engine.step(a=3)
engine.switch('{{"on": false}}')
engine.step(b=4)
engine.part._publish()
paused = scrape()
engine.switch('{{"on": true}}')
engine.step(c=5)
engine.ends("c")
engine.step(d=1)
engine.close()
os.environ.pop("SPARSEETY_METRICS_DIR")
found = [paused, scrape()]
""",
    )
    counted = "sparseety_activation_elements_total 0 ffn_act m none prefill"
    assert (paused[counted], found[counted]) == (3 * 4, (3 + 5 + 1) * 4)
    attached = "sparseety_plugin_hooks 0 attached ffn_act"
    assert (paused[attached], paused["sparseety_plugin_hooks 0 expected ffn_act"]) == (0, 0)
    assert found["sparseety_plugin_hooks 0 ffn_act fired"] == 1
    assert found["sparseety_capture_segments_total closed plugin"] == 2
    assert found["sparseety_capture_records_total plugin sparsity_start"] == 2


def test_a_fault_of_the_counters_shows(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    found = followed(
        tmp_path,
        f"""{PUBLISHED}
engine = Engine()
engine.step(a=3)
engine.part._counting.computed = lambda *args: 1 / 0
engine.step(a=1)
engine.close()
os.environ.pop("SPARSEETY_METRICS_DIR")
found = scrape()
""",
    )
    assert found["sparseety_plugin_errors_total 0 sparsity"] == 1
    assert found["sparseety_plugin_hooks 0 attached ffn_act"] == 0


def test_where_nothing_can_be_published_counting_goes_on(tmp_path: Path) -> None:
    gone, logs = followed(
        tmp_path,
        f"""{PUBLISHED}
engine = Engine()  # the folder is not there
engine.step(a=3)
engine.part._publish()
gone = engine.part._metrics is None
engine.step(b=2)
engine.ends("a", "b")
engine.step(c=1)
os.environ.pop("SPARSEETY_METRICS_DIR")
found = [gone, engine.close()]
""",
    )
    assert gone
    assert sorted(logs[0]) == [["sparsity", "a", 3], ["sparsity", "b", 2], ["sparsity", "c", 1]]
