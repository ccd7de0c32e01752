"""What a parser does with an output, as a script: which stretch of it goes into which channel. Pure.

A script is made from the whole output; matching it against what a client got is verifier/channels.py.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from verifier.parsers import Reasoning, Tools
from verifier.toolcalls import CallDue, json_calls, marked_calls, named_call, required_calls

Channel = Literal["reasoning", "text"]


@dataclass(frozen=True, slots=True)
class Marker:
    """A token of the tokenizer's added ones in the output."""

    start: int  # code points
    end: int
    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class Output:
    """The text of the sampled ids, as the parser gets it."""

    text: str
    markers: Sequence[Marker] = ()
    added: frozenset[str] = frozenset()  # all added tokens the tokenizer has: these are found as tokens, not as text
    streamed: bool = True
    ends: Sequence[int] = ()  # where each id's text ends: a difference is put where one begins

    def find(self, marker: str, start: int = 0) -> Iterator[tuple[int, int]]:
        """Where a marker stands. In a stream the parser goes by tokens; a whole reply is searched as text."""
        if self.streamed and marker in self.added:
            yield from ((m.start, m.end) for m in self.markers if m.content == marker and m.start >= start)
            return
        at = self.text.find(marker, start)
        while at >= 0:
            yield at, at + len(marker)
            at = self.text.find(marker, at + len(marker))


class Keep(Enum):
    MUST = "must"  # comes
    MAY = "may"  # comes whole or not at all
    CUT = "cut"  # any beginning of it comes


@dataclass(frozen=True, slots=True)
class Atom:
    """A stretch of the output that goes into a channel."""

    channel: Channel
    start: int
    end: int
    keep: Keep = Keep.MUST


@dataclass(frozen=True, slots=True)
class Script:
    atoms: list[Atom] = field(default_factory=list)
    calls: list[CallDue] = field(default_factory=list)
    left_out: int = 0  # code points beside markers that the parser throws away by its own rule
    parsed: bool = False  # something was laid out, as opposed to all text in the content
    content: int | None = 0  # where the content begins, what a tool parser gets; None: there is none
    doubtful: str | None = None  # why a mismatch is no proof of a fault
    one_go: tuple[Channel, int] | None = None  # only if so much of a channel came in one piece, beside the end marker


# ------------------------------------------------------------------------------------------------------ reasoning


def scripts(output: Output, reasoning: Reasoning | None, tools: Tools | None, opened: bool | None) -> Iterator[Script]:
    """What these parsers may make of the output, likeliest first.

    opened: the prompt leaves the reasoning open (True), has closed it (False), or it is not known.
    """
    if reasoning is not None and not (opened is False and output.streamed):
        for head, content, tail in _open_reasoning(output, reasoning):
            yield from _with_tools(output, head, content, tail, tools)
    if reasoning is None or reasoning.can_be_off or (opened is not True and (output.streamed or reasoning.switch)):
        yield from _with_tools(output, Script(), 0, [], tools)


def _open_reasoning(output: Output, rules: Reasoning) -> Iterator[tuple[Script, int | None, list[Atom]]]:
    """(script of the reasoning, where the content begins, the atoms of the content); None: there is no content."""
    if not rules.engine and not output.streamed:
        yield _class_reply(output.text, rules)
        return
    for cut, content in _ends(output, rules):
        if rules.engine:
            yield from _engine_scripts(output, rules, cut, content)
        else:
            yield from _class_scripts(output, rules, cut, content)


def _ends(output: Output, rules: Reasoning) -> Iterator[tuple[int, int | None]]:
    """(where the reasoning ends, where the content begins)."""
    openers = rules.openers
    if rules.spellings and not (output.streamed and openers[0] in output.added):
        openers += rules.spellings
    found = [next(output.find(marker), None) for marker in (rules.end, *openers)]
    hits = sorted((hit, index) for index, hit in enumerate(found) if hit is not None)
    if not hits:
        yield len(output.text), None
        return
    (start, end), index = hits[0]
    yield start, (end if index == 0 else start)
    if not rules.engine and output.streamed:
        # The class finds the end by token and cuts by text, so it may cut at the same letters spelled before it.
        for at in (m.start() for m in re.finditer(re.escape(rules.end), output.text[:start])):
            yield at, at + len(rules.end)


def _class_reply(text: str, rules: Reasoning) -> tuple[Script, int | None, list[Atom]]:
    """DeepSeek R1's class over a whole reply: all up to the first start marker is dropped, wherever that stands."""
    early, marker, _ = text.partition(rules.start) if rules.start else ("", "", "")
    begin = len(early) + len(marker) if marker else 0
    end = text.find(rules.end, begin)
    cut, content = (end, end + len(rules.end)) if end >= 0 else (len(text), None)
    script = Script(
        [Atom("reasoning", begin, cut)] if cut > begin else [],
        left_out=len(early.strip()) if marker else 0,
        parsed=True,
    )
    return script, content, [Atom("text", content, len(text))] if content is not None else []


