"""The records of the capture log: what the proxy saw and what the engine sampled.

Both programs write JSON Lines, one record a line, tagged by `event`. A field that holds its default is left out.
`ts` is Unix seconds in steps of a microsecond, advanced by the monotonic clock. Ids of tokens are content: whoever has
the tokenizer reads them as text. docs/capture-format.md lists the same fields; a test holds the two together.
"""

from typing import Literal

import msgspec

FORMAT_VERSION = 1  # rises with any change that a reader can notice; has nothing to do with the release number

Source = Literal["proxy", "engine", "worker"]
Endpoint = Literal["chat", "completions", "responses", "messages"]
Mounting = Literal["proxy", "middleware"]
Kind = Literal[
    "text", "reasoning", "tool_call", "role", "finish", "usage", "error", "comment", "control", "done", "unparsed"
]
Phase = Literal["prefill", "decode", "recomputed"]
Role = Literal["prefill", "decode"]
EventKind = Literal[
    "sleep", "wake", "weight_update", "weight_version", "cache_reset", "control", "hook_silent", "part_off"
]
KvKind = Literal["allocated", "reused", "evicted", "preempted"]
Outcome = Literal[
    "complete",
    "client_gone",
    "upstream_broken",
    "upstream_unreachable",
    "upstream_timeout",  # a limit of the proxy's own; none is set by default that a long prefill could meet
    "shutdown",
    "internal_error",
]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """One line of a log."""

    ts: float  # when it happened, by the writer's clock


# ---------------------------------------------------------------------------------------------- the log itself


class Scope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this witness was obliged to record. An absence means something only inside it."""

    endpoints: list[Endpoint] = []  # the proxy: endpoints whose text is recorded
    mounting: Mounting = "proxy"  # the proxy: a hop of its own, or inside the server, blind to the network before it
    upstream: str | None = None  # the proxy: where it sends requests, without credentials; None: inside the server
    exclusive: bool = False  # the proxy: the operator says that every request of the upstream passes through here
    sample: float = 1.0  # share of requests recorded, 0..1, by a keyed hash of the reply's id
    sample_key: str | None = None  # names the key of that hash; two witnesses with one key choose alike


class LogOpen(Record, frozen=True, kw_only=True, tag="log_open"):
    """The first line of each file. (source, host, pid, start) names the writer, whose log may be cut into segments."""

    format: int  # FORMAT_VERSION of the writer
    source: Source  # which program wrote this
    host: str  # where it ran
    pid: int  # its process
    start: float  # when this writer was opened; the same in all its segments
    segment: int = 0  # number of this file among the segments of its writer, from 0
    program: str  # "sparseety 0.1.0"
    scope: Scope  # what it had to record


class LogClose(Record, frozen=True, kw_only=True, tag="log_close"):
    """The last line of a file that was closed in order. Without it the writer runs still, or was killed."""

    records: int  # in this file, before this one
    lost: int  # records that this writer could not write so far; each is covered by a `gap`
    continued: bool = False  # the writer goes on in another segment


class Gap(Record, frozen=True, kw_only=True, tag="gap"):
    """Records that are missing here, so that nobody takes their absence for a fact."""

    reason: str  # why they are missing
    count: int  # records lost; at most so many, where somebody else cut or deleted the file
    captures: list[int] = []  # the proxy's requests concerned
    requests: list[int] = []  # the engine's requests concerned
    # neither: it is not known which requests are concerned; any may be that was open since the record before this one
    no_request: bool = False  # none is concerned: what was lost speaks of none, such as blocks evicted from the cache


# --------------------------------------------------------------------------------------------------- the proxy


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts as the server states them."""

    prompt_tokens: int | None = None  # of the prompt, the cached ones included
    completion_tokens: int | None = None  # summed over all choices
    cached_tokens: int | None = None  # of the prompt, taken from the prefix cache


class RequestParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client asked for, as far as it decides which text is right. Absent in the request: the default."""

    model: str | None = None  # as the client names it
    stream: bool = False  # an event stream was asked for
    n: int = 1  # choices for each prompt
    max_tokens: int | None = None  # or max_completion_tokens, max_output_tokens
    min_tokens: int = 0  # no stop before so many
    temperature: float | None = None  # of sampling
    top_p: float | None = None  # of sampling
    seed: int | None = None  # of sampling
    stop: list[str] = []  # strings that end the text; /v1/messages: stop_sequences
    stop_token_ids: list[int] = []  # ids that end it
    include_stop_str_in_output: bool = False  # the stop string or token stays in the text
    skip_special_tokens: bool = True  # special tokens have no text
    spaces_between_special_tokens: bool = True  # vLLM: spaces between shown special tokens
    ignore_eos: bool = False  # end of sequence does not end it
    echo: bool = False  # the prompt's text comes first
    detokenize: bool = True  # false: no text is made
    use_beam_search: bool = False  # beam search, which the join cannot follow
    include_reasoning: bool = True  # false: reasoning text is left out
    return_token_ids: bool = False  # ids come with the text
    logprobs: bool = False  # log probabilities come with the text
    tools: bool = False  # the request offers tools
    structured: bool = False  # a schema or grammar constrains the text
    include_usage: bool = False  # stream_options.include_usage
    prompts: int = 1  # /v1/completions: number of prompts
    messages: int | None = None  # number of messages or input items; not of /v1/completions
    prompt_chars: int | None = None  # code points of all prompt text; None where the prompt is token ids
    prompt_sha256: str | None = None  # of the one text prompt that is to be echoed, to check what comes back


class RequestStart(Record, frozen=True, kw_only=True, tag="request_start"):
    """A request has arrived, its body read to the end or to the capture limit. Written for every request."""

    capture: int  # this writer's own request number, from 1
    uuid: str  # names the request across all logs
    method: str  # HTTP method
    path: str  # without the query, which may hold credentials
    endpoint: Endpoint | None = None  # None: passed through, sizes and status only
    x_request_id: str | None = None  # the client's X-Request-Id
    session: str | None = None  # the client's X-Session-Id
    parameters: RequestParameters | None = None  # None: no endpoint of ours, or a body that is not its JSON


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool call of a reply, or what one stream event adds to it."""

    index: int = 0  # which call of the choice, as the server numbers them
    name: str | None = None  # the function's; in a stream, on the call's first event only
    arguments: str = ""  # JSON text as the server sent it; in a stream, what this event adds


class Chunk(Record, frozen=True, kw_only=True, tag="chunk"):
    """One event of a stream; one record for each choice and kind in it. Made from a copy, after forwarding."""

    capture: int  # the request, as in request_start
    wire_index: int  # number of the SSE event in this stream, from 1
    read: int | None = None  # number of the network read that completed it, from 1; None: equal to wire_index
    kind: Kind = "text"  # what the record is about
    choice: int = 0  # the choice's index in the reply
    block: int = 0  # /v1/messages: the content block; /v1/responses: the output item
    chunk_index: int | None = None  # this choice's text-bearing records, from 1; None: no text
    delta_text: str = ""  # the text it adds; for tool_call, the arguments of all calls in it
    tool_calls: list[ToolCall] | None = None  # for tool_call: which calls these arguments belong to
    delta_len: int | None = None  # code points; None: as many as delta_text has
    accumulated_len: int | None = None  # code points of this choice so far; None: no text
    token_ids: list[int] | None = None  # as the server sent them (return_token_ids)
    logprob_count: int | None = None  # number of logprob entries, one a token
    usage: Usage | None = None  # as the server sent it
    finish_reason: str | None = None  # as the server sent it
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the choice, where it is said
    response_id: str | None = None  # on the first record that knows it
    raw: str | None = None  # the event less its blank line, where parsing would lose something
    raw_base64: bytes | None = None  # the same, where it is not UTF-8


