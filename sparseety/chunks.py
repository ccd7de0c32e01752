"""Read the JSON of OpenAI's chat and text completions, as vLLM writes it: stream events and whole replies.

What a field holds is taken as it stands; a body of another shape is reported as unreadable, never guessed at.
Source: OpenAI API reference (chat.completion.chunk, text_completion) and replies of vLLM 0.32.
"""

from typing import TypeVar

import msgspec

from sparseety.records import Kind, ReplyChoice, ToolCall, Usage

T = TypeVar("T")


class Unreadable(ValueError):
    """A body or event that is not the JSON it should be. The message says what is wrong, without quoting content."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """What one stream event says about one choice, in one kind."""

    kind: Kind
    choice: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprob_count: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    block: int = 0  # messages and responses: which content block or output item
    calls: list[ToolCall] | None = None  # for tool_call: which calls the text belongs to
    lossy: bool = False  # the event holds more than this part can say: keep its raw form


class ChunkBody(msgspec.Struct, frozen=True, gc=False):
    """One stream event, read."""

    parts: list[Part]
    response_id: str | None = None
    usage: Usage | None = None
    name: str = ""  # the SSE name that goes with this body, in dialects that name their events
    end: bool = False  # it is the endpoint's end marker
    said: int | None = None  # code points of all the text that the server says it has sent; None: it does not say
    plain: bool = False  # it adds text of kind `text` to one choice, and says nothing else but its response_id


class ReplyBody(msgspec.Struct, frozen=True):
    """A whole reply, read."""

    response_id: str | None = None
    usage: Usage | None = None
    choices: list[ReplyChoice] = []


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Raises Unreadable, whatever is wrong with the data."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None


# ----------------------------------------------------------------------------------------- what the JSON looks like


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    def read(self) -> Usage:
        details = self.prompt_tokens_details
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=details.cached_tokens if details else None,
        )


class _Logprobs(msgspec.Struct, gc=False):
    content: list[msgspec.Raw] | None = None  # chat: one entry a token
    tokens: list[msgspec.Raw] | None = None  # completions: one entry a token


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int | None = None  # absent in a whole reply
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A `delta` of a stream or a `message` of a whole reply."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # vLLM before 0.12, and other servers
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None  # what tool_calls were before


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None  # completions
    delta: _Message | None = None  # chat, streamed
    message: _Message | None = None  # chat, whole
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def plain(self) -> str | None:
        """The text that it adds, where it says nothing else. Nearly every event is one of these."""
        delta = self.delta
        if (
            delta is None
            or self.finish_reason is not None
            or self.token_ids is not None
            or self.logprobs is not None
            or self.stop_reason is not None
            or delta.reasoning is not None
            or delta.reasoning_content is not None
            or delta.tool_calls is not None
            or delta.function_call is not None
            or delta.refusal is not None
        ):
            return None
        return delta.content

    def logprob_count(self) -> int | None:
        if self.logprobs is None:
            return None
        entries = self.logprobs.content if self.logprobs.content is not None else self.logprobs.tokens
        return None if entries is None else len(entries)


class _Body(msgspec.Struct, gc=False):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: dict[str, msgspec.Raw] | str | None = None


class _Object(msgspec.Struct):
    object: str | None = None


_body = msgspec.json.Decoder(_Body)
_object = msgspec.json.Decoder(_Object)

# ------------------------------------------------------------------------------------------------- stream events

_NO_DELTA = _Message()


def read_chunk(data: bytes) -> ChunkBody:
    """Read the data of one stream event. Raises Unreadable. `[DONE]` is the caller's to notice."""
    body = decode(_body, data)
    response_id = body.id or None  # some servers write "" into events of their own
    choices = body.choices
    if choices and len(choices) == 1 and body.usage is None and body.error is None and (text := choices[0].plain()):
        return ChunkBody([Part("text", choices[0].index, text)], response_id, plain=True)
    usage = body.usage.read() if body.usage else None
    if body.error is not None or (body.choices is None and decode(_object, data).object == "error"):
        return ChunkBody([Part("error", lossy=True)], response_id, usage)
    if choices is None:
        raise Unreadable("no choices in it")
    parts = _parts(choices[0]) if len(choices) == 1 else [part for choice in choices for part in _parts(choice)]
    return ChunkBody(parts or [Part("usage" if usage else "control", lossy=usage is None)], response_id, usage)


def _parts(choice: _Choice) -> list[Part]:
    """The kinds in one choice. Ids, counts and the finish go with the last of them, so that nothing counts twice."""
    delta = choice.delta or _NO_DELTA
    content = delta.content or choice.text
    lossy = delta.refusal is not None
    texts: list[tuple[Kind, str]] = []
    if reasoning := delta.reasoning or delta.reasoning_content:
        texts.append(("reasoning", reasoning))
    if content:
        texts.append(("text", content))
    calls = _calls(delta) if delta.tool_calls or delta.function_call else []
    if calls:
        texts.append(("tool_call", "".join(call.arguments for call in calls)))
    if not texts:
        texts.append(("finish" if choice.finish_reason else "role" if delta.role else "text", ""))
    *before, (kind, text) = texts
    last = Part(
        kind,
        choice.index,
        text,
        choice.token_ids,
        choice.logprob_count(),
        choice.finish_reason or None,
        choice.stop_reason,
        calls=calls or None,
        lossy=lossy,
    )
    return [*(Part(kind, choice.index, text) for kind, text in before), last] if before else [last]


def _calls(message: _Message) -> list[ToolCall]:
    """An index that is not stated is the call's place in its list, as in a whole reply. The older form has one call."""
    listed = [(call.index, call.function) for call in message.tool_calls or ()]
    if message.function_call is not None:
        listed.append((None, message.function_call))
    return [
        ToolCall(
            index=place if index is None else index,
            name=function.name if function else None,
            arguments=(function.arguments if function else None) or "",
        )
        for place, (index, function) in enumerate(listed)
    ]


# ------------------------------------------------------------------------------------------------- whole replies


def read_reply(data: bytes) -> ReplyBody:
    """Read the body of a reply that was no stream. Raises Unreadable."""
    body = decode(_body, data)
    if body.choices is None:
        raise Unreadable("no choices in it")
    usage = body.usage.read() if body.usage else None
    return ReplyBody(body.id or None, usage, [_reply_choice(choice) for choice in body.choices])


def _reply_choice(choice: _Choice) -> ReplyChoice:
    message = choice.message or _NO_DELTA
    return ReplyChoice(
        choice=choice.index,
        text=message.content or choice.text or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        calls=_calls(message),
        token_ids=choice.token_ids,
        logprob_count=choice.logprob_count(),
        finish_reason=choice.finish_reason or None,
        stop_reason=choice.stop_reason,
    )
