"""Read the JSON of OpenAI's chat and text completions, as vLLM writes it: stream events and whole replies.

What a field holds is taken as it stands; a body of another shape is reported as unreadable, never guessed at.
Source: OpenAI API reference (chat.completion.chunk, text_completion) and replies of vLLM 0.32.
"""

from dataclasses import dataclass, field

import msgspec

from sparseety.records import Kind, ReplyChoice, ToolCall, Usage


class Unreadable(ValueError):
    """A body or event that is not the JSON it should be. The message says what is wrong, without quoting content."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
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


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None  # chat: one entry a token
    tokens: list[msgspec.Raw] | None = None  # completions: one entry a token


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None  # absent in a whole reply
    function: _Function | None = None


class _Message(msgspec.Struct):
    """A `delta` of a stream or a `message` of a whole reply."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # vLLM before 0.12, and other servers
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None  # completions
    delta: _Message | None = None  # chat, streamed
    message: _Message | None = None  # chat, whole
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def logprob_count(self) -> int | None:
        if self.logprobs is None:
            return None
        entries = self.logprobs.content if self.logprobs.content is not None else self.logprobs.tokens
        return None if entries is None else len(entries)


class _Body(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: dict[str, msgspec.Raw] | str | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class Part:
    """What one stream event says about one choice, in one kind."""

    kind: Kind
    choice: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprob_count: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls: list[ToolCall] | None = None  # for tool_call: which calls the text belongs to
    lossy: bool = False  # the event holds more than this part can say: keep its raw form


@dataclass(frozen=True, slots=True)
class ChunkBody:
    """One stream event, read."""

    response_id: str | None = None
    usage: Usage | None = None
    parts: list[Part] = field(default_factory=list)


DONE = b"[DONE]"


def read_chunk(data: bytes) -> ChunkBody:
    """Read the data of one stream event. Raises Unreadable. `[DONE]` is the caller's to notice."""
    body = _read(data)
    usage = body.usage.read() if body.usage else None
    if body.error is not None:
        return ChunkBody(body.id, usage, [Part("error", lossy=True)])
    if body.choices is None:
        raise Unreadable("no choices in it")
    parts = [part for choice in body.choices for part in _parts(choice)]
    return ChunkBody(body.id, usage, parts or [Part("usage" if usage else "control", lossy=usage is None)])


def _parts(choice: _Choice) -> list[Part]:
    """The kinds in one choice. Ids, counts and the finish go with the last of them, so that nothing counts twice."""
    delta = choice.delta or _Message()
    texts: list[tuple[Kind, str]] = []
    if reasoning := delta.reasoning or delta.reasoning_content:
        texts.append(("reasoning", reasoning))
    if content := delta.content or choice.text:
        texts.append(("text", content))
    calls = _calls(delta.tool_calls)
    if calls:
        texts.append(("tool_call", "".join(call.arguments for call in calls)))
    if not texts:
        kind: Kind = "finish" if choice.finish_reason else "role" if delta.role else "text"
        texts.append((kind, ""))
    *before, (kind, text) = texts
    return [
        *(Part(kind, choice.index, text) for kind, text in before),
        Part(
            kind,
            choice.index,
            text,
            choice.token_ids,
            choice.logprob_count(),
            choice.finish_reason or None,
            choice.stop_reason,
            calls=calls or None,
        ),
    ]


def _calls(calls: list[_ToolCall] | None) -> list[ToolCall]:
    """An index that is not stated is the call's place in its list, as in a whole reply."""
    return [
        ToolCall(
            index=place if call.index is None else call.index,
            name=call.function.name if call.function else None,
            arguments=(call.function.arguments if call.function else None) or "",
        )
        for place, call in enumerate(calls or [])
    ]


@dataclass(frozen=True, slots=True)
class ReplyBody:
    """A whole reply, read."""

    response_id: str | None = None
    usage: Usage | None = None
    choices: list[ReplyChoice] = field(default_factory=list)


def read_reply(data: bytes) -> ReplyBody:
    """Read the body of a reply that was no stream. Raises Unreadable."""
    body = _read(data)
    if body.choices is None:
        raise Unreadable("no choices in it")
    return ReplyBody(body.id, body.usage.read() if body.usage else None, [_reply_choice(c) for c in body.choices])


def _reply_choice(choice: _Choice) -> ReplyChoice:
    message = choice.message or _Message()
    return ReplyChoice(
        choice=choice.index,
        text=message.content or choice.text or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        calls=_calls(message.tool_calls),
        token_ids=choice.token_ids,
        logprob_count=choice.logprob_count(),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _read(data: bytes) -> _Body:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None