class Stamps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened at the proxy, Unix seconds; None: they did not."""

    sent: float | None = None  # the request's last byte handed to the upstream connection
    headers: float | None = None  # the reply's head received
    first_chunk: float | None = None  # first body byte
    first_token: float | None = None  # first event with text, of any choice
    last_token: float | None = None  # last event with text, of any choice
    end: float | None = None  # the transfer was over, in whatever way


class StreamDone(Record, frozen=True, kw_only=True, tag="stream_done"):
    """An event stream has ended, in whatever way."""

    capture: int  # the request, as in request_start
    outcome: Outcome  # how it ended
    status: int  # HTTP status code
    chunk_count: int  # text-bearing records, all choices
    total_text_len: int  # code points, all choices
    events: int  # SSE events, a cut last one included
    reads: int  # network reads with data
    bytes: int  # body bytes received from the upstream
    sha256: str  # of those bytes, hexadecimal
    end_marker: bool  # the endpoint's end marker was seen: [DONE], response.completed, message_stop
    stamps: Stamps  # when things happened
    usage: Usage | None = None  # the last one seen
    error: str | None = None  # what broke, where outcome is not "complete"


class ReplyChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of a reply that was no stream."""

    choice: int = 0  # its index in the reply
    text: str = ""  # its content
    reasoning: str = ""  # its reasoning text
    calls: list[ToolCall] = []  # the tool calls in it, in order
    token_ids: list[int] | None = None  # as the server sent them (return_token_ids)
    logprob_count: int | None = None  # number of logprob entries, one a token
    finish_reason: str | None = None  # as the server sent it
    stop_reason: int | str | None = None  # as the server sent it


class Response(Record, frozen=True, kw_only=True, tag="response"):
    """A reply that was no event stream or was not read (see `unread`), or a request that got none."""

    capture: int  # the request, as in request_start
    outcome: Outcome  # how it ended
    stamps: Stamps  # when things happened
    status: int | None = None  # HTTP status code; None: no reply arrived
    bytes: int = 0  # body bytes received from the upstream
    sha256: str | None = None  # of those bytes, hexadecimal; None: no body
    response_id: str | None = None  # the id the server put into the reply
    choices: list[ReplyChoice] = []  # empty: not one of our endpoints, an error body, or not readable as its JSON
    usage: Usage | None = None  # as the server sent it
    unread: str | None = None  # why the body of one of our endpoints was not read into choices
    error: str | None = None  # what broke, where outcome is not "complete"


# -------------------------------------------------------------------------------------------------- the engine


class TokenizerIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tokenizer the engine serves with."""

    name: str  # path or repository name, as given to the engine
    mode: str = "auto"  # vLLM's tokenizer mode
    files: dict[str, str] = {}  # file name -> sha256, of the tokenizer's files that were found
    vocab_size: int | None = None  # rows of the model's output layer: every sampled id is below it


class AttentionLayers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers of one kind, as the model's configuration states them; not measured."""

    layer_type: str  # full, sliding, chunked, linear, sparse
    layers: int  # how many
    window: int | None = None  # sliding, chunked: tokens of the window or chunk


class EngineStart(Record, frozen=True, kw_only=True, tag="engine_start"):
    """An engine core with the plugin has come up."""

    vllm: str  # its version
    model: str  # path or repository name, as given to the engine
    tokenizer: TokenizerIdentity  # what it decodes with
    served_names: list[str] = []  # names that clients may use
    max_model_len: int | None = None  # tokens, prompt and output together
    reasoning_parser: str | None = None  # its name, where one is on
    data_parallel_rank: int = 0  # as vLLM states it
    hooks_expected: list[str] = []  # what the plugin wanted to wrap
    hooks_attached: list[str] = []  # what it wrapped
    capture: list[str] = []  # what was asked for: tokens, kv, ...
    block_size: int | None = None  # tokens of a KV block
    attention: list[AttentionLayers] = []  # derived from the model's configuration
    dtype: str | None = None  # of the weights and of what is computed, as torch calls it: bfloat16
    batch_invariant: bool | None = None  # vLLM's VLLM_BATCH_INVARIANT: results do not depend on what runs beside


class EngineEvent(Record, frozen=True, kw_only=True, tag="engine_event"):
    """Something that changes what later requests get, or what is recorded of them."""

    kind: EventKind  # what happened
    detail: str | None = None  # what exactly: the level of a sleep, the cache, the method, the part
    done: bool | None = None  # cache_reset: whether the engine says that it did it
    weight_version: str | None = None  # weight_version: the new one
    sample: float | None = None  # control: share of requests recorded from here on
    sample_key: str | None = None  # control: as in the scope
    near_zero: float | None = None  # control: threshold of near-zero activations from here on


