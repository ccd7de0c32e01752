"""Read a request body into the parameters that decide which text is right. Pure.

What a field holds is converted as leniently as the server does it ("2" is 2); a value of another type counts as
absent here, for the server will refuse the request and the reply says so.
Source: the request models of vLLM 0.32 (ChatCompletionRequest, CompletionRequest, ResponsesRequest,
AnthropicMessagesRequest).
"""

import contextlib
import hashlib
from typing import Any, get_type_hints

import msgspec

from sparseety.records import Endpoint, RequestParameters


class _StreamOptions(msgspec.Struct):
    include_usage: Any = None


class _Body(msgspec.Struct):
    """The fields of all endpoints that say something about the text, as the server types them. None: absent."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_sequences: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    detokenize: bool | None = None
    use_beam_search: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    logprobs: Any = None  # chat: a switch; completions: how many, and 0 asks for those of the chosen tokens
    include: list[Any] | None = None
    tools: list[msgspec.Raw] | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    messages: list[Any] | None = None
    system: str | list[Any] | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    prompt: Any = None


_decode = msgspec.json.Decoder(_Body, strict=False).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_TYPES = get_type_hints(_Body)
_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# What the server of /v1/messages ignores: it is not among that API's fields.
_SWITCHES = (
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "echo",
    "detokenize",
    "use_beam_search",
    "include_reasoning",
    "return_token_ids",
)


def read_parameters(body: bytes, endpoint: Endpoint) -> RequestParameters | None:
    """The parameters of a request body; None where it is no JSON object. Never raises on what the body holds."""
    fields = _read(body)
    if fields is None:
        return None
    found: dict[str, Any] = {
        "model": fields.model,
        "max_tokens": _max_tokens(fields, endpoint),
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "stop": _strings(fields.stop_sequences if endpoint == "messages" else fields.stop),
        "tools": bool(fields.tools),
        "structured": _structured(fields),
        "stream": bool(fields.stream),
    }
    if endpoint != "messages":
        _read_openai(fields, endpoint, found)
    match endpoint:
        case "chat":
            found |= _messages(fields.messages)
        case "messages":  # the system prompt stands beside them: it is prompt text, though no message
            found |= _messages(fields.messages, {"content": fields.system})
        case "responses":
            items = [{"content": fields.input}] if isinstance(fields.input, str) else fields.input
            found |= _messages(items, {"content": fields.instructions})
        case _:
            found |= _prompts(fields.prompt, echo=bool(fields.echo))
    return RequestParameters(**found)


def _read(body: bytes) -> _Body | None:
    try:
        return _decode(body)
    except _BAD:
        pass
    try:
        raw = _decode_fields(body)
    except _BAD:
        return None
    fields = _Body()
    for name, value in raw.items():  # one by one, for one of them is of no use
        if name in _TYPES:
            with contextlib.suppress(*_BAD):
                setattr(fields, name, msgspec.json.decode(value, type=_TYPES[name], strict=False))
    return fields


def _read_openai(fields: _Body, endpoint: Endpoint, found: dict[str, Any]) -> None:
    found["seed"] = fields.seed
    found["min_tokens"] = fields.min_tokens or 0
    found["stop_token_ids"] = fields.stop_token_ids or []
    found["include_usage"] = bool(fields.stream_options and fields.stream_options.include_usage)
    if endpoint == "responses":
        found["logprobs"] = "message.output_text.logprobs" in (fields.include or [])
    else:
        found["logprobs"] = fields.logprobs is not None and fields.logprobs is not False
        found["n"] = 1 if fields.n is None else fields.n
    for name in _SWITCHES:
        value = getattr(fields, name)
        if value is not None:
            found[name] = value


def _max_tokens(fields: _Body, endpoint: Endpoint) -> int | None:
    if endpoint == "responses":
        return fields.max_output_tokens
    return fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens


def _strings(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _structured(fields: _Body) -> bool:
    """chat and completions: response_format; responses: text.format; messages: output_config.format."""
    for form in (
        fields.response_format,
        fields.text and fields.text.get("format"),
        fields.output_config and fields.output_config.get("format"),
    ):
        if isinstance(form, dict) and form.get("type", "text") != "text":
            return True
    return not (
        fields.structured_outputs is None
        and fields.guided_json is None
        and fields.guided_regex is None
        and fields.guided_choice is None
        and fields.guided_grammar is None
    )


def _messages(messages: list[Any] | None, *beside: Any) -> dict[str, Any]:
    """Their number, and the length of their text and of that `beside` them."""
    if messages is None:
        return {}
    chars = 0
    for message in [*messages, *beside]:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            chars += len(content)
        elif isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, dict))
            chars += sum(len(text) for text in texts if isinstance(text, str))
    return {"messages": len(messages), "prompt_chars": chars}


def _prompts(prompt: Any, *, echo: bool) -> dict[str, Any]:
    """One prompt is a string or a list of ids; several are a list of those."""
    if isinstance(prompt, str):
        echoed = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest() if echo else None
        return {"prompt_chars": len(prompt), "prompt_sha256": echoed}
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return {}
    texts = [item for item in prompt if isinstance(item, str)]
    return {"prompts": len(prompt), "prompt_chars": sum(map(len, texts)) if len(texts) == len(prompt) else None}
