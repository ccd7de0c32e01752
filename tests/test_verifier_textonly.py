"""Without an engine's log: what the stream alone gives away, and that nothing found is no pass."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseety.records import AnyRecord, Chunk, LogOpen, RequestStart, Scope, Usage
from tests.logbook import BYTE_LEVEL, EOS, Logbook
from tests.test_proxy_capture_samples import STREAMS, capture, each_stream
from tests.test_verifier_run import HELLO, HELLO2, WORLD, Result, verify
from verifier.fragments import Section, assort
from verifier.logs import Log
from verifier.packed import OpenCapture
from verifier.requests import Capture
from verifier.textonly import COUNTS, IDS, RUNNING, SHORTEST, STOPS, StreamAlone, fewest_tokens
from verifier.tokenizer import load_tokenizer

__all__ = ["verify"]  # a fixture

SMOLLM2 = load_tokenizer(Path(__file__).parent.parent / "deploy/demo/tokenizer")  # what the samples were served with
TOY = load_tokenizer(BYTE_LEVEL)
TEXT = ["hello", " world", " hello"]
IDS_OF_TEXT = [[HELLO], [WORLD], [HELLO2, EOS]]


# ---------------------------------------------------------------------------------------------- streams of a real vLLM


def gathered(records: list[AnyRecord]) -> Capture:
    opening = LogOpen(
        ts=0.5, format=1, source="proxy", host="h", pid=1, start=0.5, program="test", scope=Scope(endpoints=["chat"])
    )
    path = Path("proxy.jsonl")
    log = Log(path, (opening.source, opening.host, opening.pid, opening.start), opening)
    log.begin_file(path, 0, 0)
    [section] = assort(path, enumerate(records, 2), []).parts
    assert isinstance(section, Section)
    [part] = section.captures
    return OpenCapture(log, part.number, part.line, parts=[(0, part.packed)]).unpack()


def alone(records: list[AnyRecord]) -> StreamAlone:
    return StreamAlone(gathered(records), SMOLLM2).judge()


@each_stream
def test_a_right_stream_of_a_real_server_has_no_fault_by_itself(sample):
    assert alone(capture(sample, sample.reads())).findings == []


def test_each_rule_is_tried_on_some_stream_of_a_real_server():
    tried = {rule for sample in STREAMS for rule in alone(capture(sample, sample.reads())).rules}
    assert {RUNNING, SHORTEST, STOPS} <= tried, "those with ids state no usage: see below"


def numbered(records: list[AnyRecord]) -> list[AnyRecord]:
    """Chunk numbers as a proxy gives them to such a stream."""
    found: list[AnyRecord] = []
    for record in records:
        if isinstance(record, Chunk):
            record = msgspec.structs.replace(record, wire_index=1 + sum(isinstance(each, Chunk) for each in found))
        found.append(record)
    return found


WITH_IDS = [sample for sample in STREAMS if sample.name.startswith("chat-return-token-ids")]


def with_usage(records: list[AnyRecord], tokens: int) -> StreamAlone:
    """Judged with a usage, which the client of these samples did not ask for."""
    found = gathered(numbered(records))
    assert found.done is not None
    found.done = msgspec.structs.replace(found.done, usage=Usage(completion_tokens=tokens))
    return StreamAlone(found, SMOLLM2).judge()


@pytest.mark.parametrize("sample", WITH_IDS, ids=lambda sample: sample.name)
@pytest.mark.parametrize("fault", ["none", "doubled", "dropped", "altered"])
def test_in_a_real_stream_with_ids_each_single_fault_is_found(sample, fault):
    records = capture(sample, sample.reads())
    texts = [n for n, record in enumerate(records) if isinstance(record, Chunk) and record.delta_text.strip()]
    usage = sum(len(record.token_ids or []) for record in records if isinstance(record, Chunk))
    assert len(texts) > 4
    for index in texts:
        changed = [*records]
        chunk = records[index]
        assert isinstance(chunk, Chunk)
        if fault == "doubled":
            changed.insert(index, chunk)
        elif fault == "dropped":
            del changed[index]
        elif fault == "altered":
            text = chunk.delta_text[:-1] + ("x" if chunk.delta_text[-1] != "x" else "y")
            changed[index] = msgspec.structs.replace(chunk, delta_text=text)
        found = with_usage(changed, usage)
        codes = {finding.code for finding in found.findings}
        assert found.rules[0] == COUNTS
        assert codes & {"COUNT_MISMATCH", "ALTERED_TEXT"} if fault != "none" else codes == set(), index


# -------------------------------------------------------------------------------------------------- each rule's edges


@pytest.fixture
def judged(tmp_path, verify):
    """(verdict, fault codes, rules) of one stream without an engine's log."""

    def run(pieces: Any, *arguments: str, tokenizer: bool = True, **keys: Any) -> tuple[str, set[str], list[str]]:
        book = Logbook()
        book.stream("chatcmpl-1", pieces, **keys)
        folder = book.write(tmp_path)
        next(folder.glob("engine-*")).unlink()
        given = ["--tokenizer", str(BYTE_LEVEL)] if tokenizer else []
        result: Result = verify(folder, "--json", *given, *arguments)
        request = result.json()[0]
        faults = {finding["code"] for finding in request["findings"] if finding["severity"] == "fault"}
        assert {f["code"] for f in request["findings"] if f["severity"] == "unknown"} == {"UNVERIFIABLE"}
        assert result.exit_code == (1 if faults else 3), "nothing found is no pass"
        return request["verdict"], faults, request["rules"]

    return run


