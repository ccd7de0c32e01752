"""What a stability run asks, of whom and in which order. Pure: the same plan gives the same requests again."""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sparseety.errors import SparseetyError
from verifier.stability.model import Output
from verifier.stability.prompts import Prompt

Cache = Literal["cold", "warm"]
BASELINE, AGAIN, CANDIDATE = "a1", "a2", "b"  # the arms that a verdict needs
FORMAT_VERSION = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked of each arm. A run that goes on must have the same plan."""

    format: int = FORMAT_VERSION
    name: str  # of the run; begins the id of each request
    prompts_sha256: str
    prompts: int  # how many there are
    repeats: int  # of each prompt, at each load and cache state
    loads: list[int]  # requests at once, ascending
    caches: list[Cache]
    max_tokens: int
    top: int  # log probabilities at each position; 0: none are asked for
    forced: int  # prompts of which a1's output is fed to the other arms (teacher forcing)
    seed: int  # of the order

    @property
    def cells(self) -> int:
        """Requests of one arm."""
        return self.prompts * self.repeats * len(self.loads) * len(self.caches)


class Key(NamedTuple):
    """Names an output within its arm."""

    prompt: int
    repeat: int
    cache: str


class Job(NamedTuple):
    """One request that is to be sent."""

    arm: str
    key: Key
    load: int

    def request_id(self, plan: Plan, session: str = "") -> str:
        """Unlike all others, or the logs could not tell two attempts apart, and a cold one would find its own prefix.

        session: of a run that goes on. What its predecessor had under way when it was killed was sent, and not kept.
        """
        prompt, repeat, cache = self.key
        again = f"-again{session}" if session else ""
        return f"{plan.name}-{self.arm}-p{prompt}-r{repeat}-{cache}{again}"


class Stage(NamedTuple):
    """Requests that run at the same load."""

    arm: str
    load: int
    cache: Cache
    jobs: list[Job]


def loads_of(arm: str, loads: Sequence[int]) -> list[int]:
    """The baseline's second run meets each repeat at another load than its first: that is what makes noise."""
    if arm != AGAIN:
        return list(loads)
    turned = [loads[-1], *loads[:-1]]
    return [other if other != load else _another(load) for load, other in zip(loads, turned, strict=True)]


def _another(load: int) -> int:
    return load // 2 or 2


def stages(plan: Plan, arm: str) -> list[Stage]:
    """All that is asked of an arm, in order: within a stage prompts are shuffled, so that no two arms batch alike."""
    found = []
    for cache in plan.caches:
        for index, load in enumerate(loads_of(arm, plan.loads)):
            first = index * plan.repeats
            keys = [Key(p, r, cache) for r in range(first, first + plan.repeats) for p in range(plan.prompts)]
            order = shuffled(keys, plan, f"{arm} {cache} {index}")
            found.append(Stage(arm, load, cache, [Job(arm, key, load) for key in order]))
    return found


def shuffled(keys: list[Key], plan: Plan, what: str) -> list[Key]:
    """The same again for the same seed."""
    order = list(keys)
    random.Random(f"{plan.seed} {what}").shuffle(order)
    return order


def to_do(stage: Stage, outputs: Iterable[Output]) -> Stage:
    """What is left of a stage, where these outputs are there already. One that failed is asked for again."""
    done = {Key(output.prompt, output.repeat, output.cache) for output in outputs if output.error is None}
    return stage._replace(jobs=[job for job in stage.jobs if job.key not in done])


def salt(plan: Plan, job: Job, request_id: str) -> str:
    """vLLM shares cached prefixes only among requests of one salt."""
    return request_id if job.key.cache == "cold" else f"{plan.name}-{job.arm}-warm"


def parameters(plan: Plan) -> dict[str, bool | int | float]:
    """What decides about the output, and is the same in all requests."""
    return {"temperature": 0, "max_tokens": plan.max_tokens, "top_logprobs": plan.top}


def body(prompt: Prompt, model: str, max_tokens: int, top: int, cache_salt: str) -> tuple[str, dict[str, Any]]:
    """(path, body) of a streamed request whose reply names ids, prompt and alternatives included, by number."""
    common = {
        "model": model,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": cache_salt,
    }
    if prompt.messages is not None:
        wanted = {"logprobs": True, "top_logprobs": top} if top else {}
        return "/v1/chat/completions", common | {"messages": msgspec.to_builtins(prompt.messages)} | wanted
    return "/v1/completions", common | {"prompt": prompt.prompt} | ({"logprobs": top} if top else {})


def forced_body(ids: list[int], model: str, top: int, cache_salt: str) -> tuple[str, dict[str, Any]]:
    """(path, body) of the request that says what an arm would have sampled at each position of `ids`."""
    return "/v1/completions", {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top,
        "cache_salt": cache_salt,
    }


def same_or_say(stored: Plan, wanted: Plan) -> None:
    """Raises SparseetyError where a run would go on with another plan than it began with."""
    fields = [name for name in stored.__struct_fields__ if name != "name"]
    changed = [name for name in fields if getattr(stored, name) != getattr(wanted, name)]
    if changed:
        said = ", ".join(f"{name} {getattr(stored, name)} -> {getattr(wanted, name)}" for name in changed)
        raise SparseetyError(f"this run was begun with another plan ({said}); give the same options, or a new --out")
