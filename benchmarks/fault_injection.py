"""How often is a right stream called wrong, and how often is a fault missed? Over real tokenizers and sampled streams.

    python -m benchmarks.fault_injection [--tokenizers FOLDER] [--limit N]

FOLDER holds one folder a tokenizer, with its tokenizer.json; without it, the demo's alone is used. The demo's sequences
are really sampled with that tokenizer. Others get the same texts, split anew at random, so that most are not what the
tokenizer itself would make of the text. The server side is vLLM's own detokenizer; each fault is proven to change
something before it is counted. Prints Markdown tables; exits with 1 where a goal is missed.
"""

import argparse
import json
import math
import random
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer as Library

from deploy.demo.replay import Detokenizer, Sampling
from sampler_hook.recorder import EngineRecorder, Sampled
from sparseety.records import (
    AnyRecord,
    Chunk,
    EngineStart,
    LogOpen,
    RequestParameters,
    RequestStart,
    Scope,
    Stamps,
    StreamDone,
    TokenizerIdentity,
    Usage,
)
from verifier.findings import RequestVerdict, Severity, Verdict
from verifier.fragments import assort
from verifier.gather import Logs
from verifier.judge import judge
from verifier.pending import Pending
from verifier.tokenizer import Tokenizer, load_tokenizer
from verifier.witnesses import Witnesses

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Served:
    """One stream as client and engine saw it."""

    prompt: list[int]
    ids: list[int]
    chunks: list[str]
    chunk_ids: list[list[int]]
    finish: str | None
    stop_reason: int | str | None
    engine_finish: str
    usage: int
    skip_special: bool
    include_stop: bool
    stop: list[str]
    eos: int

    @property
    def text(self) -> str:
        return "".join(self.chunks)


# ------------------------------------------------------------------------------------------------------- the server


def serve(
    library: Library,
    prompt: list[int],
    ids: list[int],
    eos: int,
    rng: random.Random,
    *,
    per_chunk: int = 1,
    stop: list[str] | None = None,
    include_stop: bool = False,
    skip_special: bool = True,
    overrun: int = 0,
) -> Served:
    """Stream these ids as vLLM would. They end by `eos`, by the stop string, or by length."""
    sampling = Sampling(len(ids), eos, stop or [], [], include_stop, skip_special)
    detokenizer = Detokenizer(library, prompt, sampling)
    chunks: list[str] = []
    chunk_ids: list[list[int]] = [[]]
    stopped: str | None = None
    used = 0
    for number, token in enumerate(ids, 1):
        is_end = token == eos and number == len(ids)
        stopped = detokenizer.add(token, is_end=is_end)
        chunk_ids[-1].append(token)
        used = number
        last = number == len(ids) or stopped is not None
        if last or len(chunk_ids[-1]) >= (per_chunk if per_chunk == 1 else rng.randint(1, per_chunk)):
            chunks.append(detokenizer.delta(finished=last))
            chunk_ids.append([])
        if last:
            break
    ended = used == len(ids) and ids[-1] == eos and not stopped
    engine_ids = ids[: used + overrun] if stopped else ids[:used]
    return Served(
        prompt,
        engine_ids,
        chunks,
        chunk_ids[: len(chunks)],
        "stop" if stopped or ended else "length",
        stopped,
        "abort" if stopped else "stop" if ended else "length",
        used,
        skip_special,
        include_stop,
        stop or [],
        eos,
    )


