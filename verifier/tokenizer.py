"""From token ids to bytes by the tokenizer's own file; by vLLM's detokenizer where bytes are not enough.

The table comes from tokenizer.json, not from the server under test. `replay` uses the library that vLLM uses, so it is
the arbiter only where bytes are no valid UTF-8, or where no table can be made.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from huggingface_hub import try_to_load_from_cache

from sparseety.errors import SparseetyError
from verifier.detokenizer import ByteFallbackEnding, ByteLevelEnding, Ending, UnknownEnding, Window

_SPACES = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class NoTokenizer(SparseetyError):
    """The tokenizer that the engine served with was not found."""


class OtherTokenizer(NoTokenizer):
    """Only others than that one were."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One tokenizer.json, read.

    table: id -> bytes, or None where the tokenizer's decoder is of neither known family (then only `replay` works).
    byte_fallback: SentencePiece style: broken bytes decode one U+FFFD each.
    byte_tokens: of these tokenizers, the ids that stand for one byte.
    strips: one leading space is dropped at a text's start.
    bos_token: what the tokenizer's configuration says begins a prompt; None: it does not say.
    """

    path: Path
    sha256: str
    table: dict[int, bytes] | None
    special: frozenset[int]
    added: dict[int, str]
    byte_fallback: bool
    byte_tokens: frozenset[int]
    strips: bool
    bos_token: str | None
    _library: tokenizers.Tokenizer = field(repr=False)
    _spellings: list[tuple[frozenset[bytes], frozenset[bytes]]] = field(default_factory=list, repr=False)

    def knows(self, token_id: int) -> bool:
        return self._library.id_to_token(token_id) is not None

    def replay(
        self, prompt: Sequence[int], ids: Iterable[int], *, skip_special: bool, spaces_between_special: bool
    ) -> list[str]:
        """The text that vLLM's FastIncrementalDetokenizer emits for each id; never flushed, as there.

        Source: vllm/v1/engine/detokenizer.py of vLLM 0.32, FastIncrementalDetokenizer.decode_next. Raises TooManyHeld.
        """
        window = self._window(skip_special)
        for token_id in prompt:
            window.add(token_id)
        keep_spaces = skip_special or spaces_between_special
        pieces, after_added = [], False
        for token_id in ids:
            try:
                piece = window.step(token_id)
            except ValueError:
                window = self._window(skip_special)
                piece = window.step(token_id)
            if not keep_spaces:
                added = self.added.get(token_id)
                if added is not None and after_added:
                    piece = added
                after_added = added is not None
            pieces.append(piece or "")
        return pieces

    def _window(self, skip_special: bool) -> Window:
        skipped: frozenset[int] = self.special if skip_special else frozenset()
        ending: Ending
        if self.table is None:
            ending = UnknownEnding()
        elif self.byte_fallback:
            ending = ByteFallbackEnding(self.table, skipped, self.byte_tokens)
        else:
            ending = ByteLevelEnding(self.table, skipped)
        return Window(partial(self._library.decode, skip_special_tokens=skip_special), ending)

    def text(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The library's own decoding: for prompts and messages, never for a verdict on output."""
        return self._library.decode(list(ids), skip_special_tokens=skip_special)

    def spellings(self) -> tuple[frozenset[bytes], frozenset[bytes]] | None:
        """(the texts of all ids, every beginning of one); None where there is no table. Made when first asked for."""
        if self.table is None:
            return None
        if not self._spellings:
            texts = frozenset(filter(None, self.table.values()))
            beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text) + 1))
            self._spellings.append((texts, beginnings))
        return self._spellings[0]

    def bos(self) -> int | None:
        """The id that begins every prompt, where this tokenizer has one: what it puts there itself, or is set to."""
        begun = self._library.encode("").ids[:1]
        if begun and begun[0] in self.special:
            return begun[0]
        return self._library.token_to_id(self.bos_token) if self.bos_token else None

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text, without specials added."""
        return self._library.encode(text, add_special_tokens=False).ids


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or the one in a folder. Raises SparseetyError."""
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.exists() and not file.is_file():
            raise SparseetyError(f"{file} is no file; give a tokenizer.json or the folder that holds one")
        data = file.read_bytes()
        library = tokenizers.Tokenizer.from_buffer(data)
        decoder = json.loads(data).get("decoder")
    except OSError as error:
        raise SparseetyError(f"{path}: {error.strerror}; give a tokenizer.json or the folder that holds one") from None
    except SparseetyError:
        raise
    except Exception as error:  # noqa: BLE001 -- the library raises plain Exception for a file it cannot read
        raise SparseetyError(f"{file} is not a tokenizer.json that this release reads: {error}") from None
    added = library.get_added_tokens_decoder()
    to_bytes, byte_fallback, strips = _decoder_family(decoder)
    vocabulary = library.get_vocab(with_added_tokens=True)
    return Tokenizer(
        path=file,
        sha256=hashlib.sha256(data).hexdigest(),
        table={token_id: to_bytes(token) for token, token_id in vocabulary.items()} if to_bytes else None,
        special=frozenset(token_id for token_id, token in added.items() if token.special),
        added={token_id: token.content for token_id, token in added.items()},
        byte_fallback=byte_fallback,
        byte_tokens=frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)),
        strips=strips,
        bos_token=_bos_token(file.parent / "tokenizer_config.json"),
        _library=library,
    )