def _class_scripts(
    output: Output, rules: Reasoning, cut: int, content: int | None
) -> Iterator[tuple[Script, int | None, list[Atom]]]:
    """The same over a stream: a start marker is dropped if it comes alone, else it stays."""
    starts = [hit for hit in output.find(rules.start or "") if hit[1] <= cut] if rules.start else []
    atoms = _split("reasoning", 0, cut, starts, Keep.MAY)
    tail = [Atom("text", content, len(output.text))] if content is not None else []
    yield Script(atoms, parsed=True), content, tail
    if content is None or not atoms:
        return
    # What came in one go with both markers, before the start marker, is dropped; if that stands behind the end
    # marker, all of the reasoning.
    if starts and starts[0][0] > 0:
        left_out = len(output.text[: starts[0][0]].strip())
        dropped = [replace(atoms[0], keep=Keep.CUT), *atoms[1:]]
        yield Script(dropped, left_out=left_out, parsed=True, one_go=("reasoning", cut - starts[0][1])), content, tail
    elif rules.start and not starts and (behind := next(output.find(rules.start, content), None)):
        left_out = len(output.text[:cut].strip())
        dropped = [replace(atom, keep=Keep.CUT) for atom in atoms]
        yield Script(dropped, left_out=left_out, parsed=True, one_go=("text", behind[1] - content)), content, tail


def _engine_scripts(
    output: Output, rules: Reasoning, cut: int, content: int | None
) -> Iterator[tuple[Script, int | None, list[Atom]]]:
    starts = [hit for hit in output.find(rules.start or "") if hit[1] <= cut] if rules.start else []
    atoms = _split("reasoning", 0, cut, starts, None)
    atoms = _strip_end(output.text, _without_specials(output, rules, atoms), rules)
    if content is None:
        yield Script(atoms, parsed=True), None, []
        return
    again = list(output.find(rules.end, content))
    reopened = list(output.find(rules.start, content)) if rules.start and rules.reopens else []
    # In a stream the engine sees only the delta in which the reasoning ends; what follows passes untouched.
    tail = _split("text", content, len(output.text), again, Keep.MAY if output.streamed else None)
    tail = _without_specials(output, rules, tail)
    if rules.strips_newlines and tail:
        tail = _strip_newlines(output.text, tail)
    doubtful = "reasoning begins anew behind its end; how that is taken depends on how ids were grouped"
    yield Script(atoms, parsed=True, doubtful=doubtful if reopened else None), content, tail
    if reopened:
        more = _without_specials(output, rules, _reopened(output, rules, content, again, "reasoning"))
        atoms = _strip_end(output.text, [*atoms, *more], rules)
        rest = _without_specials(output, rules, _reopened(output, rules, content, again, "text"))
        yield Script(atoms, parsed=True, doubtful=doubtful), content, rest


def _without_specials(output: Output, rules: Reasoning, atoms: list[Atom]) -> list[Atom]:
    """Special tokens may stay away: the engine drops those that the tokenizer's configuration names, which we lack."""
    known = {rules.start, rules.end, *rules.openers}
    specials = [(m.start, m.end) for m in output.markers if m.special and m.content not in known]
    split: list[Atom] = []
    for atom in atoms:
        inside = [hit for hit in specials if atom.start <= hit[0] and hit[1] <= atom.end]
        if atom.keep is Keep.MUST and inside:
            split += _split(atom.channel, atom.start, atom.end, inside, Keep.MAY)
        else:
            split.append(atom)
    return split


def _reopened(
    output: Output, rules: Reasoning, content: int, dropped: list[tuple[int, int]], channel: Channel
) -> list[Atom]:
    """The stretches of one channel where start markers begin reasoning anew."""
    assert rules.start is not None
    turns = sorted(
        [(hit, "reasoning") for hit in output.find(rules.start, content)]
        + [(hit, "text") for hit in output.find(rules.end, content)]
        + [((start, start), "text") for opener in rules.openers for start, _ in output.find(opener, content)]
    )
    atoms: list[Atom] = []
    here, at = "text", content
    for (start, end), then in [*turns, ((len(output.text), len(output.text)), "text")]:
        if here == channel:
            inside = [hit for hit in dropped if at <= hit[0] and hit[1] <= start]
            atoms += _split(channel, at, start, inside, Keep.MAY if output.streamed else None)
        here, at = then, end
    return atoms


def _split(channel: Channel, start: int, end: int, holes: Iterable[tuple[int, int]], keep: Keep | None) -> list[Atom]:
    """The stretch start..end less the holes, which become atoms of their own kind, or nothing (None)."""
    atoms: list[Atom] = []
    for hole_start, hole_end in sorted(holes):
        if hole_start > start:
            atoms.append(Atom(channel, start, hole_start))
        if keep is not None and hole_end > hole_start:
            atoms.append(Atom(channel, hole_start, hole_end, keep))
        start = hole_end
    if end > start:
        atoms.append(Atom(channel, start, end))
    return atoms


