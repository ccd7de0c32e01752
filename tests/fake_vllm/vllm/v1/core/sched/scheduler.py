"""The scheduler. `schedule` may run ahead of `update_from_output`, as under async scheduling."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import FinishReason, Request, RequestStatus


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prefill_stats: Any = None


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = None
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_invalid_spec_tokens: dict[str, int] | None = None


@dataclass
class ModelRunnerOutput:
    sampled_token_ids: list[Any]
    req_id_to_index: dict[str, int]


class Scheduler:
    def __init__(self, vllm_config: Any, max_tokens_per_step: int = 64, blocks: int = 100) -> None:
        self.vllm_config = vllm_config
        self.max_tokens_per_step = max_tokens_per_step
        self.requests: dict[str, Request] = {}
        self.failing_requests: set[str] = set()
        self.stopped = False
        # Blocks of 4 tokens; a request keeps its own until it ends or is preempted, and they stay cached.
        spec = SimpleNamespace(block_size=4)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        self.kv_cache_manager = SimpleNamespace(block_pool=BlockPool(blocks))

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:  # a session's next turn
            self.requests[request.request_id].status = RequestStatus.WAITING
        else:
            self.requests[request.request_id] = request

    def schedule(self) -> SchedulerOutput:
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set(), new_block_ids=[])
        output = SchedulerOutput(scheduled_cached_reqs=cached)
        for request in self.requests.values():
            ahead = request.in_flight if request.status == RequestStatus.RUNNING else 0
            tokens = max(1, request.num_tokens + len(request.spec_token_ids) - request.num_computed_tokens - ahead)
            if request.status == RequestStatus.WAITING:
                request.num_computed_tokens = request.num_cached_tokens
                tokens = request.num_tokens - request.num_cached_tokens
            tokens = min(tokens, self.max_tokens_per_step)
            if request.status == RequestStatus.WAITING:
                output.scheduled_new_reqs.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        num_computed_tokens=request.num_cached_tokens,
                        block_ids=(self._blocks(request, tokens),),
                    )
                )
            else:
                cached.req_ids.append(request.request_id)
                if request.status == RequestStatus.PREEMPTED and request.num_preemptions:
                    cached.resumed_req_ids.add(request.request_id)
                    request.num_computed_tokens = request.found_again
                    tokens = min(request.num_tokens - request.num_computed_tokens, self.max_tokens_per_step)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.new_block_ids.append((self._blocks(request, tokens),))
            if request.spec_token_ids:
                output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids
                request.spec_token_ids = []
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens += tokens
            request.in_flight += 1
            output.num_scheduled_tokens[request.request_id] = tokens
        return output

    def _blocks(self, request: Request, tokens: int) -> list[int]:
        """Numbers of the blocks that a request gets for so many more tokens."""
        lacking = -(-(request.num_computed_tokens + tokens) // 4) - len(request.blocks)
        new = [block.block_id for block in self.kv_cache_manager.block_pool.get_new_blocks(max(0, lacking))]
        request.blocks += new
        return new

    def preempt(self, engine_id: str, drop_stale_output: bool = False, found_again: int = 0) -> None:
        """found_again: positions that the prefix cache has still when the request goes on."""
        request = self.requests[engine_id]
        request.found_again = found_again
        self._preempt_request(request, 0.0, drop_stale_output)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        request.blocks = []
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.stale, request.drop_stale_output = request.in_flight, drop_stale_output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        outputs: list[EngineCoreOutput] = []
        for engine_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(engine_id)
            if request is None or request.is_finished():
                continue
            request.in_flight -= 1
            stale = request.stale > 0
            request.stale -= stale
            if stale and request.drop_stale_output:
                continue
            row = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[engine_id]]
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(engine_id)
            if drafts and not stale:
                request.num_computed_tokens -= len(drafts) - (len(row) - 1)
            stopped = self._take(request, row)
            if not len(row):
                continue
            external = request.num_external_tokens
            stats = SimpleNamespace(num_external_cached_tokens=external) if request.has_prefill_stats else None
            request.has_prefill_stats = False
            reason = request.get_finished_reason()
            outputs.append(EngineCoreOutput(engine_id, row, reason, request.stop_reason, stats))
            if stopped and request.resumable:
                request.status = RequestStatus.PREEMPTED  # waits for its next turn
            elif stopped:
                del self.requests[engine_id]
        failing, self.failing_requests = self.failing_requests, set()
        for request in self.finish_requests(failing, RequestStatus.FINISHED_ERROR):
            outputs.append(EngineCoreOutput(request.request_id, [], request.get_finished_reason()))
        groups: dict[int, Any] = defaultdict(lambda: SimpleNamespace(outputs=[]))
        for output in outputs:
            groups[0].outputs.append(output)
        return dict(groups)

    def _take(self, request: Request, row: Any) -> bool:
        """Append the ids of a row up to a stop, and cut the row off there, in place."""
        params = request.sampling_params
        assert params is not None
        for count, token in enumerate(row, 1):
            request.output_token_ids.append(token)
            if token == params.eos_token_id:
                request.status = RequestStatus.FINISHED_STOPPED
            elif token in params.stop_token_ids:
                request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, token
            elif len(request.output_token_ids) >= request.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if request.is_finished():
                del row[count:]
                return True
        return False

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended = []
        for engine_id in set(self.requests if request_ids is None else request_ids):
            if (request := self.requests.pop(engine_id, None)) is not None:
                request.status = finished_status
                ended.append(request)
        return ended

    def shutdown(self) -> None:
        self.stopped = True
