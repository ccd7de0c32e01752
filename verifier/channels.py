"""What a client got in its channels against what parsers make of the sampled text. Pure.

A full account is a proof, whatever the parser's name. Without one it is a fault only where the parser is known.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sparseety.records import ToolCall
from verifier.classify import Difference, classify, common_prefix
from verifier.expect import Expected
from verifier.parsers import CALL_SIGN, FORCED, REASONING, TOOLS, UNKNOWN_TOOLS, Reasoning, Tools
from verifier.script import Atom, Channel, Keep, Marker, Output, Script, scripts
from verifier.tokenizer import Tokenizer

_MOST_STATES = 4096  # of a match; more ways than that to read an output are not tried


@dataclass(frozen=True, slots=True)
class Sent:
    """One choice as the client got it."""

    pieces: Sequence[tuple[str, str]]  # (text, reasoning or tool_call; what it added), in wire order
    calls: Sequence[ToolCall] = ()
    reasoning_asked: bool = True  # False: include_reasoning=false, the server leaves the reasoning out

    def text(self, channel: Channel) -> str:
        return "".join(text for kind, text in self.pieces if kind == channel)


@dataclass(frozen=True, slots=True)
class Parsers:
    """What is known of the server's parsers. A name of None: not known; of "": none is on."""

    reasoning: str | None = None
    tools: str | None = None
    opened: bool | None = None  # the prompt leaves the reasoning open, or has closed it; None: not known
    offered: bool = False  # the request offers tools

    @property
    def known(self) -> bool:
        return self.reasoning is not None and (self.reasoning == "" or self.reasoning in REASONING)

    def reasoning_rules(self) -> list[Reasoning | None]:
        if self.known and self.reasoning is not None:
            return [REASONING.get(self.reasoning)]
        return [*dict.fromkeys(REASONING.values()), None]

    def tool_rules(self) -> list[Tools | None]:
        if self.tools == "":
            return [None]
        if self.tools in TOOLS:
            return [TOOLS[self.tools], *FORCED, None] if self.offered else [None]
        return [None, *UNKNOWN_TOOLS] if self.offered else [None]


@dataclass(frozen=True, slots=True)
class Account:
    """`codes` where everything is accounted for; else a difference, or why that cannot be told."""

    codes: list[str]
    reached: int = 0  # code points of the output whose delivery was proven
    left_out: int = 0  # code points that the parser threw away by its own rule
    difference: Difference | None = None  # its offset is in the output
    piece: int = 0  # index of the delivered piece where it shows
    undecided: str | None = None


def explain(output: Output, sent: Sent, parsers: Parsers, *, whole: bool = True, prompt_tail: str = "") -> Account:
    """Account for what was sent. whole=False: the stream was broken off, any beginning is right."""
    tried: list[Script] = []
    for script in _scripts(output, parsers):
        tried.append(script)
        if account := _account(output, sent, script, whole):
            return account
    if not parsers.known:
        return Account(
            [], undecided="it is not known which reasoning parser is on, or that parser's work is not checked"
        )
    best = max(tried, key=lambda script: _agreement(output, sent, script))
    return _fault(output, sent, parsers, best, whole, prompt_tail)


def _scripts(output: Output, parsers: Parsers) -> Iterator[Script]:
    for tools in parsers.tool_rules():
        for reasoning in parsers.reasoning_rules():
            yield from scripts(output, reasoning, tools, parsers.opened)


def output_of(tokenizer: Tokenizer, ids: Sequence[int], expected: Expected, text: str, *, streamed: bool) -> Output:
    """What the parser got: `text` is a beginning of `expected.text`, which is that of the ids."""
    markers, start = [], 0
    for token_id, end in zip(ids, expected.ends(), strict=False):
        content = tokenizer.added.get(token_id)
        if content is not None and end <= len(text):
            markers.append(Marker(start, end, content, token_id in tokenizer.special))
        start = end
    return Output(text, markers, frozenset(tokenizer.added.values()), streamed, expected.ends())


