"""The official `anthropic` client for Python. Usage: anthropic_calls.py URL."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from calls import (
    AT_ONCE,
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

client = Anthropic(base_url=URL, api_key="none")

MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},  # the client of today has no such argument; the API has
}
LONG_STORY: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}], "max_tokens": LONG}
TOOL = {
    "tools": [{"name": "weather", "input_schema": WEATHER}],
    "tool_choice": {"type": "tool", "name": "weather"},
    "messages": [{"role": "user", "content": FORECAST}],
    "max_tokens": 60,
}


def message(**fields: Any) -> list[dict[str, Any]]:
    raw = client.messages.with_raw_response.create(**MESSAGE | fields)
    with client.messages.create(stream=True, **MESSAGE | fields) as events:
        streamed = {"status": events.response.status_code, "headers": events.response.headers, "events": list(events)}
    return [{"status": raw.status_code, "headers": raw.headers, "reply": raw.parse()}, streamed]


@call
def plain() -> Any:
    return message()


@call
def system() -> Any:
    return message(system="Answer in one word.")


@call
def conversation() -> Any:
    blocks = [{"type": "text", "text": QUESTION}]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "Paris."}]
    return message(messages=[*turns, {"role": "user", "content": "And of Spain?"}])


@call
def stop() -> Any:
    return message(stop_sequences=["Fra", "\n\n"])


@call
def tool() -> Any:
    return message(**TOOL)


@call
def stream_helper() -> Any:
    """The client's own way to fold a stream."""
    with client.messages.stream(**MESSAGE) as stream:
        text = "".join(stream.text_stream)
        return [text, stream.get_final_message()]


@call
def count_tokens() -> Any:
    return client.messages.count_tokens(model="m", messages=MESSAGE["messages"])


@call
def wrong_value() -> Any:
    return [
        raised(lambda: client.messages.create(**MESSAGE | {"max_tokens": -1})),
        raised(lambda: client.messages.create(stream=True, **MESSAGE | {"max_tokens": -1})),
        raised(lambda: client.messages.create(**MESSAGE | {"extra_body": {"temperature": -1}})),
    ]


@call
def not_there() -> Any:
    return [
        raised(lambda: client.messages.create(**MESSAGE | {"model": "nope"})),
        raised(lambda: client.get("/v1/nothing", cast_to=object)),
    ]


@call
def no_reply_in_time() -> Any:
    hasty = client.with_options(timeout=TOO_SOON, max_retries=1)
    error = raised(lambda: hasty.messages.create(**MESSAGE | LONG_STORY))
    settle()
    return [error, *message()]


@call
def left_in_the_middle() -> Any:
    """By leaving the stream's block; the client is used further."""
    text = ""
    with client.messages.stream(**MESSAGE | LONG_STORY) as stream:
        for piece in stream.text_stream:
            text += piece
            if len(text) >= SAME_START:
                break
    settle()
    return [text[:SAME_START], *message()]


@call
async def timed_out_in_the_middle() -> Any:
    """The asynchronous client, cancelled by asyncio; it is used further."""
    text, ended = "", ""
    async with AsyncAnthropic(base_url=URL, api_key="none") as patient:
        try:
            async with asyncio.timeout(None) as limit, patient.messages.stream(**MESSAGE | LONG_STORY) as stream:
                async for piece in stream.text_stream:
                    text += piece
                    if limit.when() is None and len(text) >= SAME_START:
                        limit.reschedule(asyncio.get_running_loop().time() + LEAVE_AFTER)
        except TimeoutError:
            ended = "timeout"
        settle()
        return [ended, text[:SAME_START], await patient.messages.create(**MESSAGE)]


@call
def one_after_the_other() -> Any:
    """Whole and streamed in turn."""
    ports, seen = set(), []
    with Anthropic(base_url=URL, api_key="none") as fresh:
        for number in range(ONE_CONNECTION):
            fields = MESSAGE | {"max_tokens": 2}
            if number % 2:
                with fresh.messages.create(stream=True, **fields) as events:
                    ports.add(port(events.response))
                    seen.append({"events": list(events)})
            else:
                raw = fresh.messages.with_raw_response.create(**fields)
                ports.add(port(raw.http_response))
                seen.append(raw.parse())
    return {"connections": len(ports), "replies": seen}


@call
def in_parallel() -> Any:
    """What is sampled in parallel depends on how the engine batches; how much does not."""

    def one(_: int) -> Any:
        reply = client.messages.create(**MESSAGE | {"max_tokens": 3})
        return [reply.stop_reason, reply.usage]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


run()
