"""What a client asks for, read and checked as vLLM's API server does."""

import re
import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec

from deploy.demo.replay import Encode, Sampling, chat_prompt

Endpoint = Literal["chat", "completions"]


class Refused(Exception):
    """The request gets an error reply, in vLLM's shape."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError"):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    """Both endpoints' fields, as far as they are understood here; those that would change the text are refused."""

    model: str | None = None
    messages: list[_Message] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    request_id: str | None = None
    echo: bool = False
    suffix: str | None = None
    tools: list[msgspec.Raw] | None = None
    use_beam_search: bool = False
    min_tokens: int = 0


_NOT_HERE = ("echo", "suffix", "tools", "use_beam_search", "min_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    key: str | list[int]  # what picks the stream: the last user message, the prompt, or its ids
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that will be answered."""

    endpoint: Endpoint
    response_id: str
    model: str
    prompts: list[Prompt]
    n: int
    sampling: Sampling
    greedy: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool  # logprobs spell tokens as "token_id:123"
    logprobs: int | None  # alternatives a token; None: none asked for


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_len: int  # tokens, prompt and output
    eos_id: int


def read_ask(endpoint: Endpoint, data: bytes, header_id: str | None, model: Model, encode: Encode) -> Ask:
    """Read a request body. The X of `chatcmpl-X` is the header's id, else the body's, else random. Raises Refused."""
    body = _decode(data)
    request_id = body.request_id or secrets.token_hex(8) if header_id is None else header_id
    if body.model not in (None, model.name):
        message = f"The model `{body.model}` does not exist. Valid aliases: {model.name}."
        raise Refused(message, "model", status=404, kind="NotFoundError")
    for name in _NOT_HERE:
        if getattr(body, name):
            raise Refused(f"{name} is not supported by the demo backend", name)
    stream, n = bool(body.stream), 1 if body.n is None else body.n
    options = body.stream_options or _StreamOptions()
    greedy = body.temperature == 0
    if n < 1:
        raise Refused(f"n must be at least 1, got {n}.", "n")
    if n > 1 and greedy:
        raise Refused(f"n must be 1 when using greedy sampling, got {n}.", "n")
    if body.stream_options and not stream:
        raise Refused("Stream options can only be defined when `stream=True`.", "stream_options")
    prompts = _chat_prompt(body, encode) if endpoint == "chat" else _prompts(body, encode)
    return Ask(
        endpoint=endpoint,
        response_id=f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{request_id}",
        model=model.name,
        prompts=prompts,
        n=n,
        sampling=_sampling(body, _max_tokens(body, endpoint, prompts, model), model),
        greedy=greedy,
        stream=stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        logprobs=_logprobs(body, endpoint),
    )


_PLACE = re.compile(r" - at `\$\.?([^`]*)`")


def _decode(data: bytes) -> _Body:
    try:
        return msgspec.json.decode(data, type=_Body, strict=True)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        where = f"body.{place[1]}" if place and place[1] else "body"
        kind, message = "type_error", _PLACE.sub("", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        where, kind, message = "body", "json_invalid", str(error)
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{where}', 'msg': '{message}'}}"
    raise Refused(text, where, kind="Bad Request")


def _chat_prompt(body: _Body, encode: Encode) -> list[Prompt]:
    if not body.messages:
        raise Refused("1 validation error:\n  {'type': 'missing', 'loc': 'body.messages'}", "body.messages")
    turns = [(message.role, message.text()) for message in body.messages]
    key = next((text for role, text in reversed(turns) if role == "user"), turns[-1][1])
    return [Prompt(key, encode(chat_prompt(turns)))]


def _prompts(body: _Body, encode: Encode) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [Prompt(prompt, encode(prompt))]
    if not prompt:
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = []
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(Prompt(item, encode(item)))
        elif isinstance(item, list):
            prompts.append(Prompt(item, item))
        else:
            ids.append(item)
    return prompts or [Prompt(ids, ids)]


def _max_tokens(body: _Body, endpoint: Endpoint, prompts: list[Prompt], model: Model) -> int:
    """As vLLM resolves it: what the request says, else 16 for a completion, else what the context leaves room for."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is not None and asked < 1:
        message = f"max_tokens must be at least 1, got {asked}. (parameter=max_tokens, value={asked})"
        raise Refused(message, "max_tokens")
    longest = max(len(prompt.ids) for prompt in prompts)
    room = model.max_len - longest
    if room < (asked or 1):
        message = f"This model's maximum context length is {model.max_len} tokens. However, your prompt contains "
        message += f"{longest} input tokens and you asked for {asked or 1} output tokens."
        raise Refused(message + f" (parameter=input_tokens, value={longest})", "input_tokens")
    return asked or (room if endpoint == "chat" else min(16, room))


def _sampling(body: _Body, max_tokens: int, model: Model) -> Sampling:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop:
        raise Refused("stop cannot contain an empty string.", "stop")
    return Sampling(
        max_tokens=max_tokens,
        eos_id=model.eos_id,
        stop=stop,
        stop_token_ids=body.stop_token_ids or [],
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        ignore_eos=body.ignore_eos,
    )


def _logprobs(body: _Body, endpoint: Endpoint) -> int | None:
    if endpoint == "chat":
        return (body.top_logprobs or 0) if body.logprobs else None
    return None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
