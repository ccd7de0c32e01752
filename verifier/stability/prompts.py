"""The prompts of a run: JSON Lines, one prompt a line, as chat messages or as text.

{"messages": [{"role": "user", "content": "..."}], "kind": "code"}
{"prompt": "...", "kind": "short"}
{"context": "harbour", "text": "..."}          a text that other lines take as the beginning of theirs:
{"context": "harbour", "messages": [...]}      it stands before the first message of the user, or the prompt
"""

import hashlib
from importlib import resources
from pathlib import Path

import msgspec

from sparseety.errors import SparseetyError

DEFAULT = "prompts.jsonl"  # ships with the package


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one request asks. Either `messages` or `prompt`."""

    messages: list[Message] | None = None
    prompt: str | None = None
    kind: str = ""  # a word for reports: short, long, code


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message] | None = None
    prompt: str | None = None
    kind: str = ""
    context: str | None = None
    text: str | None = None


def load(path: Path | None) -> list[Prompt]:
    """Of a file; None: those that ship. Raises SparseetyError, with the line."""
    if path is None:
        return parse(resources.files(__package__).joinpath(DEFAULT).read_bytes(), DEFAULT)
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise SparseetyError(f"{path}: {error.strerror}") from None


def parse(data: bytes, name: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    lines: dict[bytes, int] = {}
    contexts: dict[str, str] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                if prompt := _prompt(msgspec.json.decode(line, type=_Line), contexts):
                    first = lines.setdefault(_said(prompt), number)
                    if first != number:  # it would count as evidence of its own, which it is not
                        raise ValueError(f"the same prompt as in line {first}; repeats are asked for with -n")
                    prompts.append(prompt)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise SparseetyError(f"{name}:{number}: {error}") from None
    if not prompts:
        raise SparseetyError(f"{name}: no prompts in it")
    return prompts


def _said(prompt: Prompt) -> bytes:
    return msgspec.json.encode((prompt.messages, prompt.prompt))


def _prompt(line: _Line, contexts: dict[str, str]) -> Prompt | None:
    """None: it gives a context."""
    if line.text is not None:
        if line.context is None or line.messages or line.prompt:
            raise ValueError('"text" needs a "context" that names it, and nothing else')
        contexts[line.context] = line.text
        return None
    if (line.messages is None) == (line.prompt is None):
        raise ValueError('it needs either "messages" or "prompt"')
    if line.messages == [] or line.prompt == "":
        raise ValueError("an empty prompt")
    before = ""
    if line.context is not None:
        if line.context not in contexts:
            raise ValueError(f'no line before it gives the text of the context "{line.context}"')
        before = contexts[line.context] + "\n\n"
    return _with(before, line)


def _with(before: str, line: _Line) -> Prompt:
    if line.messages is None:
        return Prompt(prompt=before + (line.prompt or ""), kind=line.kind)
    messages = list(line.messages)
    if before:
        place = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        if place is None:
            raise ValueError("a context needs a message of the user to stand before")
        messages[place] = Message("user", before + messages[place].content)
    return Prompt(messages=messages, kind=line.kind)


def some(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """So many, evenly spread, so that each kind is among them; None: all."""
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]


def sha256(prompts: list[Prompt]) -> str:
    """Of what they say, however the file was written."""
    return hashlib.sha256(msgspec.json.encode(prompts)).hexdigest()