# ---------------------------------------------------------------------------------------------------- the account


@dataclass(frozen=True, slots=True)
class _Fit:
    """How far a channel's text goes in the output."""

    reached: int  # behind the last code point delivered
    resume: int  # the first code point not delivered that has to be


def _account(output: Output, sent: Sent, script: Script, whole: bool) -> Account | None:
    hidden = not sent.reasoning_asked and not sent.text("reasoning")
    if script.one_go and not hidden and not _came_in_one_go(sent, *script.one_go):
        return None
    fits = []
    for channel in ("reasoning", "text"):
        atoms = [atom for atom in script.atoms if atom.channel == channel]
        if channel == "reasoning" and hidden:
            continue
        fit = _fit(output.text, atoms, sent.text(channel), whole)
        if fit is None:
            return None
        fits.append(fit)
    calls = _fit_calls(output.text, script, sent.calls, whole)
    if calls is None:
        return None
    call_fit, semantic = calls
    fits.append(call_fit)
    # In a stream that broke off, what came of one channel means that all before it has come in the others.
    if any(one.reached > other.resume for one in fits for other in fits if one is not other):
        return None
    codes = ["PARSED_SEMANTIC"] if semantic else ["PARSED"] if script.parsed else []
    if hidden and any(atom.channel == "reasoning" for atom in script.atoms):
        codes.append("HIDDEN")
    reached = len(output.text) if whole else max(fit.reached for fit in fits)
    return Account(codes or ["PLAIN"], reached, script.left_out)


def _came_in_one_go(sent: Sent, channel: Channel, size: int) -> bool:
    """Has the piece beside the reasoning's end this size at least? Nothing of the channel came: not known."""
    pieces = [text for kind, text in sent.pieces if kind == channel and text]
    return not pieces or len(pieces[-1 if channel == "reasoning" else 0]) >= size


def _fit(text: str, atoms: Sequence[Atom], sent: str, whole: bool) -> _Fit | None:
    """Lay `sent` along the atoms, in every way that is left; None: it does not fit."""
    ways: dict[int, int] = {0: 0}  # code points of `sent` used -> where in the output the last of them stood
    begun: _Fit | None = None  # broken off: the way that goes furthest
    for atom in atoms:
        piece, then = text[atom.start : atom.end], dict[int, int]()
        for used, at in ways.items():
            left = len(sent) - used
            if atom.keep is not Keep.MUST:
                then.setdefault(used, at)
            must = atom.keep is Keep.MUST or left  # of what may stay away, nothing has come yet: that says nothing
            if not whole and must and left < len(piece) and piece.startswith(sent[used:]):
                begun = _Fit(atom.start + left if left else at, atom.start + left)
            if sent.startswith(piece, used):
                then[used + len(piece)] = atom.end if piece else at
            if atom.keep is Keep.CUT:
                for size in range(1, common_prefix(piece, sent[used : used + len(piece)]) + 1):
                    then.setdefault(used + size, atom.start + size)
        if len(then) > _MOST_STATES:
            return None
        ways = then
    return _Fit(ways[len(sent)], len(text)) if len(sent) in ways else begun


def _fit_calls(text: str, script: Script, calls: Sequence[ToolCall], whole: bool) -> tuple[_Fit, bool] | None:
    """(how far the calls go, did one match only in meaning); None: they are not these calls."""
    due = script.calls
    if len(calls) > len(due) or (whole and len(calls) < len(due)):
        return None
    semantic, reached = False, 0
    for number, (call, expected) in enumerate(zip(calls, due, strict=False)):
        last = number == len(calls) - 1
        match = expected.matches(text, call, whole or not last)
        if match is None:
            return None
        semantic = semantic or match == "semantic"
        reached = expected.start + len(call.arguments) if match == "exact" else expected.end
    if len(calls) < len(due):
        return _Fit(reached, due[len(calls)].begin), semantic
    if not whole and calls and reached < due[-1].end:
        return _Fit(reached, reached), semantic
    return _Fit(reached, len(text)), semantic