def verdict(tokenizer: Tokenizer, served: Served, *, api_ids: bool) -> RequestVerdict:
    """What the verifier says of it, by the records that proxy and plugin would have written."""
    logs = Logs(Pending(Witnesses(lambda: logs.engine_logs, lambda: math.inf)))
    scope = Scope()
    opening = LogOpen(ts=1.0, format=1, source="proxy", host="h", pid=1, start=1.0, program="b", scope=scope)
    parameters = RequestParameters(
        stream=True,
        stop=served.stop,
        include_stop_str_in_output=served.include_stop,
        skip_special_tokens=served.skip_special,
    )
    start = RequestStart(
        ts=2.0, capture=1, uuid="u", method="POST", path="/v1/chat/completions", endpoint="chat", parameters=parameters
    )
    records: list[AnyRecord] = [opening, start]
    index = length = 0
    for wire, (text, ids) in enumerate(zip(served.chunks, served.chunk_ids, strict=True), 1):
        index += bool(text)
        length += len(text)
        records.append(
            Chunk(
                ts=3.0,
                capture=1,
                wire_index=wire,
                chunk_index=index if text else None,
                delta_text=text,
                accumulated_len=length if text else None,
                token_ids=ids if api_ids else None,
                response_id="chatcmpl-1",
            )
        )
    if served.finish:
        records.append(
            Chunk(
                ts=3.0,
                capture=1,
                wire_index=len(served.chunks) + 1,
                kind="finish",
                finish_reason=served.finish,
                stop_reason=served.stop_reason,
                response_id="chatcmpl-1",
            )
        )
    records.append(
        StreamDone(
            ts=4.0,
            capture=1,
            outcome="complete",
            status=200,
            chunk_count=index,
            total_text_len=length,
            events=len(records) - 2,
            reads=1,
            bytes=1,
            sha256="",
            end_marker=served.finish is not None,
            stamps=Stamps(),
            usage=Usage(completion_tokens=served.usage),
        )
    )
    logs.file(Path("proxy")).take(assort(Path("proxy"), enumerate(records, 1), []))
    engine: list[AnyRecord] = [replace_source(opening)]
    identity = TokenizerIdentity(name="", vocab_size=max(tokenizer.table or {0: b""}) + 1)
    engine.append(EngineStart(ts=1.0, vllm="0.32.0", model="m", tokenizer=identity))
    recorder = EngineRecorder(engine.append, lambda: 2.5)
    recorder.added(
        "e",
        external_id="chatcmpl-1",
        prompt_len=len(served.prompt),
        prompt_tail=served.prompt,
        eos_ids=[served.eos],
        stop=served.stop,
        include_stop_str_in_output=served.include_stop,
        skip_special_tokens=served.skip_special,
    )
    recorder.step([Sampled("e", served.ids)])
    recorder.finished("e", finish_reason=served.engine_finish)
    logs.file(Path("engine")).take(assort(Path("engine"), enumerate(engine, 1), []))
    [case] = logs.pending.rest()
    return judge(*case.unpack(), logs.engine_logs, lambda _: tokenizer)


def replace_source(opening: LogOpen) -> LogOpen:
    return LogOpen(**{**{f: getattr(opening, f) for f in opening.__struct_fields__}, "source": "engine"})


# ---------------------------------------------------------------------------------------------------------- inputs


@dataclass
class Subject:
    """A tokenizer, and sequences of its ids with their prompts."""

    name: str
    tokenizer: Tokenizer
    library: Library
    eos: int
    sequences: list[tuple[list[int], list[int]]]


def subjects(folder: Path | None, limit: int) -> list[Subject]:
    streams = [json.loads(line) for line in (ROOT / "deploy/demo/streams.jsonl").read_text().splitlines()]
    if folder and (more := folder / "smollm2-streams/temp1-fp32.jsonl").exists():
        streams = [json.loads(line) for line in more.read_text().splitlines()]
    streams = streams[:limit]
    own = load_tokenizer(ROOT / "deploy/demo/tokenizer")
    texts = [(s["prompt"], own.text(s["ids"])) for s in streams]
    library = Library.from_file(str(own.path))
    found = [Subject("smollm2", own, library, 2, [(s["prompt_ids"], s["ids"]) for s in streams])]
    for path in sorted(folder.iterdir()) if folder else []:
        if path.name != "smollm2" and (path / "tokenizer.json").exists():
            found.append(_resplit(path, texts))
    return found