def test_the_verdict_says_which_rules_ran_and_stays_incomplete(tmp_path, verify):
    book = Logbook()
    book.stream("chatcmpl-1", TEXT, usage=4, token_ids=IDS_OF_TEXT)
    folder = book.write(tmp_path)
    next(folder.glob("engine-*")).unlink()
    result = verify(folder, "--tokenizer", BYTE_LEVEL)
    assert result.exit_code == 3
    assert (
        "UNVERIFIABLE: there is no engine log; the rules for the stream alone "
        "(counts in the stream, ids in the stream, shortest spelling) found nothing wrong" in result.out
    )
    assert "no rule for the stream alone" not in result.out
    assert "(counts in the stream)" in verify(folder).out, "without a tokenizer, the counts can still be compared"


@pytest.mark.parametrize(
    ("keys", "faults"),
    [
        ({"usage": 4, "token_ids": IDS_OF_TEXT}, set()),
        ({"usage": 5, "token_ids": IDS_OF_TEXT}, {"COUNT_MISMATCH"}),
        ({"usage": 3, "logprobs": [1, 1, 1], "finish": "length"}, set()),
        ({"usage": 4, "logprobs": [1, 1, 1]}, {"COUNT_MISMATCH"}),
        ({"logprobs": [1, 1, 1]}, set()),  # no usage to compare with
        ({"usage": 9, "token_ids": IDS_OF_TEXT, "tools": True}, set()),  # a parser may have left ids out
        ({"usage": 9, "token_ids": IDS_OF_TEXT, "outcome": "client_gone", "finish": None}, set()),
    ],
)
def test_ids_or_log_probabilities_in_the_stream_are_as_many_as_the_usage_says(judged, keys, faults):
    assert judged(TEXT, **keys)[1] == faults


def test_of_a_reply_of_ids_alone_the_counts_are_compared(judged):
    assert judged([None], usage=2, token_ids=[[HELLO, EOS]], detokenize=False)[1] == set()
    verdict, faults, rules = judged([None], usage=3, token_ids=[[HELLO, EOS]], detokenize=False)
    assert (verdict, faults, rules) == ("fail", {"COUNT_MISMATCH"}, [COUNTS])


@pytest.mark.parametrize(
    ("pieces", "ids", "faults"),
    [
        (TEXT, IDS_OF_TEXT, set()),
        (["hello", " jorld", " hello"], IDS_OF_TEXT, {"ALTERED_TEXT"}),
        (["hello", " world", ""], IDS_OF_TEXT, {"MISSING_TEXT"}),
        (TEXT, [[HELLO], [WORLD], [HELLO2, 271]], set()),  # a special token has no text
        (["a", "b", "c"], [[97], [98], [0xC3, 99]], set()),  # broken characters: the prompt may have to do with it
        (["a", "b", "c"], [[97], [98], [274, 99]], set()),  # </think>: a parser may have been at work
    ],
)
def test_ids_in_the_stream_give_its_text(judged, pieces, ids, faults):
    _, found, rules = judged(pieces, usage=4, token_ids=ids)
    assert found == faults
    assert IDS in rules
    assert judged(pieces, usage=4, token_ids=ids, tokenizer=False)[1] == set(), "no tokenizer, no such rule"