# ------------------------------------------------------------------------------------------------------- the fault


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A piece of the due text, wherever it goes."""

    kind: str
    start: int
    end: int
    keep: Keep = Keep.MUST


def _stretches(script: Script, kinds: frozenset[str]) -> list[_Stretch]:
    found = [_Stretch(atom.channel, atom.start, atom.end, atom.keep) for atom in script.atoms]
    found += [_Stretch("tool_call", call.start, call.end) for call in script.calls]
    return sorted((one for one in found if one.kind in kinds), key=lambda one: one.start)


def _laid(text: str, stretches: Iterable[_Stretch], came: str) -> list[_Stretch]:
    """The stretches that are due, taking what may come as come where `came` has it."""
    due: list[_Stretch] = []
    used = 0
    for stretch in stretches:
        piece = text[stretch.start : stretch.end]
        if stretch.keep is Keep.MAY and not came.startswith(piece, used):
            continue
        if stretch.keep is Keep.CUT:
            stretch = replace(stretch, end=stretch.start + common_prefix(piece, came[used : used + len(piece)]))
        used += stretch.end - stretch.start
        due.append(stretch)
    return due


def _joined(text: str, stretches: Iterable[_Stretch]) -> str:
    return "".join(text[one.start : one.end] for one in stretches)


def _agreement(output: Output, sent: Sent, script: Script) -> int:
    """How many code points come as this script has them, from the start of each channel on."""
    total = 0
    for channel in ("reasoning", "text"):
        came = sent.text(channel)
        due = _laid(output.text, _stretches(script, frozenset({channel})), came)
        total += common_prefix(_joined(output.text, due), came)
    for call, expected in zip(sent.calls, script.calls, strict=False):
        total += common_prefix(output.text[expected.start : expected.end], call.arguments)
    return total


def _fault(output: Output, sent: Sent, parsers: Parsers, script: Script, whole: bool, prompt_tail: str) -> Account:
    if script.doubtful:
        return Account([], undecided=script.doubtful)
    if parsers.offered and not sent.calls and not sent.text("text"):
        content = output.text[script.content or 0 :].lstrip()
        if content.startswith("["):
            return Account([], undecided='tool_choice "required", if it was asked, drops a list that is cut off early')
    kinds = frozenset({"text", "tool_call"} if not sent.reasoning_asked else {"reasoning", "text", "tool_call"})
    if any(call.anew for call in script.calls):
        kinds -= {"tool_call"}  # written anew: only their meaning compares
    if len(sent.calls) == 1 < len(script.calls) and script.calls[0].matches(output.text, sent.calls[0], whole=True):
        return Account(
            [], undecided="only the first call came, as parallel_tool_calls: false has it; that is not logged"
        )
    account = _difference(output, sent, script, kinds, whole, prompt_tail)
    if account is None:
        account = _call_difference(output, sent, script)
    assert account.difference is not None
    in_reasoning = script.content is None or account.difference.offset < script.content
    if not in_reasoning and parsers.tools != "" and parsers.tools not in TOOLS:
        if parsers.offered:
            return Account([], undecided="the request offers tools, and which tool-call parser is on is not known")
        if CALL_SIGN.search(output.text, script.content or 0):
            return Account([], undecided="a tool-call parser that is not known may have taken text for a call")
    return account


def _difference(
    output: Output, sent: Sent, script: Script, kinds: frozenset[str], whole: bool, prompt_tail: str
) -> Account | None:
    """The difference of all that came, end to end, from all that is due; the channels apart where those are equal."""
    pieces = [(index, kind, text) for index, (kind, text) in enumerate(sent.pieces) if kind in kinds and text]
    came = "".join(text for _, _, text in pieces)
    stretches = _laid(output.text, _stretches(script, kinds), came)
    due = _joined(output.text, stretches)
    due_ends = list(accumulate(one.end - one.start for one in stretches))
    came_ends = list(accumulate(len(text) for _, _, text in pieces))
    if not whole and due.startswith(came):
        due = due[: len(came)]
    if due != came:
        difference = classify(due, came, prompt_tail, _borders(output, stretches, due_ends), came_ends)
        piece = _index_at(came_ends, difference.offset)
        at = _in_output(stretches, due_ends, difference.offset, len(output.text))
        return Account([], difference=replace(difference, offset=at), piece=pieces[piece][0] if pieces else 0)
    offset = 0
    for index, kind, text in pieces:
        stretch = stretches[_index_at(due_ends, offset)]
        if kind != stretch.kind:
            at = stretch.start + offset - (due_ends[_index_at(due_ends, offset)] - (stretch.end - stretch.start))
            return Account([], difference=Difference("MISROUTED", at, text, text), piece=index)
        inner = due_ends[_index_at(due_ends, offset)] - offset
        if len(text) > inner and (rest := stretches[_index_at(due_ends, offset + inner)]).kind != kind:
            return Account([], difference=Difference("MISROUTED", rest.start, text[inner:], text[inner:]), piece=index)
        offset += len(text)
    return None


def _borders(output: Output, stretches: Sequence[_Stretch], due_ends: Sequence[int]) -> list[int]:
    """Where ids end in the due text."""
    borders: list[int] = []
    for stretch, end in zip(stretches, due_ends, strict=True):
        first, last = bisect_right(output.ends, stretch.start), bisect_left(output.ends, stretch.end)
        borders += [end - (stretch.end - at) for at in output.ends[first:last]]
        borders.append(end)
    return borders


def _call_difference(output: Output, sent: Sent, script: Script) -> Account:
    """All text is right; a call is not, by its name, its number or the meaning of its arguments."""
    whole_calls = list(zip(sent.calls, script.calls, strict=False))
    for call, due in whole_calls:
        if due.matches(output.text, call, whole=True) is None:
            wanted = f"{due.name or ''}({output.text[due.start : due.end]})"
            difference = Difference("ALTERED_TEXT", due.begin, wanted, f"{call.name or ''}({call.arguments})")
            return Account([], difference=difference, piece=_call_piece(sent))
    if len(sent.calls) < len(script.calls):
        due = script.calls[len(sent.calls)]
        return Account(
            [],
            difference=Difference("MISSING_TEXT", due.begin, output.text[due.begin : due.end], ""),
            piece=_call_piece(sent),
        )
    extra = sent.calls[len(script.calls)].arguments if len(sent.calls) > len(script.calls) else ""
    return Account([], difference=Difference("EXTRA_TEXT", len(output.text), "", extra), piece=_call_piece(sent))


def _call_piece(sent: Sent) -> int:
    return next((index for index, (kind, _) in enumerate(sent.pieces) if kind == "tool_call"), 0)


def _index_at(ends: Sequence[int], offset: int) -> int:
    return min(bisect_right(ends, offset), max(0, len(ends) - 1))


def _in_output(stretches: Sequence[_Stretch], due_ends: Sequence[int], offset: int, size: int) -> int:
    """The place in the output of a place in the due text."""
    if not stretches:
        return size
    index = _index_at(due_ends, offset)
    stretch = stretches[index]
    return stretch.end - (due_ends[index] - offset)


def prompt_opens(text: str, reasoning: str | None) -> bool | None:
    """Does the prompt's end leave the reasoning open? None: its known end says nothing of it."""
    rules = REASONING.get(reasoning or "")
    if rules is None:
        return None
    opened = text.rfind(rules.start) if rules.start else -1
    closed = text.rfind(rules.end)
    return None if opened == closed else opened > closed
