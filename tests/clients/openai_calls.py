"""The official `openai` client for Python. Usage: openai_calls.py URL."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from calls import (
    AT_ONCE,
    CODE,
    FORECAST,
    LEAVE_AFTER,
    LONG,
    ONE_CONNECTION,
    QUESTION,
    SAME_START,
    STORY,
    TOO_SOON,
    URL,
    WEATHER,
    call,
    port,
    raised,
    run,
    settle,
)
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none")

CHAT: dict[str, Any] = {
    "model": "m",
    "temperature": 0,
    "max_tokens": 12,
    "messages": [{"role": "user", "content": QUESTION}],
}
COMPLETION: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 12, "prompt": CODE}
RESPONSE: dict[str, Any] = {"model": "m", "temperature": 0, "max_output_tokens": 12, "input": QUESTION}
USAGE = {"stream_options": {"include_usage": True}}
TWO = {"n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 8}
LONG_STORY: dict[str, Any] = {
    "messages": [{"role": "user", "content": STORY}],
    "max_tokens": LONG,
    "extra_body": {"ignore_eos": True},
}
TOOL = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "messages": [{"role": "user", "content": FORECAST}],
    "max_tokens": 60,
}


def whole(create: Any, **fields: Any) -> dict[str, Any]:
    """create: the method of a resource `with_raw_response`."""
    raw = create(**fields)
    return {"status": raw.status_code, "headers": raw.headers, "reply": raw.parse()}


def stream(create: Any, **fields: Any) -> dict[str, Any]:
    with create(stream=True, **fields) as events:
        return {"status": events.response.status_code, "headers": events.response.headers, "events": list(events)}


def chat(**fields: Any) -> list[dict[str, Any]]:
    completions = client.chat.completions
    usage = USAGE if fields else {}
    return [
        whole(completions.with_raw_response.create, **CHAT | fields),
        stream(completions.create, **CHAT | usage | fields),
    ]


def completion(**fields: Any) -> list[dict[str, Any]]:
    return [
        whole(client.completions.with_raw_response.create, **COMPLETION | fields),
        stream(client.completions.create, **COMPLETION | USAGE | fields),
    ]


def response(**fields: Any) -> list[dict[str, Any]]:
    return [
        whole(client.responses.with_raw_response.create, **RESPONSE | fields),
        stream(client.responses.create, **RESPONSE | fields),
    ]


@call
def models() -> Any:
    return [client.models.list().data, raised(lambda: client.models.retrieve("m"))]


@call
def chat_plain() -> Any:
    return chat()


@call
def chat_usage_always() -> Any:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return stream(client.chat.completions.create, **CHAT | {"max_tokens": 1, "stream_options": options})


@call
def chat_two_choices() -> Any:
    return chat(**TWO)


@call
def chat_stop() -> Any:
    return chat(stop=["Fra", "\n\n"])


@call
def chat_tool() -> Any:
    return chat(**TOOL)


@call
def chat_logprobs() -> Any:
    return chat(logprobs=True, top_logprobs=2)


@call
def chat_json() -> Any:
    schema = {"name": "weather", "schema": WEATHER}
    return chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=30)


@call
def completion_plain() -> Any:
    return completion()


@call
def completion_two_prompts() -> Any:
    return completion(prompt=[CODE, "The capital of"], max_tokens=6)


@call
def completion_two_choices() -> Any:
    return completion(**TWO)


@call
def completion_stop_logprobs_echo() -> Any:
    return [*completion(stop="return"), *completion(logprobs=2), *completion(echo=True)]


@call
def response_plain() -> Any:
    return response()


@call
def response_instructed() -> Any:
    return response(instructions="Answer in one word.")


@call
def wrong_value() -> Any:
    create = client.chat.completions.create
    long = [{"role": "user", "content": "fox " * 50_000}]
    return [
        raised(lambda: create(**CHAT | {"temperature": -1})),
        raised(lambda: create(stream=True, **CHAT | {"temperature": -1})),
        raised(lambda: create(**CHAT | {"messages": long})),
        raised(lambda: client.completions.create(**COMPLETION | {"max_tokens": -1})),
        raised(lambda: client.responses.create(**RESPONSE | {"temperature": -1})),
    ]


@call
def not_there() -> Any:
    return [
        raised(lambda: client.chat.completions.create(**CHAT | {"model": "nope"})),
        raised(lambda: client.responses.create(**RESPONSE | {"model": "nope"})),
        raised(lambda: client.get("/nothing", cast_to=object)),
        raised(lambda: client.get("/chat/completions", cast_to=object)),
    ]


@call
def no_reply_in_time() -> Any:
    hasty = client.with_options(timeout=TOO_SOON, max_retries=1)
    error = raised(lambda: hasty.chat.completions.create(**CHAT | LONG_STORY))
    settle()
    return [error, *chat()]


@call
def left_in_the_middle() -> Any:
    """By leaving the stream's block; the client is used further."""
    text = ""
    with client.chat.completions.create(stream=True, **CHAT | LONG_STORY) as events:
        for event in events:
            text += event.choices[0].delta.content or ""
            if len(text) >= SAME_START:
                break
    settle()
    return [text[:SAME_START], *chat()]


@call
async def timed_out_in_the_middle() -> Any:
    """The asynchronous client, cancelled by asyncio; it is used further."""
    text, ended = "", ""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as patient:
        try:
            async with asyncio.timeout(None) as limit:
                async for event in await patient.chat.completions.create(stream=True, **CHAT | LONG_STORY):
                    text += event.choices[0].delta.content or ""
                    if limit.when() is None and len(text) >= SAME_START:
                        limit.reschedule(asyncio.get_running_loop().time() + LEAVE_AFTER)
        except TimeoutError:
            ended = "timeout"
        settle()
        return [ended, text[:SAME_START], await patient.chat.completions.create(**CHAT)]


@call
def one_after_the_other() -> Any:
    ports, replies = set(), []
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as fresh:
        for _ in range(ONE_CONNECTION):
            raw = fresh.chat.completions.with_raw_response.create(**CHAT | {"max_tokens": 2})
            ports.add(port(raw.http_response))
            replies.append(raw.parse())
    return {"connections": len(ports), "replies": replies}


@call
def streams_one_after_the_other() -> Any:
    """This client closes the connection at [DONE], before the stream's end has come."""
    ports, replies = set(), []
    with OpenAI(base_url=f"{URL}/v1", api_key="none") as fresh:
        for _ in range(ONE_CONNECTION):
            with fresh.chat.completions.create(stream=True, **CHAT | {"max_tokens": 2}) as events:
                ports.add(port(events.response))
                replies.append({"events": list(events)})
    return {"connections": len(ports), "replies": replies}


@call
def in_parallel() -> Any:
    """What is sampled in parallel depends on how the engine batches; how much does not."""

    def one(_: int) -> Any:
        fields = CHAT | {"extra_body": {"ignore_eos": True}}
        reply = client.chat.completions.create(**fields)
        return [reply.choices[0].finish_reason, reply.usage]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


run()
