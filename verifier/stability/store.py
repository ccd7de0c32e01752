"""A run's folder: plan.json, prompts.jsonl, and one append-only file of JSON Lines for each arm.

An arm's file has one writer at a time, and the arms of a run may be driven at different times, by different processes.
What is in it is content (token ids): the folder and its files are for their owner only.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from sparseety.errors import SparseetyError
from verifier.stability import prompts as prompt_files
from verifier.stability.model import Fingerprint, Forced, Output, Served, Tops
from verifier.stability.plan import FORMAT_VERSION, Key, Plan, same_or_say
from verifier.stability.prompts import Prompt

_PLAN, _PROMPTS = "plan.json", "prompts.jsonl"


class Input(msgspec.Struct, frozen=True):
    """The ids of a prompt, as an arm's server made them."""

    prompt: int
    ids: list[int]


class Checked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What logs say about one output, found out later."""

    request_id: str
    verdict: str | None = None
    served: Served | None = None
    epoch: str | None = None


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All prompts once, for an overhead."""

    number: int
    seconds: float  # from the first request to the end of the last
    tokens: int  # that came
    failed: int = 0  # requests
    memory: int | None = None  # bytes, the most that was seen
    memory_of: str | None = None  # of what, in words


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an arm's file: one of these."""

    output: Output | None = None
    forced: Forced | None = None
    input: Input | None = None
    fingerprint: Fingerprint | None = None
    checked: Checked | None = None
    round: Round | None = None


@dataclass
class Arm:
    """What a run has of one arm."""

    name: str
    outputs: dict[Key, Output] = field(default_factory=dict)
    forced: dict[str, Forced] = field(default_factory=dict)  # by the request id of the reference
    inputs: dict[int, list[int]] = field(default_factory=dict)  # by prompt
    fingerprint: Fingerprint | None = None
    rounds: list[Round] = field(default_factory=list)

    def take(self, line: Line) -> None:
        if line.output is not None:
            key = Key(line.output.prompt, line.output.repeat, line.output.cache)
            self.outputs[key] = msgspec.structs.replace(line.output, top=Tops(line.output.top))
        elif line.forced is not None:
            self.forced[line.forced.reference] = line.forced
        elif line.input is not None:
            self.inputs[line.input.prompt] = line.input.ids
        elif line.fingerprint is not None:
            self.fingerprint = line.fingerprint
        elif line.round is not None:
            self.rounds.append(line.round)

    def check(self, found: Iterable[Checked]) -> None:
        """Add what logs say."""
        by_id = {each.request_id: each for each in found}
        for key, output in self.outputs.items():
            if one := by_id.get(output.request_id):
                self.outputs[key] = msgspec.structs.replace(
                    output, verdict=one.verdict, served=one.served, epoch=one.epoch
                )


@dataclass
class Run:
    folder: Path
    plan: Plan
    prompts: list[Prompt]
    arms: dict[str, Arm]
    notes: list[str]


def begin(folder: Path, plan: Plan, prompts: list[Prompt]) -> Plan:
    """Make the folder, or go on in it. Returns the plan under which the run was begun. Raises SparseetyError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # two processes may begin the arms of one run at the same moment
            return _begin(folder, plan, prompts)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SparseetyError(f"{folder}: {error.strerror}") from None


def _begin(folder: Path, plan: Plan, prompts: list[Prompt]) -> Plan:
    if (folder / _PLAN).exists():
        stored = _plan(folder)
        same_or_say(stored, plan)
        return stored
    if any(path.name not in (_PROMPTS, f"{_PROMPTS}.new", f"{_PLAN}.new") for path in folder.iterdir()):
        raise SparseetyError(f"{folder} is not empty, and holds no run")
    _write(folder / _PROMPTS, b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))
    _write(folder / _PLAN, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")  # last: with it, it is a run
    return plan


def load(folder: Path) -> Run:
    """Everything there is. A torn last line (its writer was killed) is left out without a word."""
    if not (folder / _PLAN).exists():
        raise SparseetyError(f"{folder} holds no stability run (no {_PLAN} in it)")
    notes: list[str] = []
    try:
        plan, prompts = _plan(folder), prompt_files.load(folder / _PROMPTS)
        arms = {path.stem: _arm(path, notes) for path in sorted(folder.glob("*.jsonl")) if path.name != _PROMPTS}
    except OSError as error:
        raise SparseetyError(f"{folder}: {error.strerror}") from None
    return Run(folder, plan, prompts, arms, notes)


class ArmWriter:
    """Appends to an arm's file. Whole lines only: what a killed writer left half is cut away first."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises SparseetyError where another process writes it."""
        self._path = folder / f"{name}.jsonl"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = self._path.read_bytes()
            os.ftruncate(self._file, content.rfind(b"\n") + 1)
        except BlockingIOError:
            os.close(self._file)
            raise SparseetyError(f"{self._path}: another process is running this arm") from None
        except OSError as error:
            raise SparseetyError(f"{self._path}: {error.strerror}") from None

    def write(self, line: Line) -> None:
        """Raises SparseetyError."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            said = "what came before is kept, and the same command goes on"
            raise SparseetyError(f"{self._path}: {error.strerror}; {said}") from None

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "ArmWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arm(path: Path, notes: list[str]) -> Arm:
    arm, checked, bad = Arm(path.stem), list[Checked](), 0
    *whole, _ = path.read_bytes().split(b"\n")
    for data in whole:
        try:
            line = msgspec.json.decode(data, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            bad += 1
            continue
        arm.take(line)
        if line.checked is not None:
            checked.append(line.checked)
    arm.check(checked)
    if bad:
        notes.append(f"{path}: {bad} damaged lines are left out")
    return arm


def _plan(folder: Path) -> Plan:
    path = folder / _PLAN
    plan = _decoded(path, Plan)
    if plan.format != FORMAT_VERSION:
        raise SparseetyError(f"{path}: a run of format {plan.format}; this version reads {FORMAT_VERSION}")
    return plan


_T = TypeVar("_T")


def _decoded(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SparseetyError(f"{path}: {error}") from None


def _write(path: Path, data: bytes) -> None:
    """Wholly or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)