class RequestAdded(Record, frozen=True, kw_only=True, tag="request_added"):
    """The scheduler has taken a request (one choice of one prompt)."""

    request: int  # this writer's own request number, from 1
    external_id: str  # as in the reply's `id`, less vLLM's random suffix and child prefix
    engine_id: str  # the engine's own name for it
    prompt_len: int  # tokens
    child: int = 0  # k of n > 1
    prompt_head: list[int] = []  # the first 2 ids of the prompt, where they are one and the same; else empty
    prompt_tail: list[int] = []  # the last 16 ids of the prompt
    stop: list[str] = []  # strings that end the text
    stop_token_ids: list[int] = []  # the request's own; eos_ids are not among them
    eos_ids: list[int] = []  # ids that end it as "end of sequence"; empty under ignore_eos
    include_stop_str_in_output: bool = False  # the stop string or token stays in the text
    skip_special_tokens: bool = True  # special tokens have no text
    spaces_between_special_tokens: bool = True  # vLLM: spaces between shown special tokens
    detokenize: bool = True  # false: no text is made
    max_tokens: int | None = None  # output tokens at most
    min_tokens: int = 0  # no stop string, stop id or end of sequence counts before so many
    attempt: int = 1  # how often this external id and child has come to this engine, this time included
    role: Role | None = None  # where prefill and decode run in different engines: this one's part
    lora: str | None = None  # the adapter's name


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step did for one request."""

    request: int  # the request, as in request_added
    first_index: int  # 0-based position of ids[0] in the output; a jump between rows means that ids are missing
    ids: list[int] = []  # as accepted by the scheduler; rejected drafts are not in here
    start: int | None = None  # position of the first token computed in this step; None: prompt_len + first_index - 1
    phase: Phase = "decode"  # prefill: computed the prompt's end; recomputed: positions computed before a preemption
    drafts: int = 0  # draft tokens proposed to this step
    accepted: int = 0  # of these, accepted
    discarded: list[int] = []  # sampled, then thrown away (past a stop, or after the request had ended)


class Step(Record, frozen=True, kw_only=True, tag="step"):
    """One engine step that sampled something."""

    step: int  # counts from 0 within this log
    weight_version: str | None = None  # of the weights; None: as in the step before
    rows: list[Row]  # one for each request that got something


class RequestFinished(Record, frozen=True, kw_only=True, tag="request_finished"):
    """The scheduler has let go of a request."""

    request: int  # the request, as in request_added
    total_ids: int  # ids accepted over its whole life
    finish_reason: str | None = None  # the engine's word: stop, length, abort, error, repetition
    stop_reason: int | str | None = None  # the stop token id, where one ended it
    cached_tokens: int | None = None  # prompt tokens taken from a cache; None: not known
    external_tokens: int = 0  # of these, fetched from another engine or store
    computed: int | None = None  # prompt tokens computed here for the first time; None: not known
    preemptions: int = 0  # how often it was put back to wait
    evicted: int = 0  # positions whose KV it had to give up when preempted
    reused_again: int = 0  # of these, found in the prefix cache when it went on
    recomputed: int = 0  # of these, computed once more
    drafts: int = 0  # draft tokens proposed, where the step's result was taken
    drafts_accepted: int = 0  # of these, accepted
    drafts_rejected: int = 0  # of these, rejected
    attended: dict[str, tuple[int, int]] = {}  # layer type -> (positions read, positions before), derived, output only


class KvBlocks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to KV blocks that follow each other in one request."""

    kind: KvKind  # what happened
    first: int  # position of the first token in the first block
    tokens: int  # positions that the blocks have room for
    blocks: list[int]  # the engine's block numbers, in order of position; empty: not known
    request: int | None = None  # whose positions, as in request_added; evicted: who put them there; None: not recorded
    group: int = 0  # the engine's KV cache group: layers that share a block table


class Kv(Record, frozen=True, kw_only=True, tag="kv"):
    """KV blocks handed out or taken away before a step."""

    step: int  # as in step
    events: list[KvBlocks]  # in the order in which they happened


# --------------------------------------------------------------- the workers: what the model computed with its zeros


