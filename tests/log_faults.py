"""Puts one fault into each stream of a copy of real logs, and keeps the copy consistent: the log itself is whole.

What a log says of itself (numbers of events and chunks, lengths, its last line's count) is made to agree with the
changed stream, so that only the text, the ids, the counts or the ending can give the fault away.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparseety.logreader import find_logs

Record = dict[str, Any]
TEXT_KINDS = ("text", "reasoning", "tool_call")
LETTERS = 3  # a piece with as many letters is more than (part of) a marker or of the space beside one


@dataclass
class Stream:
    """One recorded stream: its chunk records in order, and its ending."""

    start: Record
    done: Record
    chunks: list[Record] = field(default_factory=list)
    ids: dict[int, list[Record]] = field(default_factory=dict)  # choice -> the engine's rows

    @property
    def name(self) -> str:
        return next((record["response_id"] for record in self.chunks if "response_id" in record), "")

    def pieces(self, *kinds: str) -> list[Record]:
        """Chunks with some letters, of these kinds."""
        return [
            record
            for record in self.chunks
            if record.get("kind", "text") in (kinds or TEXT_KINDS) and letters(record.get("delta_text", "")) >= LETTERS
        ]

    def text(self) -> list[tuple[int, str, str]]:
        """What the client got: (choice, kind, text), neighbours joined."""
        found: list[tuple[int, str, str]] = []
        for choice in sorted({record.get("choice", 0) for record in self.chunks}):
            for record in self.chunks:
                kind, text = record.get("kind", "text"), record.get("delta_text", "")
                if record.get("choice", 0) != choice or not text:
                    continue
                if found and found[-1][:2] == (choice, kind):
                    text = found.pop()[2] + text
                found.append((choice, kind, text))
        return found


def letters(text: str) -> int:
    return sum(character.isalpha() for character in text)


# ------------------------------------------------------------------------------------------------------- the faults
# Each changes the stream, or returns False where it has nothing to change.


def drop(stream: Stream, dice: random.Random) -> bool:
    return bool(pieces := stream.pieces("text", "reasoning")) and not stream.chunks.remove(dice.choice(pieces))


def double(stream: Stream, dice: random.Random) -> bool:
    if not (pieces := stream.pieces("text", "reasoning")):
        return False
    piece = dice.choice(pieces)
    copy = {
        key: value
        for key, value in piece.items()
        if key not in ("finish_reason", "stop_reason", "response_id", "wire_index")
    }
    stream.chunks.insert(_at(stream, piece) + 1, copy)
    return True


def swap(stream: Stream, dice: random.Random) -> bool:
    pieces = stream.pieces("text", "reasoning")
    pairs = [
        (one, other)
        for one, other in pairwise(pieces)
        if (one.get("choice"), one.get("kind")) == (other.get("choice"), other.get("kind"))
    ]
    if not pairs:
        return False
    one, other = dice.choice(pairs)
    one["delta_text"], other["delta_text"] = other["delta_text"], one["delta_text"]
    return True


def alter(stream: Stream, dice: random.Random) -> bool:
    if not (pieces := stream.pieces()):
        return False
    piece = dice.choice(pieces)
    old = dice.choice([character for character in piece["delta_text"] if character.isalpha()])
    piece["delta_text"] = piece["delta_text"].replace(old, "Q" if old != "Q" else "J", 1)
    if calls := piece.get("tool_calls"):
        if len(calls) != 1:
            return False
        calls[0]["arguments"] = piece["delta_text"]
    return True


def foreign(stream: Stream, dice: random.Random) -> bool:
    if not (pieces := stream.pieces("text", "reasoning")):
        return False
    piece = dice.choice(pieces)
    copy = {key: piece[key] for key in piece if key in ("event", "ts", "capture", "kind", "choice", "chunk_index")}
    stream.chunks.insert(_at(stream, piece), copy | {"delta_text": " somebody else's words"})
    return True


def cut_the_end(stream: Stream, dice: random.Random) -> bool:
    """The text stops early; the finish and the end marker come all the same."""
    pieces = stream.pieces("text", "reasoning")
    first_of = {piece.get("choice", 0): piece for piece in reversed(pieces)}
    later = [piece for piece in pieces if piece is not first_of[piece.get("choice", 0)]]
    if not later:
        return False
    first = _at(stream, dice.choice(later))
    choice = stream.chunks[first].get("choice", 0)
    for record in stream.chunks[first:]:
        if record.get("choice", 0) == choice and "chunk_index" in record:
            del record["chunk_index"]
            record["delta_text"] = ""
            record.pop("tool_calls", None)
    return True


def other_channel(stream: Stream, dice: random.Random) -> bool:
    kinds = {record.get("kind", "text") for record in stream.pieces("text", "reasoning")}
    if kinds != {"text", "reasoning"} or len(pieces := stream.pieces("reasoning")) < 3:
        return False
    del dice.choice(pieces[1:-1])["kind"]  # text, by default
    return True


def usage(stream: Stream, dice: random.Random) -> bool:
    if not (stream.done.get("usage") or {}).get("completion_tokens"):
        return False
    stream.done["usage"]["completion_tokens"] += dice.choice([-1, 1])
    return True


def no_finish(stream: Stream, dice: random.Random) -> bool:
    """The connection ends cleanly behind the text; nothing says that it is over."""
    del dice
    for record in stream.chunks:
        record.pop("finish_reason", None)
    stream.chunks = [record for record in stream.chunks if record.get("kind") != "done"]
    stream.done["end_marker"] = False
    return True


def other_id(stream: Stream, dice: random.Random, words: dict[int, str]) -> bool:
    """The engine sampled another token than the one whose text came."""
    if any(record.get("kind") == "tool_call" for record in stream.chunks):
        return False  # ids that only make a call's form have no text that comes
    rows = [row for rows in stream.ids.values() for row in rows[1:-2] if any(letters_of(words, row))]
    if not rows:
        return False
    row = dice.choice(rows)
    index = dice.choice([n for n, has in enumerate(letters_of(words, row)) if has])
    others = [other for other, word in words.items() if word != words[row["ids"][index]]]
    row["ids"][index] = dice.choice(others)
    return True


def letters_of(words: dict[int, str], row: Record) -> list[bool]:
    return [token in words for token in row.get("ids", [])]


def _at(stream: Stream, record: Record) -> int:
    return next(index for index, other in enumerate(stream.chunks) if other is record)


FAULTS: dict[str, Callable[[Stream, random.Random], bool]] = {
    "chunk dropped": drop,
    "chunk doubled": double,
    "chunks swapped": swap,
    "character altered": alter,
    "foreign chunk": foreign,
    "end cut off": cut_the_end,
    "other channel": other_channel,
    "usage off by one": usage,
    "no finish": no_finish,
}
OTHER_ID = "other id sampled"


# ------------------------------------------------------------------------------------------------------ whole logs


def put_faults(logs: Path, target: Path, names: set[str], words: dict[int, str], seed: int) -> dict[str, str]:
    """A copy of the logs with one fault in each of the named streams. Returns reply id -> the fault put into it.

    words: ids whose text is of letters, for faults of the engine's side.
    """
    dice = random.Random(seed)
    files = {path: [json.loads(line) for line in path.read_bytes().splitlines()] for path in find_logs([str(logs)])}
    put: dict[str, str] = {}
    for path, records in files.items():
        streams = _streams(records, files)
        for number, stream in streams.items():
            # Of a stream that its client left, a shorter beginning is as right, and a sum stated in it proves nothing.
            complete = stream.done["outcome"] == "complete"
            if stream.name in names and complete and (fault := _put_one(stream, dice, words)):
                put[stream.name] = fault
                _renumber(stream)
            streams[number] = stream
        if streams:
            files[path] = _laid_out(records, streams)
    target.mkdir()
    for path, records in files.items():
        if records[-1]["event"] == "log_close":
            records[-1]["records"] = len(records) - 1
        (target / path.name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return put


def _put_one(stream: Stream, dice: random.Random, words: dict[int, str]) -> str | None:
    kinds = [*FAULTS, OTHER_ID]
    for fault in dice.sample(kinds, len(kinds)):
        before = (stream.text(), json.dumps(stream.done), json.dumps(stream.ids), len(stream.chunks))
        made = other_id(stream, dice, words) if fault == OTHER_ID else FAULTS[fault](stream, dice)
        if made and before != (stream.text(), json.dumps(stream.done), json.dumps(stream.ids), len(stream.chunks)):
            return fault
    return None


def _streams(records: list[Record], files: dict[Path, list[Record]]) -> dict[int, Stream]:
    """The streams of a proxy's log, by capture number."""
    starts = {record["capture"]: record for record in records if record["event"] == "request_start"}
    streams = {
        record["capture"]: Stream(starts[record["capture"]], record)
        for record in records
        if record["event"] == "stream_done"
    }
    for record in records:
        if record["event"] == "chunk" and record["capture"] in streams:
            streams[record["capture"]].chunks.append(record)
    rows: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for engine in files.values():
        names = {r["request"]: (r["external_id"], r.get("child", 0)) for r in engine if r["event"] == "request_added"}
        for row in (row for record in engine if record["event"] == "step" for row in record["rows"]):
            name, child = names[row["request"]]
            rows[name][child].append(row)
    for stream in streams.values():
        stream.ids = rows.get(stream.name, {})
    return streams


def _renumber(stream: Stream) -> None:
    """Make what the log says of itself agree with the stream as it is now."""
    counts: dict[int, int] = defaultdict(int)
    lengths: dict[int, int] = defaultdict(int)
    events = 0
    last = None
    for record in stream.chunks:
        if "wire_index" not in record or record["wire_index"] != last:  # several records may be of one event
            events += 1
            last = record.get("wire_index")
        record["wire_index"] = events
        if "chunk_index" in record:
            choice = record.get("choice", 0)
            counts[choice] += 1
            lengths[choice] += len(record["delta_text"])
            record |= {"chunk_index": counts[choice], "accumulated_len": lengths[choice]}
            record.pop("delta_len", None)
    stream.done |= {"events": events, "chunk_count": sum(counts.values()), "total_text_len": sum(lengths.values())}


def _laid_out(records: list[Record], streams: dict[int, Stream]) -> list[Record]:
    """The log's records in order, the chunks of each stream right before its ending."""
    found: list[Record] = []
    for record in records:
        if record["event"] == "stream_done":
            found += streams[record["capture"]].chunks
        if record["event"] != "chunk" or record["capture"] not in streams:
            found.append(record)
    return found
