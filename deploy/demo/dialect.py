"""vLLM's words on the wire: stream events and whole replies, key by key in vLLM's order. No I/O.

Source: replies of vLLM 0.32 with a tool parser switched on (so a delta without text is `{}`, and is not sent at all
unless the client wants ids or logprobs), and its entrypoints/openai/*/serving.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deploy.demo.replay import Piece
from deploy.demo.requests import Ask

Json = dict[str, Any]
Spell = Callable[[int], str]
"""A token's text by itself, special tokens included."""

FINGERPRINT = "vllm-0.32.0-sparseety-demo"
DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(slots=True)
class Reply:
    """Words one request's pieces. Holds what the dialect makes a chunk depend on: which came before it."""

    ask: Ask
    created: int  # Unix seconds
    spell: Spell
    usage_error: int = 0  # a fault: added to the number of completion tokens
    _begun: set[int] = field(default_factory=set)  # choices of which something was sent
    _totals: dict[int, int] = field(default_factory=dict)  # ids by choice
    _offsets: dict[int, int] = field(default_factory=dict)  # completions: characters in the logprobs so far

    def events(self, pieces: list[Piece]) -> list[bytes]:
        """The events for what one engine step brought."""
        chat = self.ask.endpoint == "chat"
        opening = [self._role(choice) for choice in range(self.ask.n)] if chat and not self._begun else []
        self._begun.update(range(self.ask.n) if chat else ())
        bodies = [body for piece in pieces if (body := (self._chat if chat else self._completion)(piece))]
        return [event(body) for body in opening + bodies]

    def closing(self) -> list[bytes]:
        """What follows the last choice's finish."""
        if not self.ask.include_usage:
            return [DONE]
        cached: Json = {"cached_tokens": 0}
        if self.ask.endpoint == "chat":
            cached["created_cache_tokens"] = 0
        usage = self._usage(self._prompt_tokens(), sum(self._totals.values()) + self.usage_error)
        usage["prompt_tokens_details"] = cached
        return [event({**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}), DONE]

    def whole(self, pieces: list[Piece]) -> bytes:
        """The reply to a request that did not ask for a stream."""
        count = len(self.ask.prompts) * self.ask.n
        by_choice = [[piece for piece in pieces if piece.choice == choice] for choice in range(count)]
        chat = self.ask.endpoint == "chat"
        choices = [(self._message if chat else self._text)(index, own) for index, own in enumerate(by_choice)]
        usage = self._usage(self._prompt_tokens(), sum(self._totals.values()) + self.usage_error)
        usage["prompt_tokens_details"] = None
        usage["completion_tokens_details"] = None
        head = self._head()
        head["object"] = "chat.completion" if chat else "text_completion"
        body = {**head, "choices": choices, "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
        if chat:
            prompt_ids = self.ask.prompts[0].ids if self.ask.return_token_ids else None
            body |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
        body |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return msgspec.json.encode(body)

    # ------------------------------------------------------------------------------------------ stream events

    def _head(self) -> Json:
        kind = "chat.completion.chunk" if self.ask.endpoint == "chat" else "text_completion"
        return {"id": self.ask.response_id, "object": kind, "created": self.created, "model": self.ask.model}

    def _role(self, choice: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        body = self._head()
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}]
        if self.ask.continuous_usage:
            body["usage"] = {**self._usage(len(self.ask.prompts[0].ids), 0), "completion_tokens_details": None}
        body["prompt_token_ids"] = self.ask.prompts[0].ids if self.ask.return_token_ids else None
        body["prompt_text"] = None
        return body

    def _chat(self, piece: Piece) -> Json | None:
        self._totals[piece.choice] = piece.total
        ask = self.ask
        if not piece.text and piece.finish_reason is None and not ask.return_token_ids and ask.logprobs is None:
            return None  # held back, and nobody asked for anything but text
        choice: Json = {
            "index": piece.choice,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._chat_logprobs(piece.ids),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        choice["token_ids"] = piece.ids if ask.return_token_ids else None
        return self._chunk(piece, choice, {"completion_tokens_details": None})

    def _completion(self, piece: Piece) -> Json:
        self._totals[piece.choice] = piece.total
        ask, first = self.ask, piece.choice not in self._begun
        self._begun.add(piece.choice)
        prompt_ids = ask.prompts[piece.choice // ask.n].ids if first and ask.return_token_ids else None
        choice: Json = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": self._completion_logprobs(piece.choice, piece.ids),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": piece.ids if ask.return_token_ids else None,
        }
        return self._chunk(piece, choice, {})

    def _chunk(self, piece: Piece, choice: Json, details: Json) -> Json:
        body = {**self._head(), "choices": [choice]}
        if self.ask.continuous_usage:
            prompt = self.ask.prompts[piece.choice // self.ask.n]
            body["usage"] = {**self._usage(len(prompt.ids), piece.total), **details}
        if piece.finish_reason is not None and not self.ask.include_usage:
            body["system_fingerprint"] = FINGERPRINT
        return body

    # ---------------------------------------------------------------------------------- parts of a whole reply

    def _message(self, index: int, pieces: list[Piece]) -> Json:
        text, ids, last = self._sum(pieces)
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._chat_logprobs(ids),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "token_ids": ids if self.ask.return_token_ids else None,
            "routed_experts": None,
        }

    def _text(self, index: int, pieces: list[Piece]) -> Json:
        text, ids, last = self._sum(pieces)
        wants_ids = self.ask.return_token_ids
        return {
            "index": index,
            "text": text,
            "logprobs": self._completion_logprobs(index, ids),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "token_ids": ids if wants_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self.ask.prompts[index // self.ask.n].ids if wants_ids else None,
            "routed_experts": None,
        }

    def _sum(self, pieces: list[Piece]) -> tuple[str, list[int], Piece]:
        last = pieces[-1]
        self._totals[last.choice] = last.total
        return "".join(piece.text for piece in pieces), [i for piece in pieces for i in piece.ids], last

    def _prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.ask.prompts)

    @staticmethod
    def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}

    # ------------------------------------------------------------------------------------------------ logprobs
    # Right in shape and number; the values are made up, as the streams keep none.

    def _chat_logprobs(self, ids: list[int]) -> Json | None:
        if self.ask.logprobs is None:
            return None
        return {
            "content": [
                {**self._entry(i, 0), "top_logprobs": [self._entry(i + k, k) for k in range(self.ask.logprobs)]}
                for i in ids
            ]
        }

    def _entry(self, token_id: int, rank: int) -> Json:
        return {"token": self._name(token_id), "logprob": _logprob(token_id, rank), "bytes": self._bytes(token_id)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.ask.tokens_as_ids else self.spell(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self.spell(token_id).encode())

    def _completion_logprobs(self, choice: int, ids: list[int]) -> Json | None:
        if self.ask.logprobs is None:
            return None
        texts = [self.spell(i) for i in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_logprob(i, 0) for i in ids],
            "tokens": [self._name(i) for i in ids],
            "top_logprobs": [
                {self._name(i + k): _logprob(i + k, k) for k in range(max(1, self.ask.logprobs))} for i in ids
            ],
        }


def _logprob(token_id: int, rank: int) -> float:
    return -(1 + token_id % 89) / 64 - rank
