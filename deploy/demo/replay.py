"""Replay really sampled ids as an engine and its front end would: ids in, text out, when to stop. No I/O but loading.

Source: vLLM 0.32, v1/engine/detokenizer.py and output_processor.py. What matters of it: one DecodeStream step an id,
primed with the prompt; an incomplete character is held back and never flushed; the end token is not detokenised; stop
strings are looked for in the text, by the front end, so the engine has sampled on when it hears of them.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence, as it came from the model."""

    kind: str  # en, code, zh, other, emoji, misc
    greedy: bool  # else temperature 1
    prompt: str  # what the user said
    prompt_ids: list[int]  # that in the chat template, without a system message
    ids: list[int]  # with the end token where finish is "stop"
    finish: str  # stop or length


def load_streams(path: Path) -> list[Stream]:
    return [msgspec.json.decode(line, type=Stream) for line in path.read_bytes().splitlines()]


def pick(streams: list[Stream], prompt: str | list[int], child: int, greedy: bool) -> Stream:
    """The stream that answers this prompt (text, or ids); any other prompt gets one that depends on it alone.

    Child k of n gets another stream than its siblings: first those sampled for the same prompt, then the others.
    """
    same = [stream for stream in streams if prompt in (stream.prompt, stream.prompt_ids)]
    if not same:
        seed = prompt.encode() if isinstance(prompt, str) else repr(prompt).encode()
        start = sum(seed) % len(streams)  # not hash(): the same in every process
        same = [streams[start]]
    same = sorted(same, key=lambda stream: stream.greedy != greedy)
    start = streams.index(same[0])
    others = [stream for stream in streams[start:] + streams[:start] if stream not in same]
    return (same + others)[child % len(streams)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What decides where a sequence ends and which text it gives."""

    max_tokens: int
    eos_id: int
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What the front end got of one engine step, for one choice."""

    choice: int
    text: str  # may be empty: held back
    ids: list[int]
    total: int  # ids of this choice so far, these included
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine's own word on how a sequence ended; a stop string is an abort to it."""

    reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Tick:
    """One engine step, for all choices of one request."""

    rows: dict[int, list[int]] = field(default_factory=dict)  # choice -> ids the scheduler accepted
    pieces: list[Piece] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)  # choice -> its end


class Detokenizer:
    """Text of one sequence, id by id, less what a stop string may still take back."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], sampling: Sampling) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._stream = DecodeStream(ids=prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
        self._text = ""
        self._sent = 0
        hold_back = sampling.stop and not sampling.include_stop_str_in_output
        self._held_back = max(map(len, sampling.stop)) - 1 if hold_back else 0

    def add(self, token_id: int, *, is_end: bool) -> str | None:
        """Take one id; `is_end`: it ended the sequence as an end token. Returns the stop string it completed."""
        if is_end and not self._sampling.include_stop_str_in_output:
            return None
        new = self._step(token_id)
        self._text += new
        return self._cut_at_stop(len(new)) if new else None

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # As vLLM does it: broken bytes became whole otherwise than foreseen; begin anew, without the context.
            self._stream = DecodeStream(skip_special_tokens=self._sampling.skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""

    def delta(self, *, finished: bool) -> str:
        """Text not handed out yet."""
        end = len(self._text) - (0 if finished else self._held_back)
        start = self._sent
        if end <= start:
            return ""
        self._sent = end
        return self._text[start:end]

    def _cut_at_stop(self, new: int) -> str | None:
        """Cut the text at the stop string that completes first; ties go by the order they were given in."""
        found = [
            (index + len(stop), stop)
            for stop in self._sampling.stop
            if (index := self._text.find(stop, max(0, len(self._text) - new - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, stop = min(found, key=lambda hit: hit[0])
        self._text = self._text[: end if self._sampling.include_stop_str_in_output else end - len(stop)]
        return stop


def _endless(stream: Stream, sampling: Sampling) -> Iterator[int]:
    """The stream's ids for as long as anybody asks: one that was cut by length gets an end token, then it repeats."""
    ids = stream.ids if stream.ids[-1] == sampling.eos_id else [*stream.ids, sampling.eos_id]
    return itertools.cycle(ids)


def _engine_end(token_id: int, count: int, sampling: Sampling) -> Ended | None:
    """Whether the engine stops a sequence at its `count`-th id. Order as in vLLM's check_stop."""
    if token_id == sampling.eos_id and not sampling.ignore_eos:
        return Ended("stop")
    if token_id in sampling.stop_token_ids:
        return Ended("stop", token_id)
    return Ended("length") if count >= sampling.max_tokens else None


def replay(tokenizer: Tokenizer, stream: Stream, prompt_ids: list[int], sampling: Sampling, choice: int) -> list[Tick]:
    """All steps of one sequence."""
    detokenizer = Detokenizer(tokenizer, prompt_ids, sampling)
    ids = _endless(stream, sampling)
    ticks: list[Tick] = []
    for count, token_id in enumerate(ids, start=1):
        ended = _engine_end(token_id, count, sampling)
        stopped_by = detokenizer.add(token_id, is_end=ended is not None and ended.reason == "stop")
        said = Ended("stop", stopped_by) if stopped_by else ended
        piece = Piece(
            choice,
            detokenizer.delta(finished=said is not None),
            [token_id],
            count,
            said.reason if said else None,
            said.stop_reason if said else None,
        )
        tick = Tick({choice: [token_id]}, [piece], {choice: ended} if ended else {})
        ticks.append(tick)
        if said and not ended:  # the next step was under way when the abort arrived
            overrun = next(ids)
            last = _engine_end(overrun, count + 1, sampling) or Ended("abort")
            ticks.append(Tick({choice: [overrun]}, [], {choice: last}))
        if said:
            break
    return ticks


def together(sequences: list[list[Tick]]) -> list[Tick]:
    """Steps of sequences that run side by side from the same step on."""
    merged = []
    for ticks in itertools.zip_longest(*sequences):
        into = Tick()
        for tick in filter(None, ticks):
            into.rows |= tick.rows
            into.pieces += tick.pieces
            into.ended |= tick.ended
        merged.append(into)
    return merged


def chat_prompt(messages: list[tuple[str, str]]) -> str:
    """(role, content) pairs in SmolLM2's chat template, which puts in a system message where none was given."""
    if not messages or messages[0][0] != "system":
        messages = [("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"), *messages]
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return turns + "<|im_start|>assistant\n"


Encode = Callable[[str], list[int]]


def encoder(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
