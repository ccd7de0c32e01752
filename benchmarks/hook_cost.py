"""What the plugin adds to an engine step, over a scheduler that does nothing itself.

    python -m benchmarks.hook_cost [--steps 400] [--batches 1,64,256,1024]

A step yields one token for each request. Two figures: what the engine's own thread is held up, which is what a client
can notice; and what making the records takes beside it, in a thread that runs while the engine waits for its workers.
"""

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sampler_hook.adapters import POINTS, SCHEDULER, Target, Vllm
from sampler_hook.hook import Hook
from sampler_hook.settings import HookSettings


class Scheduler:
    """Gives back what it is told to, as vLLM's gives back what it made of a step."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None: ...

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return model_runner_output.given_back

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...


def config() -> SimpleNamespace:
    model = SimpleNamespace(
        model="none", tokenizer="none", tokenizer_mode="auto", tokenizer_revision=None, served_model_name="m",
        max_model_len=1 << 20, generation_config="vllm", hf_config=None, get_vocab_size=lambda: 1 << 17,
    )  # fmt: skip
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(data_parallel_rank=0))


def request(name: str) -> SimpleNamespace:
    params = SimpleNamespace(
        stop=[], stop_token_ids=[], eos_token_id=2, ignore_eos=False, include_stop_str_in_output=False,
        skip_special_tokens=True, spaces_between_special_tokens=True, detokenize=True, min_tokens=0,
    )  # fmt: skip
    return SimpleNamespace(
        request_id=f"chatcmpl-{name}-0a1b2c3d", sampling_params=params, num_prompt_tokens=100,
        prompt_token_ids=list(range(100)), max_tokens=1 << 16,
    )  # fmt: skip


def step(requests: list[Any], at: int) -> tuple[Any, Any]:
    """What vLLM's scheduler planned, and what the model made of it: each request computes one token and gets one."""
    names = [each.request_id for each in requests]
    cached = SimpleNamespace(
        req_ids=names if at else [],
        num_computed_tokens=[100 + at - 1] * len(names) if at else [],
        resumed_req_ids=set(),
    )
    new = [] if at else [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in names]
    planned = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 1 if at else 100),
        scheduled_spec_decode_tokens={},
        num_invalid_spec_tokens=None,
    )
    rows = [[(at * 7919 + row * 104729) % 100_000] for row in range(len(names))]
    outputs = [
        SimpleNamespace(request_id=name, new_token_ids=row, finish_reason=None)
        for name, row in zip(names, rows, strict=True)
    ]
    index = {name: row for row, name in enumerate(names)}
    groups = {0: SimpleNamespace(outputs=outputs)}
    return planned, SimpleNamespace(sampled_token_ids=rows, req_id_to_index=index, given_back=groups)


def measure(batch: int, steps: int) -> tuple[float, float, int]:
    """(microseconds that a step's thread is held up, microseconds of making records a step, bytes a token)."""
    with tempfile.TemporaryDirectory() as folder:
        targets = [Target(Scheduler, name, part) for name, part in POINTS[SCHEDULER] if name in vars(Scheduler)]
        hook = Hook(HookSettings(Path(folder), metrics=False), Vllm("0.0", targets))
        hook.attach()
        scheduler = Scheduler(config())
        (journal,) = hook._journals
        journal.capture.wake = threading.Event().set  # nobody wakes: records are made below, where they can be timed
        requests = [request(str(number)) for number in range(batch)]
        for each in requests:
            scheduler.add_request(each)
        held, making = [], []
        for at in range(steps):
            planned, made = step(requests, at)
            own = _elapsed(lambda: Scheduler.update_from_output.__wrapped__(scheduler, planned, made))  # type: ignore[attr-defined]  # noqa: B023
            held.append(_elapsed(lambda: scheduler.update_from_output(planned, made)) - own)  # noqa: B023
            making.append(_elapsed(journal.capture.drain))
        hook.detach()
        hook.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return statistics.median(held), statistics.median(making), size // (batch * steps)


def _elapsed(action: Any) -> float:
    began = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - began) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batches", default="1,64,256,1024")
    arguments = parser.parse_args()
    print("batch   held up   a row over 20 us   making records   a row   raw bytes a token")
    for batch in map(int, arguments.batches.split(",")):
        held, making, size = measure(batch, arguments.steps)
        print(
            f"{batch:5}  {held:6.1f} us  {max(0.0, held - 20) / batch:10.3f} us  {making:14.1f} us  "
            f"{making / batch:5.2f} us  {size:8}"
        )


if __name__ == "__main__":
    main()
