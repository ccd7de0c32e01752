"""Read the JSON of Anthropic's Messages API: stream events and whole replies.

One reply is one choice; its content blocks (text, thinking, tool use) are told apart by `block`.
Source: Anthropic API reference (Messages, streaming) and replies of vLLM 0.32.
"""

import msgspec

from sparseety.chunks import ChunkBody, Part, ReplyBody, Unreadable, decode
from sparseety.records import Kind, ReplyChoice, ToolCall, Usage


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None

    def read(self) -> Usage:
        """Here `input_tokens` leaves out what came from the cache or went there; in our records nothing is left out."""
        prompt = self.input_tokens
        if prompt is not None:
            prompt += (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return Usage(
            prompt_tokens=prompt, completion_tokens=self.output_tokens, cached_tokens=self.cache_read_input_tokens
        )


class _Block(msgspec.Struct):
    """A content block, or what a `delta` adds to one; the delta that ends the message has no type."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct):
    id: str | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    delta: _Block | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: _Usage | None = None


class _Reply(_Message):
    type: str | None = None


_event = msgspec.json.Decoder(_Event)
_reply = msgspec.json.Decoder(_Reply)

# Events and deltas that say nothing which a record of theirs would lose.
_PLAIN = frozenset({"content_block_stop", "ping"})
_DELTAS: dict[str | None, Kind] = {"text_delta": "text", "thinking_delta": "reasoning", "input_json_delta": "tool_call"}
_BLOCKS: dict[str | None, Kind] = {"text": "text", "thinking": "reasoning"}


def read_chunk(data: bytes) -> ChunkBody:
    """Read the data of one stream event. Raises Unreadable."""
    event = decode(_event, data)
    match event.type:
        case "content_block_delta":
            return ChunkBody([_delta(event.index, event.delta or _Block())], name=event.type)
        case "content_block_start":
            return ChunkBody([_start(event.index, event.content_block or _Block())], name=event.type)
        case "message_start":
            message = event.message or _Message()
            usage = message.usage.read() if message.usage else None
            return ChunkBody([Part("role", lossy=bool(message.content))], message.id or None, usage, event.type)
        case "message_delta":
            delta = event.delta or _Block()
            kind: Kind = "finish" if delta.stop_reason else "control"
            usage = event.usage.read() if event.usage else None
            part = Part(kind, finish_reason=delta.stop_reason or None, stop_reason=delta.stop_sequence)
            return ChunkBody([part], usage=usage, name=event.type)
        case "message_stop":
            return ChunkBody([Part("done")], name=event.type, end=True)
        case "error":
            return ChunkBody([Part("error", lossy=True)], name=event.type)
        case _:
            return ChunkBody([Part("control", block=event.index, lossy=event.type not in _PLAIN)], name=event.type)


def _delta(index: int, delta: _Block) -> Part:
    kind = _DELTAS.get(delta.type)
    if kind is None:  # a signature, a citation, or what is yet to be invented
        return Part("control", block=index, lossy=True)
    return Part(kind, text=delta.text or delta.thinking or delta.partial_json or "", block=index)


def _start(index: int, block: _Block) -> Part:
    """The beginning of a block: of a tool call its name, which only the raw form holds; of a text mostly nothing."""
    kind = _BLOCKS.get(block.type)
    if kind is None:
        return Part("tool_call" if block.type == "tool_use" else "control", block=index, lossy=True)
    text = block.text or block.thinking or ""
    return Part(kind if text else "control", text=text, block=index)


def read_reply(data: bytes) -> ReplyBody:
    """Read the body of a reply that was no stream. Raises Unreadable."""
    reply = decode(_reply, data)
    if reply.type != "message" or reply.content is None:
        raise Unreadable("no message in it")
    choice = ReplyChoice(
        text="".join(block.text or "" for block in reply.content if block.type == "text"),
        reasoning="".join(block.thinking or "" for block in reply.content if block.type == "thinking"),
        calls=[ToolCall(index=number) for number, block in enumerate(reply.content) if block.type == "tool_use"],
        finish_reason=reply.stop_reason or None,
        stop_reason=reply.stop_sequence,
    )
    return ReplyBody(reply.id or None, reply.usage.read() if reply.usage else None, [choice])
