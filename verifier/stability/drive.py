"""Send a run's requests, within limits, and keep what comes back as it comes. The thin shell around plan and reply."""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from sparseety.errors import SparseetyError
from sparseety.sse import SseSplitter
from verifier.stability.model import Fingerprint, Forced, Output
from verifier.stability.plan import Job, Plan, Stage, body, forced_body, parameters, salt
from verifier.stability.prompts import Prompt
from verifier.stability.reply import BadReply, StreamReply, forced_top, refusal
from verifier.stability.store import Arm, ArmWriter, Input, Line

API_KEY = "SPARSEETY_VERIFY_API_KEY"
_EVENT_BYTES = 8 << 20
_ANSWER = 60.0  # seconds for a question that is no generation
_LONGEST_HOLD = 60.0  # seconds
_SECRET = 4  # characters; shorter ones are in any text
_IDLE = 2.0  # seconds that a connection is kept for: uvicorn closes it after 5, and then a request would be lost
_FORCED_ERRORS = 2  # in a row
_WARM_UP = 4  # requests before the first stage, which are kept apart

Progress = Callable[[str, int, int, int], None]
"""Is told what runs, how many requests are done, of how many, and how many failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run does to a server at most."""

    at_once: int = 64
    per_second: float | None = None  # requests begun
    requests: int | None = None  # of this call, over all arms; what is left goes on at the next call
    errors: int = 5  # one after another, then it stops
    seconds: float = 600.0  # for one request


class Stopped(Exception):
    """The run cannot go on; what came before is kept."""


@dataclass
class Budget:
    """Counts what was sent, and errors that follow each other."""

    limits: Limits
    sent: int = 0
    failed: int = 0  # in a row
    stopped: str | None = None
    _next: float = field(default=0.0)
    _held: float = field(default=0.0)
    _given_up: bool = field(default=False)

    async def turn(self) -> bool:
        """Wait for the next request's turn; False: there is none."""
        if self.stopped is None and self.limits.requests is not None and self.sent >= self.limits.requests:
            self.stopped = f"the limit of {self.limits.requests} requests is reached"
        if self.stopped is not None:
            return False
        self.sent += 1
        if self.limits.per_second:
            now = time.monotonic()
            self._next = max(self._next, now) + 1 / self.limits.per_second
            await asyncio.sleep(self._next - 1 / self.limits.per_second - now)
        await asyncio.sleep(max(0.0, self._held - time.monotonic()))
        return not self._given_up  # a limit that was reached meanwhile counts this one in

    def hold(self, seconds: float) -> None:
        """Begin nothing for so long: the server asked for it."""
        self._held = max(self._held, time.monotonic() + min(seconds, _LONGEST_HOLD))

    def result(self, error: str | None) -> None:
        self.failed = 0 if error is None else self.failed + 1
        if error is not None and self.failed >= self.limits.errors:
            self._given_up = True
            self.stopped = f"{self.failed} requests in a row failed, the last with: {error}"


