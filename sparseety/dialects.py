"""How each endpoint speaks: which reader its stream events and its whole replies need."""

from collections.abc import Callable
from typing import NamedTuple

from sparseety import chunks, messages, responses
from sparseety.chunks import ChunkBody, ReplyBody
from sparseety.records import Endpoint

DONE = b"[DONE]"


class Dialect(NamedTuple):
    read_chunk: Callable[[bytes], ChunkBody]  # raises chunks.Unreadable
    read_reply: Callable[[bytes], ReplyBody]  # raises chunks.Unreadable
    done: bool  # streams end with `data: [DONE]`; False: with an event of their own


DIALECTS: dict[Endpoint, Dialect] = {
    "chat": Dialect(chunks.read_chunk, chunks.read_reply, done=True),
    "completions": Dialect(chunks.read_chunk, chunks.read_reply, done=True),
    "responses": Dialect(responses.read_chunk, responses.read_reply, done=False),
    "messages": Dialect(messages.read_chunk, messages.read_reply, done=False),
}