def _resplit(path: Path, texts: list[tuple[str, str]]) -> Subject:
    """The same texts in another tokenizer's ids, 3 % of them not as it would split them itself."""
    rng = random.Random(path.name)
    tokenizer = load_tokenizer(path)
    library = Library.from_file(str(tokenizer.path))
    assert tokenizer.table is not None
    by_bytes: dict[bytes, int] = {}
    for token_id, data in tokenizer.table.items():
        if token_id not in tokenizer.added:
            by_bytes.setdefault(data, token_id)
    eos = max(tokenizer.special) if tokenizer.special else max(tokenizer.table)

    def split(token_id: int) -> list[int]:
        data = tokenizer.table[token_id] if tokenizer.table else b""
        if token_id in tokenizer.added or len(data) < 2 or rng.random() > 0.03:
            return [token_id]
        cut = rng.randrange(1, len(data))
        halves = [by_bytes.get(data[:cut]), by_bytes.get(data[cut:])]
        return [half for half in halves if half is not None] if None not in halves else [token_id]

    sequences = []
    for prompt, text in texts:
        ids = [part for token_id in tokenizer.encode(text) for part in split(token_id)]
        if ids:
            sequences.append((tokenizer.encode(prompt) or [ids[0]], [*ids, eos]))
    return Subject(path.name, tokenizer, library, eos, sequences)


def benign(subject: Subject, rng: random.Random) -> list[tuple[str, Served]]:
    """Ten right ways to stream each sequence."""
    found: list[tuple[str, Served]] = []
    library, eos, table = subject.library, subject.eos, subject.tokenizer.table or {}
    special = sorted(subject.tokenizer.special - {eos}) or [eos]
    broken = [token for token, data in table.items() if len(data) == 1 and data[0] >= 0x80] or special
    for prompt, ids in subject.sequences:
        plain = serve(library, prompt, ids, eos, rng)
        found.append(("one token a chunk", plain))
        found.append(("1-6 tokens a chunk", serve(library, prompt, ids, eos, rng, per_chunk=6)))
        cut = [i for i in range(1, len(ids)) if table.get(ids[i - 1], b"").endswith(b"\xf0\x9f") or i % 7 == 0]
        found.append(("cut by length", serve(library, prompt, ids[: rng.choice(cut or [len(ids)])], eos, rng)))
        found.append(("no prompt", serve(library, [], ids, eos, rng)))
        text = plain.text
        if len(text) > 12:
            at = rng.randrange(4, len(text) - 4)
            stop = [text[at : at + rng.randint(1, 4)]]
            if "\ufffd" not in stop[0]:
                over = rng.randint(0, 4)
                found.append(("stop excluded", serve(library, prompt, ids, eos, rng, stop=stop, overrun=over)))
                kept = serve(library, prompt, ids, eos, rng, stop=stop, overrun=over, include_stop=True)
                found.append(("stop included", kept))
        middle = rng.randrange(len(ids))
        inside = [*ids[:middle], *rng.choices(special, k=rng.randint(1, 3)), *ids[middle:]]
        found.append(("specials skipped", serve(library, prompt, inside, eos, rng)))
        found.append(("specials shown", serve(library, prompt, inside, eos, rng, skip_special=False)))
        stray = [*ids[:middle], *rng.choices(broken, k=rng.randint(1, 2)), *ids[middle:]]
        found.append(("stray bytes", serve(library, prompt, stray, eos, rng, per_chunk=3)))
    return found


# ---------------------------------------------------------------------------------------------------------- faults

Fault = Callable[[Served, random.Random, Subject], Served]


def _chunks(change: Callable[[list[str], int, random.Random], list[str]]) -> Fault:
    """A fault of the chunks: at a random one that has text. Ids in the stream go with their chunk where possible."""

    def fault(served: Served, rng: random.Random, subject: Subject) -> Served:
        texts = [text for text in served.chunks if text]
        if not texts:
            return served
        changed = change(list(texts), rng.randrange(len(texts)), rng)
        return replace(served, chunks=changed, chunk_ids=[[] for _ in changed])

    return fault


def _character(change: Callable[[str], str]) -> Fault:
    def fault(chunks: list[str], at: int, rng: random.Random) -> list[str]:
        place = rng.randrange(len(chunks[at]))
        text = chunks[at]
        return [*chunks[:at], text[:place] + change(text[place]) + text[place + 1 :], *chunks[at + 1 :]]

    return _chunks(fault)


def _whole(change: Callable[[str], str]) -> Fault:
    return _chunks(lambda chunks, at, rng: [*chunks[:at], change(chunks[at]), *chunks[at + 1 :]])


