"""The engine's core: it owns the scheduler, and ends its workers before it."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class EngineCore:
    def __init__(self, vllm_config: Any, **options: Any) -> None:
        self.scheduler = Scheduler(vllm_config, **options)

        self._weight_version = "default"

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.reset_prefix_cache()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return []

    def set_weight_version(self, weight_version: str) -> None:
        self._weight_version = weight_version

    def shutdown(self) -> None:
        self.end_workers()
        self.scheduler.shutdown()

    def end_workers(self) -> None:
        """May take longer than the process has to live."""