class _Card(msgspec.Struct):
    """Of a model, in /v1/models."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


class _Version(msgspec.Struct):
    version: str | None = None


_T = TypeVar("_T")


class Server:
    """One server that requests of a run go to."""

    def __init__(self, url: str, limits: Limits) -> None:
        parts = _parts(url)
        key = os.environ.get(API_KEY)
        if key and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise SparseetyError(f"{API_KEY} holds characters that no key has: is there a line end in it?")
        self._secrets = [secret for secret in (key, parts.password) if secret and len(secret) >= _SECRET]
        self.url = url.rstrip("/").removesuffix("/v1")
        host = parts.netloc.rpartition("@")[2]
        self.shown = f"{parts.scheme}://{host}{urlsplit(self.url).path}"
        self._seconds = limits.seconds
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx.Timeout(limits.seconds, connect=30),
            limits=httpx.Limits(max_connections=limits.at_once, keepalive_expiry=_IDLE),
            trust_env=False,  # measured is the server, not a proxy that the environment names
        )

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def told(self, reason: object) -> str:
        """Its words, less what opens it: some servers quote the key that they refuse."""
        said = str(reason)
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return said

    async def identity(self, arm: str, model: str | None, plan: Plan) -> Fingerprint:
        """Who answers there. Raises SparseetyError where nobody does, or the model is not served."""
        cards = (await self._get("/v1/models", _Models)).data
        names = [card.id for card in cards]
        if model is not None and model not in names:
            raise SparseetyError(f'{self.shown} serves no model "{model}"; it serves: {", ".join(names)}')
        if not names:
            raise SparseetyError(f"{self.shown} serves no model")
        card = cards[names.index(model) if model is not None else 0]
        try:
            version = (await self._get("/version", _Version)).version
        except SparseetyError:
            version = None  # not vLLM
        return Fingerprint(
            arm=arm,
            ts=round(time.time(), 3),
            url=self.shown,
            version=version,
            model=card.id,
            root=card.root,
            max_model_len=card.max_model_len,
            parameters=parameters(plan),
        )

    async def metrics(self) -> bytes:
        """What /metrics says; nothing where there is none."""
        try:
            reply = await self._client.get("/metrics")
        except httpx.HTTPError:
            return b""
        return reply.content if reply.status_code == 200 else b""

    async def _get(self, path: str, kind: type[_T]) -> _T:
        try:
            async with asyncio.timeout(min(self._seconds, _ANSWER)):
                reply = await self._client.get(path)
            if reply.status_code != 200:
                raise SparseetyError(f"{self.shown}{path}: {self.told(refusal(reply.status_code, reply.content))}")
            return msgspec.json.decode(reply.content, type=kind)
        except TimeoutError:
            raise SparseetyError(f"{self.shown}{path}: no answer within {min(self._seconds, _ANSWER):g} s") from None
        except httpx.HTTPError as error:
            raise SparseetyError(f"{self.shown} does not answer: {_words(error)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SparseetyError(f"{self.shown}{path}: not the reply of an OpenAI-compatible server") from None

    async def stream(self, path: str, content: dict[str, Any], request_id: str, reply: StreamReply) -> None:
        """Send a request and collect its stream. Raises BadReply."""
        splitter = SseSplitter(_EVENT_BYTES)
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream("POST", path, json=content, headers={"X-Request-Id": request_id}) as response,
            ):
                if response.status_code != 200:
                    raise BadReply(refusal(response.status_code, await response.aread()), _wait(response.headers))
                async for data in response.aiter_bytes():
                    now = time.monotonic()
                    for event in splitter.feed(data):
                        reply.take(event, now)
            reply.closed()
        except TimeoutError:
            raise BadReply(f"no end within {self._seconds:g} s") from None
        except httpx.HTTPError as error:
            raise BadReply(_words(error)) from None

    async def whole(self, path: str, content: dict[str, Any], request_id: str) -> bytes:
        """Send a request that is answered at once. Raises BadReply."""
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._client.post(path, json=content, headers={"X-Request-Id": request_id})
        except TimeoutError:
            raise BadReply(f"no end within {self._seconds:g} s") from None
        except httpx.HTTPError as error:
            raise BadReply(_words(error)) from None
        if response.status_code != 200:
            raise BadReply(refusal(response.status_code, response.content))
        return response.content


class Driver:
    """Runs one arm of a plan against its server."""

    def __init__(
        self,
        plan: Plan,
        prompts: list[Prompt],
        server: Server,
        model: str,
        budget: Budget,
        progress: Progress,
        texts: dict[tuple[int, ...], str] | None = None,
    ) -> None:
        self._plan, self._prompts, self._server, self._model = plan, prompts, server, model
        self._budget, self._progress, self._texts = budget, progress, texts
        self._session = secrets.token_hex(2)  # in the ids of what may be sent again when a run goes on

    async def warm_up(self, salt_: str, count: int | None = None) -> None:
        """Have prompts computed once, and forget the replies. Raises Stopped."""
        count = min(_WARM_UP, len(self._prompts)) if count is None else count
        for number, prompt in enumerate(self._prompts[:count]):
            path, content = body(prompt, self._model, 1, self._plan.top, salt_)
            await self._try(content, path, f"{salt_}-warm-up-{self._session}-{number}", StreamReply())
            self._progress("warm-up", number + 1, count, self._budget.failed)

    async def stage(self, stage: Stage, arm: Arm, writer: ArmWriter) -> None:
        """Raises Stopped."""
        if stage.cache == "warm" and stage.jobs:
            await self.warm_up(salt(self._plan, stage.jobs[0], ""), len(self._prompts))
        failed = 0
        name, total = f"{stage.arm} at {stage.load}, {stage.cache}", len(stage.jobs)
        self._progress(name, 0, total, 0)
        done = 0

        async def one(job: Job) -> None:
            nonlocal done, failed
            output = await self._one(job, arm, writer)
            done, failed = done + 1, failed + (output.error is not None)
            self._progress(name, done, total, failed)

        await self._at_once(stage.load, (one(job) for job in stage.jobs))

    async def force(self, arm: Arm, references: list[tuple[Output, list[int]]], writer: ArmWriter) -> None:
        """Feed outputs of the baseline, behind the ids of their prompts, one after another. Raises Stopped.

        A server that cannot do it is not asked on: that is no reason to give up the run.
        """
        left = [each for each in references if (f := arm.forced.get(each[0].request_id)) is None or f.error]
        failed = 0
        for number, (output, prompt_ids) in enumerate(left):
            if failed >= _FORCED_ERRORS:
                return
            if not await self._budget.turn():
                raise Stopped(self._budget.stopped)
            request_id = f"{self._plan.name}-{arm.name}-forced-{self._session}-{output.request_id}"
            path, content = forced_body([*prompt_ids, *output.ids], self._model, self._plan.top, request_id)
            error, top = None, []
            try:
                top = forced_top(await self._server.whole(path, content, request_id), len(output.ids))
            except BadReply as reason:
                error = self._server.told(reason)
            forced = Forced(
                arm=arm.name, prompt=output.prompt, reference=output.request_id, ids=output.ids, top=top, error=error
            )
            arm.take(line := Line(forced=forced))
            writer.write(line)
            failed = failed + 1 if error else 0
            self._progress(f"{arm.name} teacher forcing", number + 1, len(left), failed)

    async def _one(self, job: Job, arm: Arm, writer: ArmWriter) -> Output:
        plan = self._plan
        goes_on = arm.fingerprint is not None  # as it was read: an earlier process began it
        request_id = job.request_id(plan, self._session if goes_on else "")
        prompt = self._prompts[job.key.prompt]
        path, content = body(prompt, self._model, plan.max_tokens, plan.top, salt(plan, job, request_id))
        reply = StreamReply()
        error = await self._try(content, path, request_id, reply)
        output = reply.output(job, request_id, error)
        if self._texts is not None:
            self._texts.setdefault(tuple(output.ids), "".join(reply.text))
        lines = [Line(output=output)]
        if reply.prompt_ids is not None and arm.inputs.get(job.key.prompt) != reply.prompt_ids:
            lines.append(Line(input=Input(job.key.prompt, reply.prompt_ids)))
        for line in lines:
            arm.take(line)
            writer.write(line)
        return output

    async def _try(self, content: dict[str, Any], path: str, request_id: str, reply: StreamReply) -> str | None:
        """Returns what went wrong. Raises Stopped where there is no turn any more."""
        if not await self._budget.turn():
            raise Stopped(self._budget.stopped)
        error, reply.sent = None, time.monotonic()
        try:
            await self._server.stream(path, content, request_id, reply)
        except BadReply as reason:
            error = self._server.told(reason)
            self._budget.hold(reason.wait)
        self._budget.result(error)
        return error

    async def _at_once(self, load: int, jobs: Iterable[Awaitable[None]]) -> None:
        """Keep `load` of them running. Those that run when it stops come to their end. Raises Stopped."""
        queue: Iterator[Awaitable[None]] = iter(jobs)
        stopped: list[Stopped] = []

        async def worker() -> None:
            for job in queue:
                try:
                    await job
                except Stopped as reason:
                    stopped.append(reason)
                    return

        await asyncio.gather(*(worker() for _ in range(load)))
        if stopped:
            raise stopped[0]


def _wait(headers: httpx.Headers) -> float:
    """Seconds that a refusal asks to wait for (`Retry-After`; as a date it is not heeded)."""
    value = headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _parts(url: str) -> SplitResult:
    """Raises SparseetyError."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query:
            return parts
    except (ValueError, httpx.InvalidURL):
        pass
    raise SparseetyError(f'"{url}" is not a URL of a server; example: http://127.0.0.1:9000')


def _words(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
