"""Read the JSON of OpenAI's Responses API: stream events and whole replies.

One reply is one choice; its output items (message, reasoning, function call) are told apart by `block`. The events that
say again what came before (`response.output_text.done` and the like) are control events; only the last one, which
holds the whole reply, is held against the text that came.
Source: OpenAI API reference (Responses, streaming events) and replies of vLLM 0.32.
"""

import msgspec

from sparseety.chunks import ChunkBody, Part, ReplyBody, Unreadable, decode
from sparseety.records import Kind, ReplyChoice, ToolCall, Usage


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None

    def read(self) -> Usage:
        details = self.input_tokens_details
        return Usage(
            prompt_tokens=self.input_tokens,
            completion_tokens=self.output_tokens,
            cached_tokens=details.cached_tokens if details else None,
        )


class _Content(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    logprobs: list[msgspec.Raw] | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    content: list[_Content] | None = None

    def text(self) -> str:
        return "".join(content.text or content.refusal or "" for content in self.content or ())


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    id: str | None = None
    object: str | None = None
    status: str | None = None
    output: list[_Item] | None = None
    incomplete_details: _Incomplete | None = None
    usage: _Usage | None = None

    def finish_reason(self) -> str | None:
        """Why it ended: the reason for which it is incomplete, else its status ("completed")."""
        reason = self.incomplete_details.reason if self.incomplete_details else None
        return reason or self.status or None

    def text(self, kind: str) -> str:
        return "".join(item.text() for item in self.output or () if item.type == kind)


class _Event(msgspec.Struct):
    type: str | None = None
    output_index: int = 0
    delta: str | None = None
    logprobs: list[msgspec.Raw] | None = None
    item: _Item | None = None
    response: _Response | None = None
    error: dict[str, msgspec.Raw] | str | None = None


_event = msgspec.json.Decoder(_Event)
_response = msgspec.json.Decoder(_Response)

_DELTAS: dict[str | None, Kind] = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "tool_call",
    "response.mcp_call_arguments.delta": "tool_call",
    "response.custom_tool_call_input.delta": "tool_call",
    "response.code_interpreter_call_code.delta": "tool_call",
}
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
# They frame what the deltas say, or say it again.
_PLAIN = frozenset(
    {
        "response.queued",
        "response.created",
        "response.in_progress",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.done",
        "response.refusal.done",
        "response.reasoning_part.added",
        "response.reasoning_part.done",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.done",
        "response.mcp_call_arguments.done",
        "response.custom_tool_call_input.done",
        "response.code_interpreter_call_code.done",
    }
)
_TEXT_ITEMS = frozenset({"message", "reasoning"})


def read_chunk(data: bytes) -> ChunkBody:
    """Read the data of one stream event. Raises Unreadable."""
    event = decode(_event, data)
    if event.type is None and event.error is None:
        raise Unreadable("no type in it")
    name = event.type or ""
    if kind := _DELTAS.get(name):
        count = len(event.logprobs) if event.logprobs else None
        return ChunkBody([Part(kind, 0, event.delta or "", None, count, block=event.output_index)], name=name)
    response = event.response
    if name in _ENDS:
        return _end(name, response or _Response())
    response_id = response.id or None if response else None
    if event.error is not None or name == "error":
        return ChunkBody([Part("error", lossy=True)], response_id, name=name)
    if event.item is not None and name in ("response.output_item.added", "response.output_item.done"):
        # Of a tool call the item holds the name, which no delta does.
        plain = event.item.type in _TEXT_ITEMS
        part = Part("control" if plain else "tool_call", block=event.output_index, lossy=not plain)
    else:
        part = Part("control", block=event.output_index, lossy=name not in _PLAIN)
    return ChunkBody([part], response_id, name=name)


def _end(name: str, response: _Response) -> ChunkBody:
    """The last event: how it ended, and the whole reply once more."""
    usage = response.usage.read() if response.usage else None
    failed = name == "response.failed"
    part = Part("error" if failed else "finish", finish_reason=response.finish_reason(), lossy=failed)
    said = None if failed or response.output is None else len(response.text("message"))
    return ChunkBody([part], response.id or None, usage, name, end=True, said=said)


def read_reply(data: bytes) -> ReplyBody:
    """Read the body of a reply that was no stream. Raises Unreadable."""
    response = decode(_response, data)
    if response.object != "response" or response.output is None:
        raise Unreadable("no response in it")
    counts = [
        len(content.logprobs)
        for item in response.output
        for content in item.content or ()
        if content.logprobs is not None
    ]
    choice = ReplyChoice(
        text=response.text("message"),
        reasoning=response.text("reasoning"),
        calls=[ToolCall(index=n) for n, item in enumerate(response.output) if item.type not in _TEXT_ITEMS],
        logprob_count=sum(counts) if counts else None,
        finish_reason=response.finish_reason(),
    )
    return ReplyBody(response.id or None, response.usage.read() if response.usage else None, [choice])
