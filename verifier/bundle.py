"""One request as a folder of its own, for a bug report: its records of both logs, and what was found.

The records are those of the logs, cut down to this request, in files that verify-tokens reads: who gets the folder and
has the tokenizer comes to the same verdict. It holds the text and the ids.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import sparseety
from sparseety.errors import SparseetyError
from sparseety.logreader import in_order, read_log
from sparseety.records import (
    AnyRecord,
    EngineEvent,
    EngineStart,
    Gap,
    Kv,
    LogClose,
    LogOpen,
    Step,
    subjects,
)
from verifier.findings import RequestVerdict
from verifier.output import request_json
from verifier.requests import Capture, EngineRequest


def write_bundle(
    folder: Path,
    paths: Iterable[Path],
    capture: Capture,
    engines: list[EngineRequest],
    verdict: RequestVerdict,
    explained: Iterable[str],
) -> None:
    """Make `folder` and fill it. explained: the lines that `explain` prints. Raises SparseetyError."""
    if capture.log.opening is None or any(engine.log.opening is None for engine in engines):
        raise SparseetyError("no bundle: the first line of its log is lost, and with it which records are whose")
    wanted = {_writer(capture.log.opening): ({capture.number}, set[int]())}
    for engine in engines:
        wanted.setdefault(_writer(engine.log.opening), (set(), set()))[1].add(engine.number)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise SparseetyError(f"cannot make {folder} for the bundle: {error.strerror}") from None
    written: dict[object, Path] = {}
    for path in in_order(paths):
        for opening, record in _of_writers(path, wanted):
            writer = _writer(opening)
            if writer not in written:
                written[writer] = folder / f"{opening.source}-{len(written)}.jsonl"
                _append(written[writer], msgspec.structs.replace(opening, segment=0))
            _append(written[writer], record)
    _append_text(folder / "verdict.json", json.dumps(_about(verdict, engines), indent=2) + "\n")
    _append_text(folder / "explain.txt", "".join(line + "\n" for line in explained))


def _about(verdict: RequestVerdict, engines: list[EngineRequest]) -> dict[str, Any]:
    starts = [engine.log.engine for engine in engines if engine.log.engine]
    return {
        "sparseety": sparseety.__version__,
        "engines": [msgspec.to_builtins(start) for start in starts],
        "verdict": request_json(verdict, show_text=True),
    }


def _writer(opening: LogOpen | None) -> object:
    return None if opening is None else (opening.source, opening.host, opening.pid, opening.start)


def _of_writers(path: Path, wanted: dict[object, tuple[set[int], set[int]]]) -> Iterator[tuple[LogOpen, AnyRecord]]:
    """(opening of its writer, record) for what concerns the requests wanted: {writer: (captures, engine requests)}."""
    opening: LogOpen | None = None
    for _, record in read_log(path, lambda problem: None):
        if isinstance(record, LogOpen):
            opening = record
            continue
        numbers = wanted.get(_writer(opening))
        if numbers is None or opening is None or isinstance(record, LogClose):
            continue
        if (kept := _cut(record, *numbers)) is not None:
            yield opening, kept


def _cut(record: AnyRecord, captures: set[int], requests: set[int]) -> AnyRecord | None:
    """What of a record concerns these requests; None: nothing."""
    if isinstance(record, EngineStart | EngineEvent):
        return record
    if isinstance(record, Step):
        rows = [row for row in record.rows if row.request in requests]
        return msgspec.structs.replace(record, rows=rows) if rows else None
    of_captures, of_requests = subjects(record)
    our_captures, our_requests = captures.intersection(of_captures), requests.intersection(of_requests)
    if isinstance(record, Gap):
        if of_captures or of_requests:
            record = msgspec.structs.replace(record, captures=sorted(our_captures), requests=sorted(our_requests))
        else:
            return record  # any request may be meant
    return record if (our_captures or our_requests) and not isinstance(record, Kv) else None


def _append(path: Path, record: AnyRecord) -> None:
    _append_text(path, msgspec.json.encode(record).decode() + "\n")


def _append_text(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
        file.write(text)