def _bos_token(config: Path) -> str | None:
    try:
        token = json.loads(config.read_bytes()).get("bos_token")
    except (OSError, ValueError, AttributeError):
        return None  # it stands beside a tokenizer.json, as a rule
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _decoder_family(decoder: Any) -> tuple[Callable[[str], bytes] | None, bool, bool]:
    """(token -> bytes or None, byte fallback?, strips a leading space?) for the `decoder` part of a tokenizer.json."""
    if not isinstance(decoder, dict):
        return None, False, False
    if decoder.get("type") == "ByteLevel":
        return _byte_level, False, False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        kinds = [step.get("type") for step in steps]
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        known_end = kinds[3:] == [] or steps[3:] == [strip]
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _SPACES and known_end:
            return _sentencepiece, True, len(steps) == 4
    return None, False, False


def _byte_characters() -> dict[str, int]:
    """GPT-2's reversible map: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _byte_level(token: str) -> bytes:
    # As the library does: a token with any character outside the map (an added token) stands for its own text.
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


THREE_WAYS = (
    "give it in one of three ways: --tokenizer PATH (a tokenizer.json or the folder that holds it), "
    "SPARSEETY_VERIFY_TOKENIZER=PATH, or run where the engine's own path or hub cache is"
)


@dataclass(slots=True)
class TokenizerShelf:
    """Finds the tokenizer an engine served with, by the hash the engine logged; loads each file once."""

    given: list[Path]
    by_model: dict[str, Path] = field(default_factory=dict)  # a model's name, as served or as loaded -> its tokenizer
    _loaded: dict[Path, Tokenizer] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type, tuple[list[Path], dict[str, Path]]]:
        return TokenizerShelf, (self.given, self.by_model)  # another process loads its own

    def find(self, name: str, sha256: str | None, models: Iterable[str] = ()) -> Tokenizer:
        """The tokenizer of an engine that logged this name and hash, and serves these models. Raises SparseetyError.

        No hash was logged: the one given for such a model is taken, else the first one given, else what the engine's
        name leads to on this machine.
        """
        others = []
        mapped = [self.by_model[model] for model in (name, *models) if model in self.by_model]
        for path in dict.fromkeys([*mapped, *self.given, *_local(name)]):
            tokenizer = self._load(path)
            if sha256 is None or tokenizer.sha256 == sha256:
                return tokenizer
            others.append(f"{tokenizer.path} is {tokenizer.sha256[:12]}")
        if not others:
            raise NoTokenizer(f'no tokenizer for the model served with "{name}": {THREE_WAYS}')
        raise OtherTokenizer(
            f'the engine served "{name}" with a tokenizer.json of sha256 {sha256[:12] if sha256 else ""}'
            f"; {', '.join(others)}; {THREE_WAYS}"
        )

    def of_model(self, model: str | None) -> Tokenizer | None:
        """The tokenizer that the operator gave for a model, by the name that clients use; None: there is none."""
        if model in self.by_model:
            return self._load(self.by_model[model])
        return self._load(self.given[0]) if len(self.given) == 1 and not self.by_model else None

    def _load(self, path: Path) -> Tokenizer:
        if path not in self._loaded:
            self._loaded[path] = load_tokenizer(path)
        return self._loaded[path]


def _local(name: str) -> Iterator[Path]:
    """Where the engine's name for its tokenizer leads to on this machine: a folder, or the hub's cache."""
    if not name:
        return
    try:
        if (Path(name) / "tokenizer.json").is_file():
            yield Path(name) / "tokenizer.json"
        elif Path(name).is_file():
            yield Path(name)
        elif isinstance(cached := try_to_load_from_cache(name, "tokenizer.json"), str):
            yield Path(cached)
    except (OSError, ValueError):  # no name of a file, and none of a repository
        return
