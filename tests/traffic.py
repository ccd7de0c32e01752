"""Mixed traffic for a real vLLM: requests of every kind that a text can rightly differ by, all at once."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}

ENGLISH = ["Name three colours of the rainbow.", "What is the capital of France?", "Tell me a short story about a fox."]
SCRIPTS = [
    "Repeat: 你好，世界！今天天气很好。",
    "Write five emoji: 😀😎🤖👩‍🚀🏳️‍🌈",
    "Traduis: déjà vu, garçon, œuvre",
    "اكتب جملة",
]
CONTINUED = [
    "The emoji for happy is 😀 and the emoji for sad is",
    "春眠不觉晓，处处闻啼鸟。夜来风雨声，",
    "def fibonacci(n):\n",
]


@dataclass
class Ask:
    """One request. leave: the client hangs up after so many body reads (0: before any), None: it stays."""

    name: str
    path: str
    body: dict[str, Any]
    named: bool = True  # it sends its own X-Request-Id
    leave: int | None = None


@dataclass
class Got:
    """What the client saw."""

    ask: Ask
    status: int | None = None
    body: bytes = b""
    complete: bool = False
    sha256: str = field(init=False, default="")


def chat(name: str, prompt: str, *, leave: int | None = None, named: bool = True, **fields: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 24, "temperature": 0.9}
    return Ask(name, CHAT, body | fields, named, leave)


def completion(name: str, prompt: Any, **fields: Any) -> Ask:
    return Ask(name, COMPLETIONS, {"prompt": prompt, "stream": True, "max_tokens": 24, "temperature": 0.9} | fields)


def mixed_traffic(longer: int = 1) -> list[Ask]:
    """About 70 requests; every name is used once. longer: replies of 20 tokens and more are so many times as long."""
    asks = [chat(f"plain-{n}", prompt, **USAGE) for n, prompt in enumerate(ENGLISH + SCRIPTS)]
    asks += [chat(f"long-{n}", prompt, max_tokens=80, **USAGE) for n, prompt in enumerate(ENGLISH)]
    asks += [chat(f"no-usage-{n}", prompt) for n, prompt in enumerate(ENGLISH)]
    asks += [chat(f"unnamed-{n}", prompt, named=False, **USAGE) for n, prompt in enumerate(ENGLISH)]
    asks += [chat(f"n2-{n}", prompt, n=2, **USAGE) for n, prompt in enumerate(ENGLISH + SCRIPTS[:1])]
    asks += [completion(f"continued-{n}", prompt, **USAGE) for n, prompt in enumerate(CONTINUED)]
    asks += [completion(f"two-prompts-{n}", CONTINUED[n : n + 2], **USAGE) for n in range(2)]
    asks += [completion("two-prompts-n2", CONTINUED[:2], n=2, **USAGE)]
    asks += [completion("ids-prompt", [504, 3575, 282, 4649, 314], **USAGE)]
    # Characters of several tokens, cut at every length.
    asks += [completion(f"cut-emoji-{n}", CONTINUED[0] + " 😭 😡 🥰", max_tokens=n, **USAGE) for n in range(1, 8)]
    asks += [completion(f"cut-chinese-{n}", CONTINUED[1], max_tokens=n, **USAGE) for n in range(1, 8)]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
    for included in (False, True):
        fields = greedy | {"include_stop_str_in_output": included}
        kept = "kept" if included else "cut"
        asks += [
            chat(f"stop-{kept}-mid-token", ENGLISH[1], stop=["Fra"], **fields, **USAGE),
            chat(f"stop-{kept}-two", ENGLISH[0], stop=["\n2", "Orange"], **fields, **USAGE),
            chat(f"stop-{kept}-long", ENGLISH[2], stop=[" a little", "never said by it, and long"], **fields, **USAGE),
            completion(f"stop-{kept}-completion", CONTINUED[2], stop=["return", "\n\n"], **fields, **USAGE),
            chat(f"stop-{kept}-id", ENGLISH[1], stop_token_ids=[7042], **fields, **USAGE),
        ]
    asks += [
        chat("stop-min-tokens", ENGLISH[1], stop=["capital", "Paris"], min_tokens=4, **greedy, **USAGE),
        chat("logprobs", ENGLISH[0], logprobs=True, top_logprobs=2, **USAGE),
        completion("logprobs-completion", CONTINUED[2], logprobs=2, **USAGE),
        chat("token-ids", ENGLISH[1], return_token_ids=True, **USAGE),
        chat("token-ids-stop", ENGLISH[0], return_token_ids=True, stop=["\n3"], **greedy, **USAGE),
        completion("token-ids-two", CONTINUED[:2], return_token_ids=True, **USAGE),
        chat("specials", ENGLISH[1], skip_special_tokens=False, ignore_eos=True, max_tokens=40, **USAGE),
        chat("specials-skipped", ENGLISH[1], ignore_eos=True, max_tokens=40, temperature=0, **USAGE),
        chat("specials-glued", ENGLISH[1], skip_special_tokens=False, spaces_between_special_tokens=False, **USAGE),
        chat("usage-always", ENGLISH[1], stream_options={"include_usage": True, "continuous_usage_stats": True}),
        completion("echo", CONTINUED[2], echo=True, **USAGE),
        chat("one-token", ENGLISH[1], max_tokens=1, **USAGE),
    ]
    asks += [chat(f"whole-{n}", prompt, stream=False) for n, prompt in enumerate(ENGLISH + SCRIPTS[:2])]
    asks += [
        chat("whole-n2", ENGLISH[0], stream=False, n=2),
        completion("whole-stop", CONTINUED[2], stream=False, stop="("),
    ]
    asks += [chat(f"leave-middle-{n}", ENGLISH[2], leave=3 + 4 * n, max_tokens=200) for n in range(4)]
    asks += [chat(f"leave-before-{n}", ENGLISH[2] * 40, leave=0, max_tokens=200, named=n > 0) for n in range(3)]
    asks += [chat("refused-tokens", ENGLISH[0], max_tokens=-1), chat("refused-model", ENGLISH[0], model="nope")]
    for ask in asks:
        if ask.leave is None and ask.body["max_tokens"] >= 20:
            ask.body["max_tokens"] *= longer
    return asks


async def send_all(base: str, asks: list[Ask], *, at_once: int) -> list[Got]:
    """Send them all, so many at once."""
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=base, timeout=300, trust_env=False) as client:

        async def one(ask: Ask) -> Got:
            async with limit:
                return await send(client, ask)

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def send(client: httpx.AsyncClient, ask: Ask) -> Got:
    got = Got(ask)
    headers = {"X-Request-Id": ask.name} if ask.named else {}
    body = {"model": "m"} | ask.body
    if ask.leave == 0:
        with suppress(TimeoutError):  # hang up while the server computes the prompt
            async with asyncio.timeout(0.15):
                await client.post(ask.path, json=body, headers=headers)
        return got
    async with client.stream("POST", ask.path, json=body, headers=headers) as reply:
        got.status = reply.status_code
        async for data in _reads(reply, ask.leave):
            got.body += data
    got.complete = ask.leave is None
    got.sha256 = hashlib.sha256(got.body).hexdigest()
    return got


async def _reads(reply: httpx.Response, leave: int | None) -> AsyncIterator[bytes]:
    count = 0
    async for data in reply.aiter_raw():
        yield data
        count += 1
        if leave is not None and count >= leave:
            return


def usage_of(got: Got) -> int | None:
    """completion_tokens of the last usage that the client saw."""
    if not got.ask.body["stream"]:
        return int(json.loads(got.body)["usage"]["completion_tokens"])
    usages = [
        event["usage"]["completion_tokens"]
        for line in got.body.split(b"\n")
        if line.startswith(b"data: {") and (event := json.loads(line[6:])).get("usage")
    ]
    return usages[-1] if usages else None
