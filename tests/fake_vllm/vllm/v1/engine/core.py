"""The engine's core: it owns the scheduler, and ends its workers before it."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class EngineCore:
    def __init__(self, vllm_config: Any, **options: Any) -> None:
        self.scheduler = Scheduler(vllm_config, **options)

    def shutdown(self) -> None:
        self.end_workers()
        self.scheduler.shutdown()

    def end_workers(self) -> None:
        """May take longer than the process has to live."""