def _swap_far(chunks: list[str], at: int, rng: random.Random) -> list[str]:
    other = rng.randrange(len(chunks))
    chunks[at], chunks[other] = chunks[other], chunks[at]
    return chunks


TEXT_FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "chunk dropped": (_chunks(lambda c, at, r: c[:at] + c[at + 1 :]), {"MISSING_TEXT"}),
    "first chunk dropped": (_chunks(lambda c, at, r: c[1:]), {"MISSING_TEXT"}),
    "last chunk dropped": (_chunks(lambda c, at, r: c[:-1]), {"MISSING_TEXT"}),
    "chunk duplicated": (_chunks(lambda c, at, r: c[: at + 1] + c[at:]), {"DUPLICATED_TEXT", "EXTRA_TEXT"}),
    "all text sent again": (_chunks(lambda c, at, r: [*c, "".join(c)]), {"DUPLICATED_TEXT"}),
    "neighbours swapped": (
        _chunks(lambda c, at, r: [*c[:at], *c[at : at + 2][::-1], *c[at + 2 :]]),
        {"REORDERED", "MISSING_TEXT", "EXTRA_TEXT"},
    ),
    "distant chunks swapped": (_chunks(_swap_far), {"REORDERED"}),
    "character altered": (_character(lambda c: chr(ord(c) ^ 1) if ord(c) > 32 else "x"), {"ALTERED_TEXT"}),
    "case changed": (_whole(str.swapcase), {"ALTERED_TEXT"}),
    "decomposed (NFD)": (_whole(lambda t: unicodedata.normalize("NFD", t)), {"ALTERED_TEXT", "EXTRA_TEXT"}),
    "line end escaped": (_whole(lambda t: t.replace("\n", "\\n")), {"ALTERED_TEXT"}),
    "line end as CRLF": (_whole(lambda t: t.replace("\n", "\r\n")), {"EXTRA_TEXT"}),
    "character to U+FFFD": (_character(lambda c: "\ufffd"), {"ALTERED_TEXT"}),
    "whitespace collapsed": (_whole(lambda t: " ".join(t.split(" "))), {"MISSING_TEXT"}),
    "chunk stripped": (_whole(str.strip), {"MISSING_TEXT"}),
    "foreign chunk": (_chunks(lambda c, at, r: [*c[:at], " Zebra§", *c[at:]]), {"EXTRA_TEXT"}),
}


def _prompt_leak(served: Served, rng: random.Random, subject: Subject) -> Served:
    leak = subject.tokenizer.text(served.prompt[-8:])
    return replace(served, chunks=[leak, *served.chunks], chunk_ids=[[], *served.chunk_ids])


def _truncated(served: Served, rng: random.Random, subject: Subject) -> Served:
    keep = rng.randrange(len(served.chunks))
    return replace(served, chunks=served.chunks[:keep], chunk_ids=served.chunk_ids[:keep], finish=None)


TEXT_FAULTS["prompt leaked"] = (_prompt_leak, {"PROMPT_LEAK", "EXTRA_TEXT"})
TEXT_FAULTS["stream truncated"] = (_truncated, {"UNFINISHED"})


def _ids(change: Callable[[list[int], int, random.Random, Subject], list[int]]) -> Fault:
    """A fault of the engine's ids, within those whose text was delivered."""

    def fault(served: Served, rng: random.Random, subject: Subject) -> Served:
        known = served.usage
        if known < 2:
            return served
        body, rest = served.ids[:known], served.ids[known:]
        return replace(served, ids=change(list(body), rng.randrange(known - 1), rng, subject) + rest)

    return fault


def _two_for_one(ids: list[int], at: int, rng: random.Random, subject: Subject) -> list[int]:
    table = subject.tokenizer.table or {}
    single = {data: token for token, data in table.items() if len(data) == 1 and token not in subject.tokenizer.added}
    data = table.get(ids[at], b"")
    if len(data) < 2 or any(data[i : i + 1] not in single for i in range(len(data))):
        return ids
    return [*ids[:at], *(single[data[i : i + 1]] for i in range(len(data))), *ids[at + 1 :]]


