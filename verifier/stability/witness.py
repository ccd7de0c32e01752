"""What the logs of proxy and engine say about a run's outputs: was the stream right, and what did sparsity do to it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparseety.logreader import in_order, read_log
from sparseety.records import (
    AnyRecord,
    EngineEvent,
    EngineStart,
    LogOpen,
    RequestAdded,
    RequestFinished,
    Sparsity,
)
from sparseety.sampling import join_key
from verifier.run import verify
from verifier.stability.model import Engine, Output, Served
from verifier.stability.store import Checked
from verifier.tokenizer import TokenizerShelf

_EPOCHS = ("sleep", "wake", "weight_update", "weight_version", "cache_reset")


@dataclass
class Evidence:
    """By request id, and by arm."""

    checked: dict[str, Checked] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)


def look_up(outputs: Iterable[Output], paths: list[Path], shelf: TokenizerShelf, jobs: int | None = None) -> Evidence:
    """Judge every stream, and gather what the engine says of each output. Raises SparseetyError."""
    wanted = {output.response_id: output for output in outputs if output.response_id}
    ids = {output.request_id for output in wanted.values()}
    verdicts: dict[str, str] = {}
    for verdict in verify(paths, shelf, jobs).verdicts:
        if verdict.x_request_id in ids:
            verdicts[verdict.x_request_id] = verdict.verdict.value
        elif output := wanted.get(verdict.request_id):
            verdicts[output.request_id] = verdict.verdict.value
    served, epochs, engines = _served(paths, wanted)
    evidence = Evidence(engines=engines)
    for output in wanted.values():
        id_ = output.request_id
        if id_ in verdicts or id_ in served:
            evidence.checked[id_] = Checked(
                request_id=id_, verdict=verdicts.get(id_), served=served.get(id_), epoch=epochs.get(id_)
            )
    return evidence


@dataclass
class _EngineLog:
    """One engine's log, as it is read."""

    name: str
    start: EngineStart | None = None
    changes: list[float] = field(default_factory=list)  # when it came up, and events after which outputs may be others
    requests: dict[int, Output] = field(default_factory=dict)  # those of the run, by the engine's own number


@dataclass
class _Zeros:
    zeros: int = 0
    elements: int = 0


def _served(
    paths: list[Path], wanted: Mapping[str, Output]
) -> tuple[dict[str, Served], dict[str, str], dict[str, Engine]]:
    """(what was done to each request, its epoch; by arm, the engine)."""
    finished: dict[str, tuple[RequestFinished, EngineStart | None]] = {}
    engine_ids: dict[str, str] = {}  # of the run's requests: the engine's name for it -> the request id
    zeros: dict[str, _Zeros] = {}  # by the engine's name
    added: list[tuple[Output, _EngineLog, float]] = []
    engines: dict[str, Engine] = {}
    logs: dict[object, _EngineLog] = {}
    for log, record in _records(paths, logs):
        match record:
            case EngineStart():
                if log.start is None:  # later segments repeat it
                    log.start = record
                    log.changes.append(record.ts)
            case EngineEvent() if record.kind in _EPOCHS:
                log.changes.append(record.ts)
            case RequestAdded() if output := wanted.get(join_key(record.external_id)):
                log.requests[record.request] = output
                engine_ids[record.engine_id] = output.request_id
                added.append((output, log, record.ts))
                if log.start is not None:
                    engines[output.arm] = _engine(log.start)
            case RequestFinished() if finished_one := log.requests.get(record.request):
                finished[finished_one.request_id] = record, log.start
            case Sparsity() if record.phase != "recomputed":
                counts = zeros.setdefault(record.engine_id, _Zeros())
                counts.zeros += sum(record.zeros)
                counts.elements += sum(record.elements)
    counted = {engine_ids[name]: counts for name, counts in zeros.items() if name in engine_ids}
    served = {id_: _sums(record, start, counted.get(id_)) for id_, (record, start) in finished.items()}
    return served, _epochs(added), engines


def _epochs(added: list[tuple[Output, _EngineLog, float]]) -> dict[str, str]:
    """By request id: which state of its arm's server it met. Engines that ran side by side are one server."""
    arms: dict[str, dict[str, _EngineLog]] = {}
    for output, log, _ in added:
        arms.setdefault(output.arm, {})[log.name] = log
    changes = {arm: sorted(ts for log in logs.values() for ts in log.changes) for arm, logs in arms.items()}
    return {
        output.request_id: f"{'+'.join(sorted(arms[output.arm]))}:{bisect_right(changes[output.arm], ts)}"
        for output, _, ts in added
    }


def _records(paths: list[Path], logs: dict[object, _EngineLog]) -> Iterator[tuple[_EngineLog, AnyRecord]]:
    """Each record, with the log of its writer. Problems of the files are verify's to report."""
    for path in in_order(paths):
        log = _EngineLog(path.stem)
        for _, record in read_log(path, lambda problem: None):
            if isinstance(record, LogOpen):
                if record.source == "proxy":
                    break
                writer = (record.source, record.host, record.pid, record.start)
                log = logs.setdefault(writer, _EngineLog(f"{record.host}-{record.pid}-{record.start:.0f}"))
            yield log, record


def _sums(record: RequestFinished, start: EngineStart | None, zeros: _Zeros | None) -> Served:
    attended, context = _attention(record, start)
    return Served(
        computed=record.computed,
        reused=record.cached_tokens,
        recomputed=record.recomputed,
        evicted=record.evicted,
        preemptions=record.preemptions,
        attended=attended,
        context=context,
        drafted=record.drafts,
        accepted=record.drafts_accepted,
        zeros=zeros.zeros if zeros else None,
        elements=zeros.elements if zeros else None,
    )


def _attention(record: RequestFinished, start: EngineStart | None) -> tuple[int | None, int | None]:
    """(positions read, positions there were) over all layers of which it is known.

    The log has no sums of full attention, which reads all that there is.
    """
    layers = {kind.layer_type: kind.layers for kind in start.attention} if start else {}
    known = {name: sums for name, sums in record.attended.items() if name in layers}
    if not known:
        return None, None
    if "full" in layers:
        before = max(before for _, before in known.values())
        known = {"full": (before, before)} | known
    return (
        sum(layers[name] * read for name, (read, _) in known.items()),
        sum(layers[name] * before for name, (_, before) in known.items()),
    )


def _engine(start: EngineStart) -> Engine:
    return Engine(
        vllm=start.vllm,
        model=start.model,
        dtype=start.dtype,
        tokenizer_sha256=start.tokenizer.files.get("tokenizer.json"),
        max_model_len=start.max_model_len,
        block_size=start.block_size,
        attention=[
            f"{kind.layers} {kind.layer_type}" + (f" ({kind.window})" if kind.window else "")
            for kind in start.attention
        ],
        batch_invariant=start.batch_invariant,
    )
