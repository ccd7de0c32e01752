"""The plugin on the stand-in for vLLM in tests/fake_vllm: one engine to drive, and its log to read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sampler_hook import adapters
from sampler_hook.hook import Hook
from sampler_hook.settings import HookSettings
from sparseety.logreader import find_logs, in_order, read_log
from sparseety.records import AnyRecord, RequestAdded, RequestFinished, Row, Step

FAKE_VLLM = Path(__file__).parent / "fake_vllm"


def config(model: str = "a/model", **changes: Any) -> SimpleNamespace:
    """A VllmConfig, as far as the plugin reads it. `changes` go to its model_config."""
    model_config = SimpleNamespace(
        model=model,
        tokenizer=model,
        tokenizer_mode="auto",
        tokenizer_revision=None,
        revision=None,
        served_model_name="m",
        max_model_len=2048,
        generation_config="auto",
        dtype="torch.bfloat16",  # torch's own prints like this
        hf_config=SimpleNamespace(eos_token_id=2),
        get_vocab_size=lambda: 49152,
    )
    vars(model_config).update(changes)
    return SimpleNamespace(
        model_config=model_config,
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
    )


class Engine:
    """A scheduler with the plugin on it, as vLLM's EngineCore would use the two."""

    def __init__(
        self, folder: Path, vllm_config: Any = None, settings: dict[str, Any] | None = None, **options: Any
    ) -> None:
        from vllm.v1 import request
        from vllm.v1.core import block_pool
        from vllm.v1.core.sched import scheduler
        from vllm.v1.engine import core

        self.folder = folder
        self._request, self._scheduler = request, scheduler
        self.classes = [scheduler.Scheduler, request.Request, block_pool.BlockPool, core.EngineCore]
        self.own_methods = [dict(vars(each)) for each in self.classes]
        self.hook = Hook(HookSettings(folder, **{"metrics": False} | (settings or {})), adapters.probe(untested=False))
        self.hook.attach()
        self.core = core.EngineCore(vllm_config or config(), **options)
        self.scheduler = self.core.scheduler

    def add(
        self,
        external_id: str | None = "chatcmpl-a",
        engine_id: str | None = None,
        prompt: list[int] | None = None,
        resumable: bool = False,
        pooling: bool = False,
        lacking: str | None = None,
        **params: Any,
    ) -> Any:
        """Send a request, as the front end does; returns the scheduler's Request. `lacking`: a parameter not there."""
        request = self._request.EngineCoreRequest(
            engine_id or f"{external_id}-0a1b2c3d",
            external_id,
            prompt or [1, 10, 11],
            None if pooling else self._request.SamplingParams(**params),
            resumable,
        )
        if lacking:
            delattr(request.sampling_params, lacking)
        taken = self._request.Request.from_engine_core_request(request, None)
        self.scheduler.add_request(taken)
        return taken

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def take(self, scheduled: Any, *rows: Any) -> dict[int, Any]:
        """The model has sampled `rows`, one for each request of the step."""
        index = {engine_id: row for row, engine_id in enumerate(scheduled.num_scheduled_tokens)}
        outputs: dict[int, Any] = self.scheduler.update_from_output(
            scheduled, model_runner_output=self._scheduler.ModelRunnerOutput(list(rows), index)
        )
        return outputs

    def step(self, *rows: Any) -> list[tuple[str, list[int]]]:
        """One step; returns what the front end gets: (engine id, ids)."""
        outputs = self.take(self.schedule(), *rows)
        return [(out.request_id, out.new_token_ids) for group in outputs.values() for out in group.outputs]

    def abort(self, *requests: Any) -> None:
        self.scheduler.finish_requests(
            [request.request_id for request in requests], self._request.RequestStatus.FINISHED_ABORTED
        )

    @property
    def unwrapped(self) -> bool:
        """The classes have vLLM's own methods, and nothing else."""
        return [dict(vars(each)) for each in self.classes] == self.own_methods

    def settle(self) -> None:
        """Wait until the attendant has made records of all that was queued."""
        for journal in list(self.hook._journals):
            self.hook._drain(journal)

    def look_around(self) -> None:
        """What is due once a second, now."""
        self.settle()
        self.hook.look_around()

    def log(self) -> list[AnyRecord]:
        """The log, after an orderly shutdown."""
        self.scheduler.shutdown()
        return records(self.folder)

    def rows(self) -> list[Row]:
        return [row for record in self.log() if isinstance(record, Step) for row in record.rows]

    def added(self) -> list[RequestAdded]:
        return [record for record in self.log() if isinstance(record, RequestAdded)]

    def finished(self) -> list[RequestFinished]:
        return [record for record in self.log() if isinstance(record, RequestFinished)]


@contextmanager
def fake_vllm(folder: Path, vllm_config: Any = None, **options: Any) -> Iterator[Engine]:
    """An Engine on classes of its own, which go with it."""
    sys.path.insert(0, str(FAKE_VLLM))
    try:
        engine = Engine(folder, vllm_config, **options)
        try:
            yield engine
        finally:
            engine.hook.detach()
            engine.hook.close()
    finally:
        sys.path.remove(str(FAKE_VLLM))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def records(folder: Path) -> list[AnyRecord]:
    """All records of the one log in a folder; a damaged line fails the test."""
    (log,) = logs(folder)
    return log


def logs(folder: Path) -> list[list[AnyRecord]]:
    """The records of each log in a folder, the oldest first."""
    if not folder.exists():
        return []
    paths = [path for path in find_logs([str(folder)]) if path.name.startswith("engine-")]  # some may be packed by now
    return [_records(path) for path in in_order(paths)]


def _records(path: Path) -> list[AnyRecord]:
    problems: list[object] = []
    found = [record for _, record in read_log(path, problems.append)]
    assert problems == []
    return found