@pytest.mark.parametrize(
    ("pieces", "counts", "faults"),
    [
        (TEXT, [1, 2, 3], set()),
        (TEXT, [1, 2, 4], set()),
        (["hello", " world", " world"], [1, 2, 2], {"DUPLICATED_TEXT"}),
        (["hello", " world", " there"], [1, 2, 2], {"EXTRA_TEXT"}),
        (["hello", " hello", " world"], [1, 3, 2], {"REORDERED"}),
        (["hello", " world hello", "x"], [1, 2, 3], {"EXTRA_TEXT"}),  # two tokens at least cannot spell that much
        (["hello", " world hel", "x"], [1, 3, 6], set()),
    ],
)
def test_usage_in_every_event_grows_and_suffices_for_the_text_so_far(judged, pieces, counts, faults):
    _, found, rules = judged(pieces, counts=counts)
    assert found == faults
    assert RUNNING in rules


@pytest.mark.parametrize(
    ("pieces", "keys", "faults"),
    [
        (TEXT, {"usage": 3, "finish": "length"}, set()),
        (TEXT, {"usage": 2, "finish": "length"}, {"EXTRA_TEXT"}),
        (TEXT, {"usage": 4}, set()),
        (TEXT, {"usage": 3}, {"EXTRA_TEXT"}),  # one of them is the end token
        (TEXT, {"usage": 3, "stop": ["!"]}, set()),  # or a stop string ended it
        (["hello wor"], {"usage": 2, "finish": "length"}, set()),  # " world", cut
        (["h\ufffd" * 40], {"usage": 2, "finish": "length"}, set()),  # broken characters cannot be spelled
        ({0: TEXT, 1: TEXT}, {"usage": 6, "finish": "length", "n": 2}, set()),
        ({0: TEXT, 1: TEXT}, {"usage": 5, "finish": "length", "n": 2}, {"EXTRA_TEXT"}),
        ([("reasoning", "hello hello hello hello")], {"usage": 1, "finish": "length"}, set()),
        (TEXT, {"usage": 2, "finish": "length", "echo": True}, set()),
    ],
)
def test_no_text_is_longer_than_its_tokens_can_spell(judged, pieces, keys, faults):
    assert judged(pieces, **keys)[1] == faults


@pytest.mark.parametrize(
    ("keys", "faults"),
    [
        ({"stop": ["o w"]}, {"STOP_MISSED"}),
        ({"stop": ["o W"]}, set()),
        ({"stop": ["o w"], "min_tokens": 2}, set()),
        ({"stop": ["o w", "never"], "stop_reason": "never"}, set()),
    ],
)
def test_text_that_goes_on_past_a_stop_string_shows_without_an_engine_too(judged, keys, faults):
    assert judged(TEXT, tokenizer=False, **keys)[1] == faults


def test_a_stream_that_ends_cleanly_without_its_end_is_a_fault_without_an_engine_too(judged):
    assert judged(TEXT, finish=None, end_marker=False)[1] == {"UNFINISHED"}


def test_of_several_tokenizers_the_one_of_the_model_is_taken(judged):
    named = ["--model-map", f"toy={BYTE_LEVEL}", "--model-map", f"other={SMOLLM2.path}"]
    assert SHORTEST in judged(TEXT, *named, usage=3, finish="length", tokenizer=False)[2]
    assert SHORTEST not in judged(TEXT, *named, usage=3, finish="length", model="third", tokenizer=False)[2]


# --------------------------------------------------------------------------------------------------- shortest spelling


@pytest.mark.parametrize("text", ["", "a", "hello world", "hello worl", "😀", "  x", "xyz hello"])
def test_the_shortest_spelling_is_never_longer_than_the_tokenizers_own(text):
    fewest = fewest_tokens(TOY, text)
    assert fewest[-1] <= len(TOY.encode(text))
    assert fewest == sorted(fewest) or len(text) < 3
    assert fewest_tokens(SMOLLM2, text)[-1] <= len(SMOLLM2.encode(text))


def test_the_shortest_spelling_of_known_texts():
    assert fewest_tokens(TOY, "hello world")[-1] == 2
    assert fewest_tokens(TOY, "hello wor")[-1] == 2, "the last token may be cut"
    assert fewest_tokens(TOY, "hello\ufffd") == []
    start = RequestStart(ts=1.0, capture=1, uuid="u", method="POST", path="/v1/chat/completions", endpoint="chat")
    assert StreamAlone(gathered([start])).judge().rules == []
