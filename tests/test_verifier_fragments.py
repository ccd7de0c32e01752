"""A request put together from packed runs of chunks is the one put together chunk by chunk."""

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sparseety.records import Chunk, Usage
from verifier.fragments import Section, assort
from verifier.logs import Log
from verifier.packed import OpenCapture
from verifier.requests import Capture, add_chunk

LOG = Log(Path("proxy.jsonl"), ("proxy", "h", 1, 0.0))

EVENT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["text", "text", "text", "reasoning", "role", "finish", "tool_call", "error"]),
        "choice": st.sampled_from([0, 0, 0, 1]),
        "text": st.sampled_from(["", "", "a", "bc"]),
        "ids": st.none() | st.lists(st.integers(0, 9), max_size=2),
        "logprobs": st.none() | st.integers(0, 2),
        "said": st.none() | st.integers(0, 9),
        "finish": st.sampled_from([None, None, None, "stop"]),
        "skips": st.sampled_from([0] * 9 + [1]),  # events, code points and chunks that are missing before it
    }
)


def stream(events: list[dict]) -> list[Chunk]:
    counts: dict[int, tuple[int, int]] = {}
    wire, chunks = 0, []
    for event in events:
        wire += 1 + event["skips"]
        index, length = counts.get(event["choice"], (0, 0))
        bears_text = bool(event["text"])
        if bears_text:
            index, length = index + 1 + event["skips"], length + len(event["text"])
            counts[event["choice"]] = index, length
        chunks.append(
            Chunk(
                ts=float(wire),
                capture=1,
                wire_index=wire,
                kind=event["kind"],
                choice=event["choice"],
                chunk_index=index if bears_text else None,
                accumulated_len=length if bears_text else None,
                delta_text=event["text"],
                token_ids=event["ids"],
                logprob_count=event["logprobs"],
                usage=None if event["said"] is None else Usage(completion_tokens=event["said"]),
                finish_reason=event["finish"],
            )
        )
    return chunks


@given(st.lists(EVENT, min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_packed_runs_make_the_same_request_as_single_chunks_wherever_blocks_end(events, cuts):
    lines = list(enumerate(stream(events), 1))
    plain = Capture(LOG, 1, 1)
    for line, chunk in lines:
        add_chunk(plain, line, chunk)
    packed = OpenCapture(LOG, 1, 1)
    ends = [0, *sorted(cut for cut in cuts if cut < len(lines)), len(lines)]
    for begin, end in itertools.pairwise(ends):
        for part in assort(Path("proxy.jsonl"), lines[begin:end], []).parts:
            assert isinstance(part, Section)
            packed.parts += [(0, capture.packed) for capture in part.captures]
    assert packed.unpack() == plain
