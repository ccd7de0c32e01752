"""What the server says to one request of a run. Pure: bytes and times in, ids and log probabilities out."""

import hashlib
from typing import Annotated, Any, TypeVar

import msgspec

from sparseety.sse import SseEvent, read_fields
from verifier.output import printable
from verifier.stability.model import Output, Top
from verifier.stability.plan import Job

_ID = "token_id:"  # how vLLM spells a token under return_tokens_as_token_ids
DONE = b"[DONE]"


class BadReply(Exception):
    """The reply is none that can be used; the words say why. wait: seconds for which the server asks to be spared."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


_IDS = 1 << 31  # more than any vocabulary has
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=_IDS)]

# What is read of an event. Typed, since whatever passes here is kept, and must be read again.


class _Delta(msgspec.Struct):
    """What a client sees."""

    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    id: str | None = None
    error: Any = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


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
            self._take(msgspec.json.decode(data, type=_Event), at)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadReply(f"an event that is not understood ({type(error).__name__})") from None

    def _take(self, event: _Event, at: float) -> None:
        if event.error:
            raise BadReply(f"the server reports an error: {_message(event.error)}")
        if event.choices is None:
            raise ValueError("no choices")
        self.response_id = self.response_id or event.id
        if event.usage:
            self.prompt_tokens = _known(event.usage.prompt_tokens, self.prompt_tokens)
            self.tokens = _known(event.usage.completion_tokens, self.tokens)
        self.prompt_ids = _known(event.prompt_token_ids, self.prompt_ids)
        for choice in event.choices:
            self.prompt_ids = _known(choice.prompt_token_ids, self.prompt_ids)
            self._ids(choice, at)
            self.finish = choice.finish_reason or self.finish
            delta = choice.delta or _Delta()
            seen = (delta.reasoning, delta.reasoning_content, delta.content, choice.text)
            self.text += [text for text in seen if text]

    def _ids(self, choice: _Choice, at: float) -> None:
        if not choice.token_ids:
            return
        self.first = at if self.first is None else self.first
        self.last = at
        self.ids += choice.token_ids
        self.top += alternatives(choice.logprobs)

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


_Any = TypeVar("_Any")


def _known(value: _Any | None, before: _Any | None) -> _Any | None:
    return before if value is None else value


def ids_sha256(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def alternatives(logprobs: Any) -> list[Top]:
    """Of each token of an event: chat lists them, completions has an object by token.

    The token that was taken is among them, though a server need not count it among the likeliest ones.
    """
    if not logprobs:
        return []
    if "content" in logprobs:
        return [_best([*entry["top_logprobs"], entry]) for entry in logprobs["content"] or []]
    taken = zip(logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True)
    tops = [[_named(*pair) for pair in (entry or {}).items()] for entry in logprobs.get("top_logprobs") or []]
    for top, pair in zip(tops, taken, strict=False):
        top.append(_named(*pair))
    return [_best(top) for top in tops]


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob}


def _best(entries: list[dict[str, Any]]) -> Top:
    known = {_id(entry["token"]): round(entry["logprob"], 6) for entry in reversed(entries)}
    return sorted(known.items(), key=lambda pair: -pair[1])


def _id(token: str) -> int:
    if not token.startswith(_ID):
        raise BadReply("the server spells tokens as text (return_tokens_as_token_ids is not known to it)")
    id_ = int(token[len(_ID) :])
    if not 0 <= id_ < _IDS:
        raise ValueError("no token id")
    return id_


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
    return printable(" ".join(str(said or "no words")[:200].split()))
