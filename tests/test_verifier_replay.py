"""Replay emits what the library that vLLM detokenizes with emits, id by id, and does not slow down on broken bytes."""

import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream

from tests.logbook import BYTE_LEVEL, SENTENCEPIECE
from verifier import tokenizer as module
from verifier.compare import Ending, compare
from verifier.expect import TextRules
from verifier.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "deploy/demo/tokenizer"
SHARED = ROOT.parent / "shared/tokenizers"  # real tokenizers, where the checkout has them beside it
REAL = [
    SMOLLM2,
    *(SHARED / name for name in ("qwen3", "mistral-v1", "deepseek-v4", "gpt2") if (SHARED / name).is_dir()),
]


@cache
def library_of(path: Path) -> Library:
    return Library.from_file(str(path / "tokenizer.json" if path.is_dir() else path))


def by_library(path: Path, prompt: list[int], ids: list[int], *, skip_special: bool) -> list[str]:
    """As vLLM 0.32 does it: DecodeStream, and a new one where that one gives up."""
    library = library_of(path)
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip_special)
    pieces = []
    for token_id in ids:
        try:
            piece = stream.step(library, token_id)
        except Exception:  # noqa: BLE001 -- the library raises plain Exception
            stream = DecodeStream(skip_special_tokens=skip_special)
            piece = stream.step(library, token_id)
        pieces.append(piece or "")
    return pieces


def short_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of single bytes and broken characters: what makes trouble."""
    table = tokenizer.table or {}
    broken = [token_id for token_id, piece in table.items() if "\ufffd" in piece.decode(errors="replace")]
    return sorted([*broken, *(token_id for token_id, piece in table.items() if len(piece) == 1)])


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("path", [BYTE_LEVEL, SENTENCEPIECE, *REAL], ids=lambda path: path.name)
def test_replay_is_the_librarys_stream_on_random_ids(path, skip_special):
    tokenizer = load_tokenizer(path)
    dice = random.Random(path.name)
    everything = sorted([*(tokenizer.table or {}), 10**6])  # and one that no tokenizer has
    trouble = short_ids(tokenizer) or everything
    special = sorted(tokenizer.special) or everything
    emitted = 0
    for _ in range(60):
        pools = dice.choices([everything, trouble, special], [dice.random(), dice.random(), dice.random() / 3], k=48)
        ids = [dice.choice(pool) for pool in pools]
        prompt = [dice.choice(dice.choice([everything, trouble, special])) for _ in range(dice.choice([0, 1, 3, 16]))]
        got = tokenizer.replay(prompt, ids, skip_special=skip_special, spaces_between_special=True)
        assert got == by_library(path, prompt, ids, skip_special=skip_special), (prompt, ids)
        emitted += len("".join(got))
    assert emitted > 1000


@pytest.mark.parametrize("path", [SMOLLM2, SENTENCEPIECE], ids=["byte level", "byte fallback"])
def test_what_replay_decodes_grows_with_the_ids_and_not_with_their_square(path):
    tokenizer = load_tokenizer(path)
    broken = next(t for t, piece in (tokenizer.table or {}).items() if piece == b"\x80")
    table = tokenizer.table or {}
    letter = next(t for t, piece in table.items() if piece == b"a" and t not in tokenizer.byte_tokens)
    decoded: list[int] = []
    for count in (2_000, 40_000):
        decoded.clear()
        window = tokenizer._window(True)
        decode = window.decode
        window.decode = lambda ids, decode=decode: decoded.append(len(ids)) or decode(ids)
        pieces = [window.step(token_id) or "" for token_id in [broken] * count + [letter]]
        assert "".join(pieces) == "\ufffd" * count + "a"
        assert sum(decoded) <= 4 * count


def test_a_decoder_that_is_not_known_is_given_up_and_not_waited_for(monkeypatch):
    """Only decoding tells how its text ends, so a long run of held-back ids is not judged."""
    monkeypatch.setattr(module, "_decoder_family", lambda decoder: (None, False, False))
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.table is None
    broken = tokenizer._library.encode("😀", add_special_tokens=False).ids[0]
    rules = TextRules(prompt_len=1, prompt_tail=[28])
    result = compare(tokenizer, [broken] * 6_000, rules, "", Ending())
    assert result.codes == []
    assert result.difference is None
    assert result.undecided
    assert compare(tokenizer, tokenizer.encode("a word"), rules, "a word", Ending()).codes == ["EXACT", "REPLAY_ONLY"]
