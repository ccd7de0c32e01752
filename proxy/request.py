"""Read a request body into the parameters that decide which text is right. Pure.

What a field holds is converted as leniently as the server does it ("2" is 2); a value of another type counts as
absent here, for the server will refuse the request and the reply says so.
Source: the request models of vLLM 0.32 (ChatCompletionRequest, CompletionRequest, ResponsesRequest,
AnthropicMessagesRequest).
"""

import hashlib
from typing import Any, TypeVar

import msgspec

from sparseety.records import Endpoint, RequestParameters

T = TypeVar("T")

_Fields = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(_Fields).decode

_STRUCTURED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def read_parameters(body: bytes, endpoint: Endpoint) -> RequestParameters | None:
    """The parameters of a request body; None where it is no JSON object. Never raises on what the body holds."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    common: dict[str, Any] = {
        "model": _get(fields, "model", str),
        "max_tokens": _max_tokens(fields, endpoint),
        "temperature": _get(fields, "temperature", float),
        "top_p": _get(fields, "top_p", float),
        "stop": _stop(fields, "stop_sequences" if endpoint == "messages" else "stop"),
        "tools": bool(_get(fields, "tools", list[Any])),
        "structured": _structured(fields),
        "stream": _default(_get(fields, "stream", bool), False),
    }
    if endpoint != "messages":  # whose server ignores what follows: it is not among that API's fields
        common |= {
            "n": _default(_get(fields, "n", int), 1) if endpoint != "responses" else 1,
            "min_tokens": _default(_get(fields, "min_tokens", int), 0),
            "seed": _get(fields, "seed", int),
            "stop_token_ids": _default(_get(fields, "stop_token_ids", list[int]), []),
            "logprobs": _logprobs(fields, endpoint),
            "include_usage": bool(_default(_get(fields, "stream_options", dict[str, Any]), {}).get("include_usage")),
        }
        for name, default in _SWITCHES.items():
            common[name] = _default(_get(fields, name, bool), default)
    match endpoint:
        case "chat" | "messages":
            return RequestParameters(**common, **_messages(_get(fields, "messages", list[Any]), *_system(fields)))
        case "responses":
            return RequestParameters(**common, **_input(fields))
        case _:
            return RequestParameters(**common, **_prompts(_get(fields, "prompt", Any), echo=common["echo"]))


_SWITCHES = {
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "ignore_eos": False,
    "echo": False,
    "detokenize": True,
    "use_beam_search": False,
    "include_reasoning": True,
    "return_token_ids": False,
}


def _get(fields: _Fields, name: str, type_: Any) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=type_ | None if type_ is not Any else Any, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _max_tokens(fields: _Fields, endpoint: Endpoint) -> int | None:
    names = ("max_output_tokens",) if endpoint == "responses" else ("max_completion_tokens", "max_tokens")
    found: list[int | None] = [_get(fields, name, int) for name in names]
    return next((value for value in found if value is not None), None)


def _stop(fields: _Fields, name: str) -> list[str]:
    stop = _get(fields, name, str | list[str])
    return [stop] if isinstance(stop, str) else _default(stop, [])


def _logprobs(fields: _Fields, endpoint: Endpoint) -> bool:
    """Chat: a switch. Completions: how many, and 0 asks for those of the chosen tokens. Responses: to be included."""
    if endpoint == "responses":
        return "message.output_text.logprobs" in _default(_get(fields, "include", list[Any]), [])
    value = _get(fields, "logprobs", Any)
    return value is not None and value is not False


def _structured(fields: _Fields) -> bool:
    """chat and completions: response_format; responses: text.format; messages: output_config.format."""
    forms = [_get(fields, "response_format", dict[str, Any])]
    forms += [_default(_get(fields, name, dict[str, Any]), {}).get("format") for name in ("text", "output_config")]
    if any(isinstance(form, dict) and form.get("type", "text") != "text" for form in forms):
        return True
    return any(_get(fields, name, Any) is not None for name in _STRUCTURED)


def _system(fields: _Fields) -> list[Any]:
    """The system prompt, where it stands beside the messages: it is prompt text, though no message."""
    return [{"content": _get(fields, "system", str | list[Any])}] if "system" in fields else []


def _input(fields: _Fields) -> dict[str, Any]:
    """One text, or a list of items."""
    given = _get(fields, "input", str | list[Any])
    items = [{"content": given}] if isinstance(given, str) else given
    return _messages(items, {"content": _get(fields, "instructions", str)})


def _messages(messages: list[Any] | None, *beside: Any) -> dict[str, Any]:
    """Their number, and the length of their text and of that `beside` them."""
    if messages is None:
        return {}
    chars = 0
    for message in [*messages, *beside]:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = (part.get("text") for part in parts if isinstance(part, dict))
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
