"""What a stability run keeps of each request, and what the statistics are made of."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import overload

import msgspec

Top = list[tuple[int, float]]
"""The likeliest tokens at one position as (id, log probability in nats), best first. Empty: the server sent none."""


class Tops(Sequence[Top]):
    """The same for each token of an output, in an eighth of the memory that lists take: a run has millions of them."""

    __slots__ = ("_ends", "_ids", "_logprobs")

    def __init__(self, tops: Iterable[Top]) -> None:
        tops = list(tops)
        self._ends = array("Q", accumulate(map(len, tops), initial=0))
        self._ids = array("q", (token for token, _ in chain.from_iterable(tops)))
        self._logprobs = array("d", (logprob for _, logprob in chain.from_iterable(tops)))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Top: ...
    @overload
    def __getitem__(self, index: slice) -> list[Top]: ...
    def __getitem__(self, index: int | slice) -> Top | list[Top]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = slice(self._ends[place], self._ends[place + 1])
        return list(zip(self._ids[part], self._logprobs[part], strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What sparsity did to one request, from the engine's log. None: nothing in the log says it, which is not zero."""

    computed: int | None = None  # prompt positions computed
    reused: int | None = None  # prompt positions found in the prefix cache
    recomputed: int | None = None  # positions computed again after a preemption
    evicted: int | None = None  # KV token slots given up
    preemptions: int | None = None
    attended: int | None = None  # positions read by attention, of all layers and output tokens
    context: int | None = None  # positions that full attention would have read
    drafted: int | None = None  # draft tokens proposed
    accepted: int | None = None  # of them
    zeros: int | None = None  # exact zeros at the input of the down projections, of all layers
    elements: int | None = None  # elements counted there


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a run and its reply. A request that failed has an `error` and whatever came before it."""

    arm: str  # a1, a2, b, or the name of a yardstick
    prompt: int  # its place in the prompts file, from 0
    repeat: int  # from 0, counted on over the loads, so that (prompt, repeat, cache) names one output of an arm
    load: int  # requests at once while it ran; those of a1 and a2 with the same repeat differ
    cache: str  # cold or warm
    request_id: str  # sent as X-Request-Id
    response_id: str | None = None  # the id in the reply
    ids: list[int] = []  # output tokens as the server names them (`return_token_ids`)
    top: Sequence[Top] = []  # one for each of `ids`, or empty where no logprobs came
    finish: str | None = None  # finish_reason
    error: str | None = None
    prompt_sha256: str | None = None  # of the prompt's ids, as comma-separated decimals
    prompt_tokens: int | None = None
    ttft: float | None = None  # seconds from sending to the first token
    tpot: float | None = None  # mean seconds between tokens after the first; None for fewer than two
    verdict: str | None = None  # of verify-tokens: pass, fail, incomplete, out_of_scope; None: not verified
    served: Served | None = None  # None: no engine log holds this request
    epoch: str | None = None  # engine and how often it slept, woke, got weights or lost its cache before; None: unknown


class Forced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Teacher forcing: a reference's prompt and output as one prompt, and what this arm thinks of each output token.

    Runs prefill kernels only, and skips prefix-cache reads: says nothing about what is sparse in decode alone.
    """

    arm: str
    prompt: int
    reference: str  # request_id of the output whose ids were fed
    ids: list[int]  # these ids
    top: list[Top] = []  # one for each of them: what this arm would have sampled there
    error: str | None = None


class Engine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's own log says of it (`engine_start`)."""

    vllm: str  # its version
    model: str  # path or repository name
    dtype: str | None = None  # bfloat16
    tokenizer_sha256: str | None = None  # of tokenizer.json; None: it has none, or the plugin could not read it
    max_model_len: int | None = None
    block_size: int | None = None
    attention: list[str] = []  # "30 sliding (64)": layers, kind, tokens of its window
    batch_invariant: bool | None = None


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an arm ran on, so that nobody compares what cannot be compared. The last one of an arm counts."""

    arm: str
    ts: float  # Unix seconds
    url: str  # without credentials
    version: str | None = None  # as /version says
    model: str  # as requests name it
    root: str | None = None  # as /v1/models says: path or repository name
    max_model_len: int | None = None  # as /v1/models says
    parameters: dict[str, bool | int | float] = {}  # sampling, as sent with every request
    engine: Engine | None = None  # None: no engine's log holds a request of this arm
