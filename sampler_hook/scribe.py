"""Makes records of what a scheduler did, in the order in which it did it. Beside the engine's thread, never in it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from sampler_hook import adapters
from sampler_hook.accounts import Account
from sampler_hook.attention import read
from sampler_hook.kv import KvLedger
from sampler_hook.recorder import EngineRecorder, Entry, Put
from sparseety.clock import Clock
from sparseety.metrics import OVERHEAD_SECONDS, Cell, new_cell
from sparseety.records import AttentionLayers, Gap, Kv, Row

# On a SchedulerOutput, which is pickled to the workers: {step, skip, capture, near_zero}.
FOR_WORKERS = "_sparseety"

_NO_IDS: list[int] = []


@dataclass(slots=True)
class TakenStep:
    """A step whose result the scheduler has taken."""

    output: Any  # SchedulerOutput
    index: dict[str, int]  # engine id -> row
    rows: list[list[int]]  # what was sampled, as it was
    ts: float = 0.0
    taken: list[tuple[str, list[int]]] = field(default_factory=list)  # accepted ids
    ended: list[str] = field(default_factory=list)  # requests that ended in it
    firsts: list[tuple[str, int]] = field(default_factory=list)  # tokens of the prompt that came from elsewhere
    evicted: list[int] = field(default_factory=list)  # blocks whose cached content was given up meanwhile


@dataclass(slots=True)
class Counts:
    """Since the process began. Plain numbers: metrics.py publishes them."""

    steps: int = 0
    requests: dict[str, int] = field(default_factory=lambda: {"captured": 0, "forced": 0, "skipped": 0})
    prompt: dict[str, int] = field(default_factory=lambda: {"computed": 0, "reused_local": 0, "reused_external": 0})
    evicted: dict[str, int] = field(default_factory=lambda: {"preemption": 0})
    drafts: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "rejected": 0})
    accepted_lengths: dict[int, int] = field(default_factory=dict)  # accepted drafts of a row -> rows
    attended: dict[str, list[int]] = field(default_factory=dict)  # layer type -> [read, before]
    overhead: Cell = field(default_factory=lambda: new_cell(OVERHEAD_SECONDS))  # seconds of each step
    last_event: float = 0.0


@dataclass(slots=True)
class _Open:
    request: Any  # vLLM's Request
    entry: Entry
    account: Account
    session: bool  # its prompt grows from turn to turn, so that positions of it do not add up
    external_tokens: int = 0


class Scribe:
    def __init__(
        self,
        put: Put,
        clock: Clock,
        *,
        generation_eos: frozenset[int] = frozenset(),
        attention: Iterable[AttentionLayers] = (),
        strangers: Collection[str] = (),
        counts: Counts | None = None,
    ) -> None:
        """strangers: requests under way when recording began, of which nothing is recorded."""
        self._put = put
        self._generation_eos, self._attention = generation_eos, list(attention)
        self.counts = counts or Counts()
        for kind in self._attention:
            if read(kind, 1, 1):  # it can be derived: it is there before the first request's end
                self.counts.attended.setdefault(kind.layer_type, [0, 0])
        self.kv: KvLedger | None = None  # None: KV blocks are not recorded
        self.fault: Callable[[str, Exception], object] = lambda part, error: None  # what to call when a part fails
        self._recorder = EngineRecorder(put, clock)
        self._open: dict[str, _Open] = {}
        self._skipped: set[str] = set(strangers)
        self._weights: str | None = None

    def open_requests(self) -> list[int]:
        return self._recorder.all_open()

    def added(self, request: Any, external_id: str, child: int, decision: str, ts: float) -> None:
        engine_id = request.request_id
        self.counts.requests[decision] += 1
        if decision == "skipped":
            self._skipped.add(engine_id)
            return
        entry = self._recorder.added(
            engine_id,
            external_id=external_id,
            prompt_len=request.num_prompt_tokens,
            child=child,
            role=adapters.role(request),
            lora=adapters.lora(request),
            ts=ts,
            **adapters.text_parameters(request, self._generation_eos),
        )
        session = bool(getattr(request, "resumable", False))
        self._open[engine_id] = _Open(request, entry, Account(request.num_prompt_tokens), session)

    def took(self, step: TakenStep) -> None:
        taken: dict[str, list[int]] = {}
        for engine_id, ids in step.taken:
            if ids:
                taken[engine_id] = taken[engine_id] + ids if engine_id in taken else ids
        for engine_id, tokens in step.firsts:
            if (open_ := self._open.get(engine_id)) is not None:
                open_.external_tokens = tokens
        rows = self._rows(step, taken)
        number = getattr(step.output, FOR_WORKERS, {}).get("step")
        number = self._recorder.write_step(rows, number=number, ts=step.ts, weight_version=self._weights)
        if rows:
            self._weights = None
        self._with_kv(self._blocks, number, step)
        if step.ended:
            self.ended(step.ended, step.ts)
        self.counts.steps += 1
        self.counts.last_event = step.ts

    def _rows(self, step: TakenStep, taken: dict[str, list[int]]) -> list[Row]:
        output, index, sampled_rows = step.output, step.index, step.rows
        starts, again = adapters.starts(output)
        drafts = output.scheduled_spec_decode_tokens
        rows: list[Row | None] = []
        for engine_id, tokens in output.num_scheduled_tokens.items():
            row = index.get(engine_id)
            sampled = _NO_IDS if row is None else sampled_rows[row]
            ids = taken.pop(engine_id, _NO_IDS)
            open_ = self._open.get(engine_id)
            if open_ is None:
                if sampled and engine_id not in self._skipped:  # it ended while this step was on its way
                    rows.append(self._recorder.late(engine_id, ids, _rest(sampled, ids)))
                continue
            entry = open_.entry
            known = entry.prompt_len + entry.total_ids
            start = starts.get(engine_id, known - 1)
            # Most rows are of this kind, so they have a way of their own: one token further, one id, nothing else.
            plain = tokens == 1 and sampled == ids and len(ids) == 1 and (not again or engine_id not in again)
            if plain and open_.account.goes_on(start, known):
                rows.append(Row(request=entry.request, first_index=entry.total_ids, ids=ids))
                entry.total_ids += 1
                continue
            proposed = len(drafts.get(engine_id, _NO_IDS))
            # The step's last id is the model's own; those before it are drafts that it agreed with.
            agreed = min(proposed, len(sampled) - 1) if sampled else 0
            phase = open_.account.step(start, tokens, known=known, agreed=agreed, resumed=engine_id in again)
            if not sampled and not ids:
                continue
            if proposed:
                proposed -= adapters.invalid_drafts(output, engine_id)
                self._proposed(open_.account, proposed, agreed, bool(ids))
            rows.append(
                entry.row(
                    ids,
                    start=None if phase == "decode" else start,
                    phase=phase,
                    drafts=proposed,
                    accepted=agreed,
                    discarded=_NO_IDS if sampled == ids else _rest(sampled, ids),
                )
            )
        for engine_id, ids in taken.items():  # accepted, though not sampled here
            if (open_ := self._open.get(engine_id)) is not None:
                rows.append(open_.entry.row(ids))
            elif engine_id not in self._skipped:
                rows.append(self._recorder.late(engine_id, ids, _NO_IDS))
        return [each for each in rows if each is not None]

    def _proposed(self, account: Account, drafts: int, accepted: int, taken: bool) -> None:
        """vLLM counts drafts where it takes a step's result."""
        if taken:
            account.drafts += drafts
            account.accepted += accepted
            lengths = self.counts.accepted_lengths
            lengths[accepted] = lengths.get(accepted, 0) + 1

    def ended(self, engine_ids: list[str], ts: float) -> None:
        for engine_id in engine_ids:
            open_ = self._open.pop(engine_id, None)
            if open_ is None:
                self._skipped.discard(engine_id)
                continue
            request = open_.request
            reason = request.get_finished_reason()
            self._recorder.finished(
                engine_id,
                finish_reason=None if reason is None else str(reason),
                stop_reason=request.stop_reason,
                ts=ts,
                preemptions=request.num_preemptions,
                **self._accounts(open_),
            )

    def _accounts(self, open_: _Open) -> dict[str, Any]:
        account, counts = open_.account, self.counts
        account.ended(open_.request.num_preemptions)
        self._with_kv(KvLedger.ended, open_.entry.request)
        rejected = account.drafts - account.accepted
        counts.drafts["accepted"] += account.accepted
        counts.drafts["rejected"] += rejected
        fields: dict[str, Any] = {
            "drafts": account.drafts,
            "drafts_accepted": account.accepted,
            "drafts_rejected": rejected,
        }
        if open_.session:
            return fields
        counts.evicted["preemption"] += account.evicted
        fields |= {
            "evicted": account.evicted,
            "reused_again": account.reused_again,
            "recomputed": account.recomputed,
        }
        if not open_.entry.total_ids:  # without output it is not known what the rest of the prompt would have been
            return fields
        counts.prompt["computed"] += account.computed
        counts.prompt["reused_external"] += open_.external_tokens
        counts.prompt["reused_local"] += account.cached - open_.external_tokens
        return fields | {
            "cached_tokens": account.cached,
            "external_tokens": open_.external_tokens,
            "computed": account.computed,
            "attended": self._attended(account.prompt_len, open_.entry.total_ids),
        }

    def _attended(self, prompt_len: int, outputs: int) -> dict[str, tuple[int, int]]:
        attended = {}
        for kind in self._attention:
            if both := read(kind, prompt_len, outputs):
                sums = self.counts.attended.setdefault(kind.layer_type, [0, 0])
                sums[0] += both[0]
                sums[1] += both[1]
                if self.kv is not None and kind.layer_type != "full":
                    attended[kind.layer_type] = both
        return attended

    def failed(self, engine_ids: list[str], error: str, ts: float) -> None:
        """vLLM itself failed in taking a step's result."""
        if requests := self._recorder.numbers(engine_ids):
            reason = f"the scheduler failed on a step: {error}"
            self._put(Gap(ts=ts, reason=reason, count=len(requests), requests=requests))

    def new_weights(self, version: str) -> None:
        self._weights = version

    # KV blocks are a part of their own: where they cannot be followed, tokens still are.

    def _with_kv(self, action: Callable[..., object], *arguments: Any) -> None:
        if self.kv is None:
            return
        try:
            action(self.kv, *arguments)
        except Exception as error:  # noqa: BLE001 -- the boundary of this part
            self.kv = None
            self.fault("kv", error)

    def preempted(self, engine_id: str, ts: float) -> None:
        if (open_ := self._open.get(engine_id)) is not None:
            self._with_kv(self._gave_up, open_.entry.request, ts)

    def _gave_up(self, ledger: KvLedger, request: int, ts: float) -> None:
        if events := ledger.preempted(request):
            self._put(Kv(ts=ts, step=self._recorder.steps, events=events))

    def _blocks(self, ledger: KvLedger, number: int, step: TakenStep) -> None:
        events = ledger.evicted(step.evicted)
        self.counts.evicted["capacity"] = self.counts.evicted.get("capacity", 0) + sum(e.tokens for e in events)
        for engine_id, start, blocks, anew in adapters.blocks(step.output):
            if (open_ := self._open.get(engine_id)) is not None:
                events += ledger.given(open_.entry.request, start, blocks, anew=anew)
        if events:
            self._put(Kv(ts=step.ts, step=number, events=events))


def _rest(sampled: list[int], ids: list[int]) -> list[int]:
    """What was sampled and not accepted."""
    return sampled[len(ids) :] if sampled[: len(ids)] == ids else sampled