def _strip_end(text: str, atoms: list[Atom], rules: Reasoning) -> list[Atom]:
    """Whitespace at the end may stay away. Letters that may begin a marker come late, without whitespace before."""
    if not rules.strips:
        return atoms
    stripped: list[Atom] = []
    atoms = list(atoms)
    if atoms and atoms[-1].keep is Keep.MUST:
        last = atoms.pop()
        held = _begun_marker(text[last.start : last.end], [rules.start, rules.end, *rules.openers])
        if held:
            stripped.append(replace(last, start=last.end - held))
        if held < last.end - last.start:
            atoms.append(replace(last, end=last.end - held))
    while atoms:
        last = atoms.pop()
        if last.keep is not Keep.MUST:
            stripped.insert(0, last)
            continue
        size = len(text[last.start : last.end].rstrip())
        if last.start + size < last.end:
            stripped.insert(0, Atom(last.channel, last.start + size, last.end, Keep.CUT))
        if size:
            stripped.insert(0, replace(last, end=last.start + size))
            break
    return [*atoms, *stripped]


def _begun_marker(text: str, markers: Sequence[str | None]) -> int:
    """Length of the longest end of `text` that begins a marker."""
    return max((overlap(text, marker) for marker in markers if marker), default=0)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a true beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _strip_newlines(text: str, atoms: list[Atom]) -> list[Atom]:
    first, *rest = atoms
    newlines = len(text[first.start : first.end]) - len(text[first.start : first.end].lstrip("\n"))
    if not newlines:
        return atoms
    split = [Atom("text", first.start + n, first.start + n + 1, Keep.MAY) for n in range(newlines)]
    return [
        *split,
        *([replace(first, start=first.start + newlines)] if first.start + newlines < first.end else []),
        *rest,
    ]


# ---------------------------------------------------------------------------------------------------------- tools


def _with_tools(
    output: Output, head: Script, content: int | None, tail: list[Atom], tools: Tools | None
) -> Iterator[Script]:
    head = replace(head, content=content)
    if content is None:
        yield head
        return
    if content == 0 and not tail and output.text:
        tail = [Atom("text", 0, len(output.text))]
    if tools is None:
        yield replace(head, atoms=[*head.atoms, *tail])
        return
    if head.one_go and head.one_go[0] == "text":
        head = replace(head, one_go=None)  # the tool parser cuts the content up once more
    text = output.text
    if tools.form == "named":
        yield replace(head, calls=named_call(text, content, output.streamed), parsed=True)
        return
    if tools.form == "required":
        calls = required_calls(text, content, output.streamed)
        if calls:
            yield replace(head, calls=calls, parsed=True)
        return
    first = text.find(tools.start, content)
    if first < 0:
        held = overlap(text[content:], tools.start) if output.streamed else 0
        shown = _before(tail, len(text) - held)
        if output.streamed:
            shown = _held_before_markers(text, shown, tools.start)
        yield replace(head, atoms=[*head.atoms, *shown], left_out=head.left_out + held)
        return
    find_calls = json_calls if tools.form == "json" else marked_calls
    found = find_calls(text, first, tools, output.streamed)
    if found is None:  # not JSON: a whole reply is then handed on as it is
        yield replace(head, atoms=[*head.atoms, *tail])
        return
    before = _before(tail, first)
    solid = "".join(text[atom.start : atom.end] for atom in before if atom.keep is Keep.MUST)
    if not output.streamed and not solid.strip():
        before = [replace(atom, keep=Keep.CUT) for atom in before]
    inside = any(atom.keep is Keep.MAY and atom.start >= first for atom in tail)
    yield replace(
        head,
        doubtful="a marker that the reasoning parser may drop stands inside a call" if inside else head.doubtful,
        atoms=[*head.atoms, *before],
        calls=found.calls,
        left_out=head.left_out + found.left_out,
        parsed=True,
    )


def _held_before_markers(text: str, atoms: list[Atom], marker: str) -> list[Atom]:
    """A begun marker is held back also where only dropped markers stand behind it."""
    solid = [n for n, atom in enumerate(atoms) if atom.keep is Keep.MUST]
    if not solid or solid[-1] == len(atoms) - 1:
        return atoms
    last = atoms[solid[-1]]
    held = overlap(text[last.start : last.end], marker)
    if not held:
        return atoms
    cut = Atom(last.channel, last.end - held, last.end, Keep.CUT)
    kept = [replace(last, end=last.end - held)] if held < last.end - last.start else []
    return [*atoms[: solid[-1]], *kept, cut, *atoms[solid[-1] + 1 :]]


def _before(atoms: list[Atom], end: int) -> list[Atom]:
    return [replace(atom, end=min(atom.end, end)) for atom in atoms if atom.start < end]
