"""What the server says to one request of a run. Pure: bytes and times in, ids and log probabilities out."""

import hashlib
from typing import Any

import msgspec

from sparseety.sse import SseEvent, read_fields
from verifier.stability.model import Output, Top
from verifier.stability.plan import Job

_ID = "token_id:"  # how vLLM spells a token under return_tokens_as_token_ids
DONE = b"[DONE]"
_TEXT = ("reasoning", "reasoning_content", "content", "text")  # keys of what a client sees


class BadReply(Exception):
    """The reply is none that can be used; the words say why."""


class StreamReply:
    """Collects one event stream of /v1/chat/completions or /v1/completions, one choice."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.top: list[Top] = []
        self.text: list[str] = []
        self.prompt_ids: list[int] | None = None
        self.prompt_tokens: int | None = None
        self.tokens: int | None = None  # of the output, as the server counts them
        self.response_id: str | None = None
        self.finish: str | None = None
        self.sent = 0.0  # when the request was
        self.first: float | None = None  # when the first and the last token came
        self.last: float | None = None
        self.done = False

    def take(self, event: SseEvent, at: float) -> None:
        """Raises BadReply."""
        data = read_fields(event).data
        if data is None:
            return
        if data == DONE:
            self.done = True
            return
        try:
            body = msgspec.json.decode(data)
            self._take(body, at)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadReply(f"an event that is not understood ({type(error).__name__})") from None

    def _take(self, body: dict[str, Any], at: float) -> None:
        if error := body.get("error"):
            raise BadReply(f"the server reports an error: {_message(error)}")
        self.response_id = self.response_id or body.get("id")
        if usage := body.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.tokens = usage.get("completion_tokens", self.tokens)
        if body.get("prompt_token_ids") is not None:
            self.prompt_ids = body["prompt_token_ids"]
        for choice in body["choices"]:
            if choice.get("prompt_token_ids") is not None:
                self.prompt_ids = choice["prompt_token_ids"]
            self._ids(choice, at)
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or choice
            self.text += [delta[name] for name in _TEXT if delta.get(name)]

    def _ids(self, choice: dict[str, Any], at: float) -> None:
        ids = choice.get("token_ids") or []
        if not ids:
            return
        self.first = at if self.first is None else self.first
        self.last = at
        self.ids += ids
        self.top += alternatives(choice.get("logprobs"))

    def closed(self) -> None:
        """The stream has ended. Raises BadReply where it is not whole."""
        if not self.done or self.finish is None:
            raise BadReply("the stream ended before the reply was whole")
        if not self.ids:
            raise BadReply("no token ids in the stream (return_token_ids: vLLM 0.10.2 or newer)")
        if self.tokens is not None and self.tokens != len(self.ids):
            raise BadReply(f"{len(self.ids)} token ids of {self.tokens} tokens: does a parser leave some out?")
        if self.top and len(self.top) != len(self.ids):
            raise BadReply(f"{len(self.ids)} token ids and {len(self.top)} log probabilities")

    def output(self, job: Job, request_id: str, error: str | None = None) -> Output:
        """What is kept of it."""
        prompt, repeat, cache = job.key
        first, last, more = self.first, self.last, len(self.ids) - 1
        return Output(
            arm=job.arm,
            prompt=prompt,
            repeat=repeat,
            load=job.load,
            cache=cache,
            request_id=request_id,
            response_id=self.response_id,
            ids=self.ids,
            top=self.top if len(self.top) == len(self.ids) else [],
            finish=self.finish,
            error=error,
            prompt_sha256=ids_sha256(self.prompt_ids) if self.prompt_ids is not None else None,
            prompt_tokens=len(self.prompt_ids) if self.prompt_ids is not None else self.prompt_tokens,
            ttft=round(first - self.sent, 6) if first is not None else None,
            tpot=round((last - first) / more, 6) if first is not None and last is not None and more > 0 else None,
        )


def ids_sha256(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def alternatives(logprobs: Any) -> list[Top]:
    """Of each token of an event: chat lists them, completions has an object by token."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [_best((a["token"], a["logprob"]) for a in entry["top_logprobs"]) for entry in logprobs["content"] or []]
    return [_best((entry or {}).items()) for entry in logprobs.get("top_logprobs") or []]


def _best(pairs: Any) -> Top:
    return sorted(((_id(token), round(logprob, 6)) for token, logprob in pairs), key=lambda pair: -pair[1])


def _id(token: str) -> int:
    if not token.startswith(_ID):
        raise ValueError("the server spells tokens as text (return_tokens_as_token_ids is not known to it)")
    return int(token[len(_ID) :])


def forced_top(data: bytes, count: int) -> list[Top]:
    """What a server thinks of the last `count` ids of a prompt. Raises BadReply."""
    try:
        entries = msgspec.json.decode(data)["choices"][0]["prompt_logprobs"]
        found = [
            sorted(((int(i), round(each["logprob"], 6)) for i, each in entry.items()), key=lambda pair: -pair[1])
            for entry in entries[len(entries) - count :]
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise BadReply("no prompt_logprobs in the reply") from None
    if len(found) != count:
        raise BadReply(f"prompt_logprobs of {len(found)} positions, for {count} ids")
    return found


def refusal(status: int, body: bytes) -> str:
    """Why there is no stream, in the server's words, without content: those of an HTTP error quote none as a rule."""
    try:
        said = _message(msgspec.json.decode(body).get("error"))
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        said = ""
    return f"HTTP {status}" + (f": {said}" if said else "")


def _message(error: Any) -> str:
    said = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(said or "no words")[:200].split())
