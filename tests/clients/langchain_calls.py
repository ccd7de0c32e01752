"""LangChain's client for OpenAI's API (langchain-openai). Usage: langchain_calls.py URL."""

import asyncio
from functools import reduce
from operator import add
from typing import Any

import httpx
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
    raised,
    run,
    settle,
)
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

SERVER: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "model": "m", "temperature": 0}


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**SERVER | {"max_tokens": 12, "include_response_headers": True} | fields)


def both(model: Any, question: str = QUESTION) -> list[Any]:
    """A reply in one, and a streamed one that LangChain itself folds."""
    pieces = list(model.stream(question))
    return [model.invoke(question), {"streamed": len(pieces) > 1, "folded": reduce(add, pieces)}]


@call
def chat_plain() -> Any:
    return both(chat())


@call
def chat_usage() -> Any:
    return both(chat(stream_usage=True))


@call
def chat_two_choices() -> Any:
    two = chat(n=2, seed=7, max_tokens=8, **{"temperature": 0.8})
    return two.generate([[HumanMessage(QUESTION)]]).generations


@call
def chat_stop() -> Any:
    return both(chat(stop_sequences=["Fra", "\n\n"]))


@call
def chat_tool() -> Any:
    tool = {"name": "weather", "description": "The weather", "parameters": WEATHER}
    return both(chat(max_tokens=60).bind_tools([tool], tool_choice="weather"), FORECAST)


@call
def chat_logprobs() -> Any:
    return both(chat(logprobs=True, top_logprobs=2))


@call
def completion_plain() -> Any:
    model = OpenAI(**SERVER | {"max_tokens": 12})
    return [model.generate([CODE]), "".join(model.stream(CODE)), model.invoke(CODE, stop=["return"])]


@call
def response_plain() -> Any:
    return both(chat(use_responses_api=True, output_version="responses/v1"))


@call
def wrong_value() -> Any:
    model = chat(temperature=-1)
    return [raised(lambda: model.invoke(QUESTION)), raised(lambda: list(model.stream(QUESTION)))]


@call
def not_there() -> Any:
    model = chat(model="nope")
    return [raised(lambda: model.invoke(QUESTION)), raised(lambda: list(model.stream(QUESTION)))]


@call
def no_reply_in_time() -> Any:
    hasty = chat(timeout=TOO_SOON, max_retries=1, max_tokens=LONG)
    error = raised(lambda: hasty.invoke(STORY))
    settle()
    return [error, *both(chat())]


@call
async def left_in_the_middle() -> Any:
    """By closing the connection: LangChain leaves that to the garbage collector, which comes when it comes."""
    text = ""
    async with httpx.AsyncClient() as connections:
        async for piece in chat(max_tokens=LONG, http_async_client=connections).astream(STORY):
            text += piece.text
            if len(text) >= SAME_START:
                break
    settle()
    return [text[:SAME_START], await chat().ainvoke(QUESTION)]


@call
async def timed_out_in_the_middle() -> Any:
    """Without LangChain's own limit on the gap between chunks: it waits by asyncio.wait_for, which before Python 3.12
    forgets a cancellation that comes together with a chunk."""
    text, ended = "", ""
    async with httpx.AsyncClient() as connections:
        model = chat(max_tokens=LONG, http_async_client=connections, stream_chunk_timeout=None)
        try:
            async with asyncio.timeout(None) as limit:
                async for piece in model.astream(STORY):
                    text += piece.text
                    if limit.when() is None and len(text) >= SAME_START:
                        limit.reschedule(asyncio.get_running_loop().time() + LEAVE_AFTER)
        except TimeoutError:
            ended = "timeout"
    settle()
    return [ended, text[:SAME_START], await chat().ainvoke(QUESTION)]


@call
def one_after_the_other() -> Any:
    model = chat(max_tokens=2)
    return [model.invoke(QUESTION) for _ in range(ONE_CONNECTION)]


@call
def in_parallel() -> Any:
    """What is sampled in parallel depends on how the engine batches; how much does not."""
    model = chat(extra_body={"ignore_eos": True})
    replies = model.batch([QUESTION] * AT_ONCE)
    return [[reply.response_metadata["finish_reason"], reply.usage_metadata] for reply in replies]


run()
