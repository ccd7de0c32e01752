"""Send a few dozen streamed requests of many kinds through one base URL, with the official OpenAI client.

    python -m deploy.demo.drive http://127.0.0.1:9000/v1

Works against the demo backend and against a real vLLM that serves the same model. Exit code 1: not every request
ended as it should have.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from deploy.demo.replay import Stream, load_streams

HERE = Path(__file__).parent
CONCURRENCY = 6
ABORT_AFTER = 5  # chunks


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    chat: bool
    body: dict[str, Any]
    abort: bool = False  # the client leaves after a few chunks


@dataclass(slots=True)
class Outcome:
    case: Case
    chunks: int = 0
    characters: int = 0
    finished: set[int] = field(default_factory=set)  # choices that said why they ended
    error: str | None = None

    @property
    def as_meant(self) -> bool:
        prompt = self.case.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
        choices = prompts * self.case.body.get("n", 1)
        return self.error is None and (self.case.abort or len(self.finished) == choices)


# What each chat asks for beside its prompt, in turn. `extra_body` holds vLLM's own parameters.
_TURNS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("usage", {"stream_options": {"include_usage": True}}),
    ("stop", {"stop": [". ", "\n\n", "。", "}"]}),
    ("n2", {"n": 2, "stream_options": {"include_usage": True}}),
    ("stop-included", {"stop": [", ", "\n", "，"], "extra_body": {"include_stop_str_in_output": True}}),
    ("token-ids", {"extra_body": {"return_token_ids": True}}),
    ("special", {"extra_body": {"skip_special_tokens": False}}),
    ("logprobs", {"logprobs": True, "top_logprobs": 2}),
    ("greedy", {"temperature": 0}),
]


def make_cases(streams: Iterable[Stream]) -> list[Case]:
    """Chats and completions over all kinds of prompts; short ones, so that a CPU does them in seconds."""
    by_prompt = {stream.prompt: stream for stream in streams}
    cases = []
    for number, prompt in enumerate(by_prompt):
        turn, extra = _TURNS[number % len(_TURNS)]
        cases.append(_chat(f"chat-{turn}", prompt, {"max_tokens": 40, **extra}))
    many_bytes = [stream for stream in by_prompt.values() if stream.kind in ("emoji", "zh")]
    for number, stream in enumerate(many_bytes[:8]):  # the end falls inside a character now and then
        cases.append(_chat("chat-cut", stream.prompt, {"max_tokens": 5 + number}))
    usage = {"stream_options": {"include_usage": True}}
    english, *others = list(by_prompt.values())
    cases += [
        _completion("completion", english.prompt, usage),
        _completion("completion-two", [english.prompt, many_bytes[0].prompt], usage),
        _completion("completion-n2", others[0].prompt, {"n": 2}),
        _completion("completion-ids", others[1].prompt_ids, usage),
        _completion("completion-stop", others[2].prompt, {"stop": ["e"]}),
        Case("chat-abort", True, _chat("", english.prompt, {"max_tokens": 200}).body, abort=True),
    ]
    return [Case(f"{case.name}-{number:02}", case.chat, case.body, case.abort) for number, case in enumerate(cases, 1)]


def _chat(name: str, prompt: str, extra: dict[str, Any]) -> Case:
    return Case(name, True, {"messages": [{"role": "user", "content": prompt}], "temperature": 0.9, **extra})


def _completion(name: str, prompt: str | list[str] | list[int], extra: dict[str, Any]) -> Case:
    return Case(name, False, {"prompt": prompt, "max_tokens": 24, "temperature": 0.9, **extra})


async def send(client: AsyncOpenAI, model: str, case: Case) -> Outcome:
    """Send one request and read its stream to the end, or leave early where the case says so."""
    outcome = Outcome(case)
    create: Any = client.chat.completions.create if case.chat else client.completions.create
    try:
        stream = await create(model=model, stream=True, extra_headers={"X-Request-Id": case.name}, **case.body)
        async for chunk in stream:
            outcome.chunks += 1
            for choice in chunk.choices:
                outcome.characters += len((choice.delta.content if case.chat else choice.text) or "")
                if choice.finish_reason:
                    outcome.finished.add(choice.index)
            if case.abort and outcome.chunks >= ABORT_AFTER:
                await stream.close()
                break
    except Exception as error:  # noqa: BLE001 -- the transport's own errors come through too; all are this request's
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def drive(base_url: str, cases: list[Case]) -> list[Outcome]:
    gate = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        model = (await client.models.list()).data[0].id

        async def one(case: Case) -> Outcome:
            async with gate:
                return await send(client, model, case)

        return await asyncio.gather(*map(one, cases))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.drive", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base_url", help="example: http://127.0.0.1:9000/v1")
    base_url = parser.parse_args(arguments).base_url
    cases = make_cases(load_streams(HERE / "streams.jsonl"))
    start = time.monotonic()
    try:
        outcomes = asyncio.run(drive(base_url, cases))
    except OpenAIError as error:
        print(f"error: {base_url}: {error}", file=sys.stderr)
        return 2
    bad = [outcome for outcome in outcomes if not outcome.as_meant]
    for outcome in bad:
        print(f"{outcome.case.name}: {outcome.error or 'ended without a finish reason'}", file=sys.stderr)
    chunks, characters = sum(o.chunks for o in outcomes), sum(o.characters for o in outcomes)
    verdict = f"{len(bad)} did not end as they should" if bad else "all ended as they should"
    seconds = time.monotonic() - start
    print(
        f"{len(outcomes)} requests sent in {seconds:.1f} s, {verdict}: {chunks} chunks, {characters} characters",
        file=sys.stderr,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
