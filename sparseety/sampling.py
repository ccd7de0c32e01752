"""Which requests are recorded where not all are. Pure, so that both witnesses choose the same ones."""

import hashlib


def join_key(external_id: str) -> str:
    """The id that the reply has, from the id that the engine was given: /v1/completions adds `-<prompt>` to it."""
    if external_id.startswith("cmpl-"):
        head, dash, prompt = external_id.rpartition("-")
        if dash and prompt.isdecimal() and head != "cmpl":
            return head
    return external_id


def threshold(rate: float) -> int:
    """Hashes below this are chosen. Of 2**64 values, so that 0.001 means 0.1 % and not the next whole per cent."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a sampling rate is between 0 and 1, not {rate}")
    return round(rate * 2.0**64)


def chosen(key: bytes, reply_id: str, limit: int) -> bool:
    """Whether the request with this reply id is recorded; `limit` is threshold(rate).

    The hash is keyed, because clients may choose their ids. Raises ValueError for a key of more than 64 bytes.
    """
    digest = hashlib.blake2b(reply_id.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") < limit


def key_id(key: bytes) -> str:
    """Names a key without giving it away."""
    return hashlib.blake2b(b"sparseety sampling key", digest_size=4, key=key).hexdigest()
