"""Faults to order: what may go wrong between a sampler and a client, done to one request on purpose. No I/O."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from deploy.demo.dialect import Spell
from deploy.demo.replay import Tick

Kind = Literal["drop", "duplicate", "swap", "alter", "lose-id", "alter-id", "cut", "die", "extra-usage"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class NotPossible(ValueError):
    """This request offers nothing that the fault could be done to. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    at: int | None = None  # from 1: which text chunk before the finish, or which id; None: the one in the middle


def parse_fault(text: str) -> Fault:
    """Read KIND[@N]. Raises ValueError."""
    match = re.fullmatch(r"([a-z-]+)(?:@([1-9]\d{0,8}))?", text)
    for kind in KINDS:
        if match and match[1] == kind:
            return Fault(kind, int(match[2]) if match[2] else None)
    raise ValueError(f'"{text}" is no fault; KIND or KIND@N, where KIND is one of {", ".join(KINDS)}')


@dataclass(slots=True)
class Plan:
    """How one request will go, step by step."""

    ticks: list[Tick]
    ending: Literal["done", "cut", "die"] = "done"
    last_tick: int | None = None  # where it is cut or dies: the last one of which the client gets anything
    usage_error: int = 0


Place = tuple[int, int]  # tick, and piece in it


def apply(fault: Fault, ticks: list[Tick], *, spell: Spell, stream: bool, usage: bool) -> Plan:
    """Do `fault` to the steps of a request (in place). Raises NotPossible, with nothing changed."""
    plan = Plan(ticks)
    if fault.kind == "extra-usage":
        if not usage:
            raise NotPossible("extra-usage needs a reply with usage in it (stream_options.include_usage)")
        plan.usage_error = 1
        return plan
    # A chunk that also says how the choice ended is left alone: each fault is to show as itself.
    places = [
        (t, p)
        for t, tick in enumerate(ticks)
        for p, piece in enumerate(tick.pieces)
        if piece.text and not piece.finish_reason
    ]
    number = (len(places) + 1) // 2 if fault.at is None else fault.at
    if not 1 <= number <= len(places):
        raise NotPossible(f"{fault.kind}: there are {len(places)} chunks with text before the finish")
    if fault.kind in ("cut", "die"):
        if not stream and fault.kind == "cut":
            raise NotPossible("cut needs a streamed reply")
        _end_after(plan, places[number - 1], fault.kind)
    else:
        _CHANGES[fault.kind](ticks, places, number - 1, spell)
    return plan


def _end_after(plan: Plan, place: Place, ending: Literal["cut", "die"]) -> None:
    tick, piece = place
    plan.ending, plan.last_tick = ending, tick
    del plan.ticks[tick].pieces[piece + 1 :]


def _drop(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    tick, piece = places[index]
    del ticks[tick].pieces[piece]


def _duplicate(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    tick, piece = places[index]
    pieces = ticks[tick].pieces
    pieces.insert(piece, pieces[piece])


def _swap(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    """Swap a chunk with its choice's next one; where the order of the two makes no difference, take a later pair."""
    for here in [*range(index, len(places)), *range(index)]:
        tick, piece = places[here]
        one = ticks[tick].pieces[piece]
        for other_tick, other_piece in places[here + 1 :]:
            two = ticks[other_tick].pieces[other_piece]
            if two.choice == one.choice:
                if one.text + two.text != two.text + one.text:
                    ticks[tick].pieces[piece], ticks[other_tick].pieces[other_piece] = two, one
                    return
                break
    raise NotPossible("swap: no two neighbouring chunks whose order makes a difference")


def _alter(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    tick, piece = places[index]
    old = ticks[tick].pieces[piece]
    ticks[tick].pieces[piece] = replace(old, text=old.text[:-1] + ("#" if old.text[-1] != "#" else "@"))


def _lose_id(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    """The engine's log lacks the id; the client gets its text all the same, so the log's own count is one short."""
    tick, piece = places[index]
    ticks[tick].rows[ticks[tick].pieces[piece].choice] = []


def _alter_id(ticks: list[Tick], places: list[Place], index: int, spell: Spell) -> None:
    """The engine's log has another id, with another text of whole characters."""
    tick, piece = places[index]
    choice = ticks[tick].pieces[piece].choice
    *before, old = ticks[tick].rows[choice]
    vocabulary = range(_FIRST_PLAIN_ID, _FIRST_PLAIN_ID + 1000)
    new = next(i for i in vocabulary if i != old and spell(i) != spell(old) and "\ufffd" not in spell(i))
    ticks[tick].rows[choice] = [*before, new]


_FIRST_PLAIN_ID = 300  # past special tokens and single bytes, in every byte-level vocabulary that is small enough

_CHANGES: dict[str, Callable[[list[Tick], list[Place], int, Spell], None]] = {
    "drop": _drop,
    "duplicate": _duplicate,
    "swap": _swap,
    "alter": _alter,
    "lose-id": _lose_id,
    "alter-id": _alter_id,
}
