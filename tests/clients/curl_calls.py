"""`curl -N`, run by its command line. Usage: curl_calls.py URL.

Reports what curl printed: status line, headers, body; its exit status, and how many connections it made.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from calls import (
    AT_ONCE,
    CODE,
    FORECAST,
    LONG,
    ONE_CONNECTION,
    QUESTION,
    SAME_START,
    STORY,
    TOO_SOON,
    URL,
    WEATHER,
    call,
    run,
    settle,
)

ASK = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}
COMPLETION = {"model": "m", "temperature": 0, "prompt": CODE, "max_tokens": 12}
RESPONSE = {"model": "m", "temperature": 0, "input": QUESTION, "max_output_tokens": 12}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LONG_STORY = ASK | STREAM | {"messages": [{"role": "user", "content": STORY}], "max_tokens": LONG, "ignore_eos": True}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def arguments(path: str, body: Any = None) -> list[str]:
    command = ["--silent", "--show-error", "--no-buffer", "--include"]
    if body is not None:
        command += ["--json", json.dumps(body)]
    return [*command, URL + path]


def curl(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", *options], capture_output=True, text=True, timeout=120)


def exchange(path: str, body: Any = None, *options: str) -> dict[str, Any]:
    done = curl(*arguments(path, body), *options)
    return {"exit": done.returncode, "stderr": done.stderr, **reply(done.stdout)}


def reply(printed: str) -> dict[str, Any]:
    head, _, body = printed.partition("\n\n")  # text mode has made \n of \r\n
    interim = head if head.startswith("HTTP/1.1 100") else None
    if interim:
        head, _, body = body.partition("\n\n")
    status, *lines = head.split("\n")
    headers = [line.split(": ", 1) for line in lines]
    if ["content-type", "text/event-stream; charset=utf-8"] in headers:
        return {"interim": interim, "status": status, "headers": headers, "events": events(body)}
    return {
        "interim": interim,
        "status": status,
        "headers": headers,
        "body": json.loads(body) if body.startswith("{") else body,
    }


def events(body: str) -> list[Any]:
    """The data of each event; of one that is not as vLLM writes them, its lines."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        event, _, data = block.rpartition("data: ")
        parsed = json.loads(data) if data.startswith("{") else None
        usual = parsed is not None and event in ("", f"event: {parsed.get('type')}\n")
        found.append(parsed if usual else block)
    return found


@call
def models() -> Any:
    return [exchange("/v1/models"), exchange("/v1/models", None, "--head"), exchange("/health"), exchange("/version")]


@call
def chat() -> Any:
    return [exchange(CHAT, ASK), exchange(CHAT, ASK | STREAM), exchange(CHAT, ASK | USAGE)]


@call
def two_choices() -> Any:
    two = {"n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 8}
    streams = [exchange(CHAT, ASK | USAGE | two), exchange(COMPLETIONS, COMPLETION | USAGE | two)]
    return [exchange(CHAT, ASK | two), *streams]


@call
def stop() -> Any:
    return [exchange(CHAT, ASK | {"stop": ["Fra"]}), exchange(CHAT, ASK | USAGE | {"stop": ["Fra"]})]


@call
def tool() -> Any:
    fields = {
        "messages": [{"role": "user", "content": FORECAST}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 60,
    }
    return [exchange(CHAT, ASK | fields), exchange(CHAT, ASK | USAGE | fields)]


@call
def logprobs() -> Any:
    fields = {"logprobs": True, "top_logprobs": 2}
    return [exchange(CHAT, ASK | fields), exchange(CHAT, ASK | USAGE | fields)]


@call
def completions() -> Any:
    return [exchange(COMPLETIONS, COMPLETION), exchange(COMPLETIONS, COMPLETION | USAGE)]


@call
def responses() -> Any:
    return [exchange(RESPONSES, RESPONSE), exchange(RESPONSES, RESPONSE | STREAM)]


@call
def messages() -> Any:
    return [exchange(MESSAGES, ASK), exchange(MESSAGES, ASK | STREAM)]


@call
def wrong() -> Any:
    return [
        exchange(CHAT, ASK | {"temperature": -1}),
        exchange(CHAT, ASK | {"temperature": -1} | STREAM),
        exchange(CHAT, "no object"),
        exchange(CHAT, ASK | {"model": "nope"}),
        exchange("/v1/nothing"),
        exchange(CHAT),
        exchange(CHAT, None, "--request", "OPTIONS"),
    ]


@call
def sent_in_other_ways() -> Any:
    """Chunked; asking first whether to send; compressed, if the server likes to; HTTP/1.0."""
    return [
        exchange(CHAT, ASK, "--header", "Transfer-Encoding: chunked"),
        exchange(CHAT, ASK, "--header", "Expect: 100-continue"),
        exchange(CHAT, ASK | USAGE, "--compressed"),
        exchange(CHAT, ASK, "--http1.0"),
    ]


@call
def no_reply_in_time() -> Any:
    late = curl(*arguments(CHAT, LONG_STORY | {"stream": False}), "--max-time", str(TOO_SOON))
    settle()
    return [late.returncode, late.stdout, exchange(CHAT, ASK)]


@call
def timed_out_in_the_middle() -> Any:
    done = curl(*arguments(CHAT, LONG_STORY), "--max-time", "3")
    text = "".join(
        choice["delta"].get("content") or ""
        for line in done.stdout.split("\n")
        if line.startswith("data: {") and line.endswith("}")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    settle()
    return [done.returncode, text[:SAME_START]]


@call
def left_in_the_middle() -> Any:
    """Its reader is gone: curl cannot write any more."""
    command = ["curl", *arguments(CHAT, LONG_STORY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as left:
        assert left.stdout is not None
        while not left.stdout.readline().startswith(b"data: "):
            pass
        left.stdout.close()
        status = left.wait(60)
    settle()
    return [status, exchange(CHAT, ASK)]


@call
def one_after_the_other() -> Any:
    """Whole and streamed in turn, in one run of curl."""
    command: list[str] = []
    for number in range(ONE_CONNECTION):
        body = ASK | {"max_tokens": 2} | (STREAM if number % 2 else {})
        command += ["--next"] * (number > 0) + arguments(CHAT, body)
        command += ["--write-out", "\n== connections: %{num_connects}\n"]
    done = curl(*command)
    assert done.returncode == 0, done.stderr
    replies, connections = [], 0
    for each in done.stdout.split("HTTP/1.1 ")[1:]:
        printed, _, count = each.partition("\n== connections: ")
        replies.append(reply("HTTP/1.1 " + printed))
        connections += int(count)
    return {"connections": connections, "replies": replies}


@call
def in_parallel() -> Any:
    """What is sampled in parallel depends on how the engine batches; how much does not."""

    def one(_: int) -> Any:
        body = exchange(CHAT, ASK | {"ignore_eos": True})["body"]
        return [body["choices"][0]["finish_reason"], body["usage"]]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


run()
