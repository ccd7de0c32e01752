"""Requests: what the front end sends (EngineCoreRequest) and what the scheduler keeps (Request)."""

import enum
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class RequestStatus(enum.IntEnum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass
class SamplingParams:
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    eos_token_id: int | None = 2
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    max_tokens: int = 16
    min_tokens: int = 0


@dataclass
class EngineCoreRequest:
    request_id: str
    external_req_id: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None = field(default_factory=SamplingParams)
    resumable: bool = False


class Request:
    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.sampling_params = request.sampling_params
        self.max_tokens = request.sampling_params.max_tokens if request.sampling_params else 1
        self.resumable = request.resumable
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.num_preemptions = 0
        self.found_again = 0
        self.blocks: list[int] = []
        self.kv_transfer_params: dict[str, Any] | None = None
        self.lora_request: Any = None
        self.in_flight = 0
        self.stale = 0
        self.drop_stale_output = False
        self.spec_token_ids: list[int] = []
        self.has_prefill_stats = True

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest, block_hasher: Any) -> "Request":
        return cls(request)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self) -> FinishReason | None:
        return _REASONS.get(self.status)