class Site(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A module whose input is counted: the down projection of an MLP, which sees what the activation made."""

    name: str  # the module's name in the model
    width: int  # elements of one token here; under tensor parallelism, this rank's share
    layer: int | None = None  # the layer's number, from 0; None: its name has none


class Router(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A module whose output decides which experts a token goes to."""

    name: str  # the module's name in the model
    experts: int  # to choose from
    top_k: int  # chosen for each token
    layer: int | None = None  # the layer's number, from 0; None: its name has none
    by_callback: bool = False  # choices as vLLM's own callback for them tells; false: the top k of its logits


class SparsityStart(Record, frozen=True, kw_only=True, tag="sparsity_start"):
    """A model with the counters on has been loaded, in this process. Lists of later records go by these lists."""

    runtime: str  # "vllm 0.32.0" or "transformers 5.19.0"
    model: str  # path or repository name, as given to the runtime
    threshold: float  # near zero: absolute value <= threshold
    sites: list[Site]  # what is counted here
    routers: list[Router] = []  # whose choices are counted here
    not_observed: dict[str, str] = {}  # module name -> why nothing is counted there
    per_token: bool = False  # counts of single tokens are written too
    tensor_parallel_rank: int = 0  # counts of the ranks of one group add up
    tensor_parallel_size: int = 1  # ranks in it
    pipeline_parallel_rank: int = 0  # its sites are other layers
    data_parallel_rank: int = 0  # its requests are other requests


class ParameterZeros(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The zeros of one weight."""

    name: str  # the parameter's name in the model
    zeros: int  # elements that are exactly zero
    elements: int  # elements, on this rank


class Weights(Record, frozen=True, kw_only=True, tag="weights"):
    """The weights' zeros, counted once after loading. Not the activations', and no proof that work is skipped."""

    parameters: list[ParameterZeros]  # of two dimensions or more, and floating point
    not_read: list[str] = []  # packed or quantized: their stored zeros are not the weight's


class Sparsity(Record, frozen=True, kw_only=True, tag="sparsity"):
    """Zeros among the inputs of the sites, for some tokens of one request. Records of a request and phase add up."""

    engine_id: str  # the engine's own name for the request, as in request_added
    phase: Phase  # prefill: prompt; decode: output; recomputed: computed before, then preempted
    tokens: int  # computed; what was observed of them is in `elements`
    zeros: list[int]  # exact zeros, one number a site
    near: list[int]  # elements near zero (threshold of sparsity_start), the zeros included, one number a site
    elements: list[int]  # elements observed, one number a site; 0: not observed
    positions: list[tuple[int, int]] = []  # (first position, count) of the tokens; empty: not known
    drafts: int = 0  # of the tokens: proposed by speculation, perhaps rejected afterwards
    step: int | None = None  # the engine's step that computed the last of them
    token_zeros: list[list[int]] | None = None  # per site, per token: exact zeros; -1: not observed
    token_near: list[list[int]] | None = None  # the same for near zero


class Experts(Record, frozen=True, kw_only=True, tag="experts"):
    """Which experts some tokens of one request went to. Written by one rank; records of a request and phase add up."""

    engine_id: str  # the engine's own name for the request, as in request_added
    phase: Phase  # as in sparsity
    tokens: int  # computed
    counts: list[list[int]]  # tokens per expert, one list a router
    not_observed: list[int] = []  # choices that were not seen, one number a router; empty: none
    positions: list[tuple[int, int]] = []  # (first position, count) of the tokens; empty: not known
    drafts: int = 0  # of the tokens: proposed by speculation, perhaps rejected afterwards
    step: int | None = None  # the engine's step that computed the last of them
    token_experts: list[list[list[int]]] | None = None  # per router, per token: experts chosen; -1: not observed


AnyRecord = (
    LogOpen
    | LogClose
    | Gap
    | RequestStart
    | Chunk
    | StreamDone
    | Response
    | EngineStart
    | EngineEvent
    | RequestAdded
    | Step
    | RequestFinished
    | SparsityStart
    | Weights
    | Sparsity
    | Experts
    | Kv
)


def subjects(record: AnyRecord) -> tuple[list[int], list[int]]:
    """The requests a record speaks of: (captures of a proxy log, requests of an engine log).

    See concerns_none for what it means that there are none.
    """
    match record:
        case RequestStart() | Chunk() | StreamDone() | Response():
            return [record.capture], []
        case RequestAdded() | RequestFinished():
            return [], [record.request]
        case Step():
            return [], [row.request for row in record.rows]
        case Kv():
            return [], [blocks.request for blocks in record.events if blocks.request is not None]
        case Gap():
            return record.captures, record.requests
        case _:
            return [], []


def concerns_none(record: AnyRecord) -> bool:
    """No request is judged otherwise for want of this record: it speaks of none, and changes what holds for none."""
    match record:
        case Kv():
            return not any(subjects(record))
        case Gap():
            return record.no_request
        case _:
            return False