ID_FAULTS: dict[str, Fault] = {
    "id changed": _ids(lambda ids, at, r, s: [*ids[:at], (ids[at] + 7) % 200 + 300, *ids[at + 1 :]]),
    "id dropped": _ids(lambda ids, at, r, s: ids[:at] + ids[at + 1 :]),
    "id doubled": _ids(lambda ids, at, r, s: ids[: at + 1] + ids[at:]),
    "ids swapped": _ids(lambda ids, at, r, s: [*ids[:at], *ids[at : at + 2][::-1], *ids[at + 2 :]]),
    "all ids shifted": _ids(lambda ids, at, r, s: [token + 1 for token in ids]),
    "one id as several": _ids(_two_for_one),
    "special inserted": _ids(lambda ids, at, r, s: [*ids[:at], max(s.tokenizer.special), *ids[at:]]),
    "usage one short": lambda served, rng, subject: replace(served, usage=served.usage - 1),
    "usage one over": lambda served, rng, subject: replace(served, usage=served.usage + 1),
}


# ---------------------------------------------------------------------------------------------------------- the run


def faults_in(result: RequestVerdict) -> set[str]:
    return {finding.code for finding in result.findings if finding.severity is Severity.FAULT}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizers", type=Path, help="folder of folders with a tokenizer.json each")
    parser.add_argument("--limit", type=int, default=1000, help="sequences of each tokenizer")
    options = parser.parse_args()
    rng = random.Random(20261129)
    alarms: dict[str, Counter[str]] = defaultdict(Counter)
    trials: Counter[str] = Counter()
    found: Counter[str] = Counter()
    named: Counter[str] = Counter()
    print("| tokenizer | right streams | false alarms, no ids in the stream | with ids |\n|---|---|---|---|")
    for subject in subjects(options.tokenizers, options.limit):
        streams = benign(subject, rng)
        for api_ids in (False, True):
            wrong = [
                kind for kind, s in streams if verdict(subject.tokenizer, s, api_ids=api_ids).verdict != Verdict.PASS
            ]
            alarms[subject.name][str(api_ids)] = len(wrong)
            if wrong:
                print(f"<!-- {subject.name}: {Counter(wrong)} -->")
        print(f"| {subject.name} | {len(streams)} | {alarms[subject.name]['False']} | {alarms[subject.name]['True']} |")
        for kind, (fault, expected) in TEXT_FAULTS.items():
            for _, right in streams:
                changed = fault(right, rng, subject)
                if changed.text == right.text and changed.finish == right.finish:
                    continue  # it changes nothing
                trials[kind] += 1
                codes = faults_in(verdict(subject.tokenizer, changed, api_ids=False))
                found[kind] += bool(codes)
                named[kind] += bool(codes & expected)
        for kind, id_fault in ID_FAULTS.items():
            for _, right in streams:
                changed = id_fault(right, rng, subject)
                if (changed.ids, changed.usage) == (right.ids, right.usage):
                    continue
                trials[kind] += 1
                found[kind] += bool(faults_in(verdict(subject.tokenizer, changed, api_ids=False)))
    print("\n| fault | trials | missed | usual class |\n|---|---|---|---|")
    for kind, count in trials.items():
        share = f"{named[kind] / count:.1%}" if kind in TEXT_FAULTS else "–"
        print(f"| {kind} | {count} | {count - found[kind]} | {share} |")
    text = [kind for kind in trials if kind in TEXT_FAULTS]
    text_trials, text_found = sum(trials[kind] for kind in text), sum(found[kind] for kind in text)
    right_class = sum(named[kind] for kind in text) / text_trials
    false_alarms = sum(count["False"] for count in alarms.values()), sum(count["True"] for count in alarms.values())
    print(
        f"\ntext faults found {text_found} of {text_trials} ({text_found / text_trials:.3%}), "
        f"usual class {right_class:.1%}; "
        f"false alarms {false_alarms[0]} without and {false_alarms[1]} with ids in the stream"
    )
    return 0 if text_found / text_trials >= 0.999 and right_class >= 0.97 and false_alarms[1] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
