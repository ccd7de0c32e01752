"""The engine's part of the demo: steps through all running requests side by side and writes the engine's log."""

import asyncio
import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deploy.demo.faults import Plan
from deploy.demo.replay import Ended, Piece
from deploy.demo.requests import Ask, Prompt
from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.clock import monotonic_clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, EngineStart, Scope, TokenizerIdentity

VERSION = "0.32.0+sparseety.demo"  # whose dialect it speaks, and that it is not that program

Ending = Literal["done", "cut", "die", "abort"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine says of itself in its log."""

    model: str
    tokenizer: Path  # folder
    vocab_size: int
    max_model_len: int

    def record(self, ts: float) -> EngineStart:
        files = sorted(self.tokenizer.glob("tokenizer*.json"))
        return EngineStart(
            ts=ts,
            vllm=VERSION,
            model=self.model,
            served_names=[self.model],
            max_model_len=self.max_model_len,
            tokenizer=TokenizerIdentity(
                name=str(self.tokenizer),
                files={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
                vocab_size=self.vocab_size,
            ),
            # It records by itself, where the plugin has to attach to somebody else's engine.
            hooks_expected=["Engine.step"],
            hooks_attached=["Engine.step"],
        )


@dataclass(slots=True, eq=False)
class _Choice:
    engine_id: str
    prompt: Prompt
    sampled: int = 0

    def start(self) -> int:
        """Position of the first token that the next step computes: the whole prompt first, then one token a step."""
        return len(self.prompt.ids) + self.sampled - 1 if self.sampled else 0


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine. `outbox` holds what its reply is made of: the pieces of a step, at last an Ending."""

    plan: Plan
    choices: list[_Choice]
    outbox: asyncio.Queue[list[Piece] | Ending] = field(default_factory=asyncio.Queue)
    next_tick: int = 0


class Engine:
    """All requests that run at the same time share the engine's steps, as in continuous batching."""

    def __init__(self, identity: Identity, log_dir: Path | None, token_delay: float) -> None:
        """`log_dir` None: no log is written. `token_delay`: seconds between two steps. Raises SparseetyError."""
        self._identity, self._log_dir, self._token_delay = identity, log_dir, token_delay
        self._running: list[Running] = []
        self._work = asyncio.Event()
        self._clock = monotonic_clock()
        self._writer: LogWriter | None = None
        self.counts: Counter[str] = Counter()  # since the beginning, by what vLLM calls it
        self._start()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._step()
            await asyncio.sleep(self._token_delay)

    def submit(self, ask: Ask, plan: Plan) -> Running:
        """Take a request; named as vLLM 0.32 names them: `[k_]<external id>-<8 random hex digits>`."""
        choices = []
        for number, prompt in enumerate(ask.prompts):
            external_id = f"{ask.response_id}-{number}" if ask.endpoint == "completions" else ask.response_id
            suffix = secrets.token_hex(4)
            for child in range(ask.n):
                engine_id = f"{f'{child}_' if ask.n > 1 else ''}{external_id}-{suffix}"
                choices.append(_Choice(engine_id, prompt))
                self._record_added(ask, engine_id, external_id, child, prompt)
        self.counts["prompt_tokens"] += sum(len(choice.prompt.ids) for choice in choices)
        running = Running(plan, choices)
        self._running.append(running)
        self._work.set()
        return running

    def abort(self, running: Running) -> None:
        """The client has gone. Does nothing to a request that is no longer running."""
        if running not in self._running:
            return
        self._running.remove(running)
        for choice in running.choices:
            self._recorder.finished(choice.engine_id, finish_reason="abort")
        running.outbox.put_nowait("abort")

    @property
    def running(self) -> int:
        """Choices that are generated now."""
        return sum(len(running.choices) for running in self._running)

    def close(self) -> None:
        for running in list(self._running):
            self.abort(running)
        if self._writer:
            self._writer.close()

    # ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._log_dir:
            self._writer = LogWriter(self._log_dir, "engine", Scope(), clock=self._clock)
        self._recorder = EngineRecorder(self._put, self._clock)
        self._put(self._identity.record(self._clock()))

    def _put(self, record: AnyRecord) -> None:
        if self._writer:
            self._writer.put(record)

    def _record_added(self, ask: Ask, engine_id: str, external_id: str, child: int, prompt: Prompt) -> None:
        sampling = ask.sampling
        self._recorder.added(
            engine_id,
            external_id=external_id,
            prompt_len=len(prompt.ids),
            prompt_tail=prompt.ids,
            child=child,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            eos_ids=[] if sampling.ignore_eos else [sampling.eos_id],
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            max_tokens=sampling.max_tokens,
        )

    def _step(self) -> None:
        batch = list(self._running)
        rows = [row for running in batch for row in _rows(running)]
        self.counts["generation_tokens"] += sum(len(row.ids) for row in rows)
        self._recorder.step(rows)
        for running in batch:
            tick = running.plan.ticks[running.next_tick]
            if tick.pieces:
                running.outbox.put_nowait(tick.pieces)
            for choice, ended in tick.ended.items():
                self._record_finished(running.choices[choice], ended)
            if running.next_tick == running.plan.last_tick:
                if running.plan.ending == "die":
                    self._die()
                    return
                running.outbox.put_nowait(running.plan.ending)  # cut: the engine itself goes on, unheard
            running.next_tick += 1
            if running.next_tick == len(running.plan.ticks):
                self._running.remove(running)
                running.outbox.put_nowait("done")
        if not self._running:
            self._work.clear()

    def _record_finished(self, choice: _Choice, ended: Ended) -> None:
        self._recorder.finished(
            choice.engine_id, finish_reason=ended.reason, stop_reason=ended.stop_reason, cached_tokens=0
        )

    def _die(self) -> None:
        """Everything that runs breaks off and the log just ends, without a closing record. Then a new engine starts."""
        for running in self._running:
            running.outbox.put_nowait("die")
        self._running.clear()
        self._work.clear()
        if self._writer:
            self._writer.flush()
        self._start()


def _rows(running: Running) -> list[Sampled]:
    rows = []
    for index, ids in running.plan.ticks[running.next_tick].rows.items():
        choice = running.choices[index]
        rows.append(Sampled(choice.engine_id, ids, start=choice.start()))
        choice.sampled += 1
    return rows
