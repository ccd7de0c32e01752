"""The text axis: which text rightly comes from which ids, by rule, on two families of tokenizers."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers.decoders import DecodeStream

from deploy.demo.replay import Detokenizer, Sampling
from tests.logbook import BYTE_LEVEL, EOS, SENTENCEPIECE
from verifier.classify import classify
from verifier.compare import Comparison, Ending, compare
from verifier.expect import TextRules
from verifier.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "deploy/demo/tokenizer"
STREAMS = ROOT / "deploy/demo/streams.jsonl"
SHARED = ROOT.parent / "shared/tokenizers"  # five real tokenizers, where the checkout has them beside it

TOY = load_tokenizer(BYTE_LEVEL)
SPM = load_tokenizer(SENTENCEPIECE)
PROMPT = TextRules(prompt_len=1, prompt_tail=[104])  # "h"
HELLO, WORLD, HELLO2 = 259, 264, 265


def judged(ids: list[int], came: str, *, tokenizer: Tokenizer = TOY, rules: TextRules = PROMPT, **ending: object):
    return compare(tokenizer, ids, rules, came, Ending(**ending))  # type: ignore[arg-type]


def test_text_that_is_the_bytes_of_the_ids_is_exact():
    assert judged([HELLO, WORLD], "hello world").codes == ["EXACT"]


def test_the_end_token_has_no_text_even_where_specials_are_shown():
    shown = TextRules(skip_special_tokens=False, prompt_len=1, prompt_tail=[104])
    assert judged([HELLO, EOS], "hello", rules=shown, by_token=True).codes == ["EXACT"]
    assert judged([HELLO, EOS], "hello<|eos|>", rules=shown).codes == ["EXACT"]


def test_a_special_token_that_leaked_though_skipping_was_on_is_extra_text():
    difference = judged([HELLO, EOS], "hello<|eos|>", by_token=True).difference
    assert difference is not None
    assert (difference.code, difference.came) == ("EXTRA_TEXT", "<|eos|>")


def test_specials_in_the_middle_are_left_out_and_that_is_said():
    assert judged([HELLO, EOS, WORLD], "hello world").codes == ["EXACT", "SPECIAL_SKIPPED"]


def test_a_character_cut_by_the_length_limit_is_held_back_with_all_since_the_last_clean_boundary():
    # " caf" and the first byte of "é" in one token would be lost whole; here each byte is a token of its own.
    assert judged([HELLO, 0xC3], "hello").codes == ["INCOMPLETE_UTF8_TAIL"]
    assert judged([HELLO, 0xF0, 0x9F, 0x98], "hello").codes == ["INCOMPLETE_UTF8_TAIL"]
    assert judged([HELLO, 0xC3, 0xA9], "helloé").codes == ["EXACT"]


def test_held_back_text_is_missing_text_where_whole_characters_are_missing_too():
    difference = judged([HELLO, WORLD, 0xC3], "hello").difference
    assert difference is not None
    assert (difference.code, difference.due) == ("MISSING_TEXT", " world")


@pytest.mark.parametrize(
    ("included", "came"), [(False, "hello w"), (True, "hello wor")], ids=["excluded from the text", "included in it"]
)
def test_a_stop_string_cuts_the_text_inside_a_token(included, came):
    rules = TextRules(include_stop_str_in_output=included, prompt_len=1, prompt_tail=[104])
    result = judged([HELLO, WORLD, HELLO2, HELLO2], came, rules=rules, stop="or")
    assert result.codes == ["TRIMMED_STOP"]
    assert result.kept == 2, "the ids after the one completing the stop string are overrun"


def test_a_stop_string_beside_a_held_back_character_counts_the_id_that_emits_it():
    # "!" is sampled in the same character run as the broken bytes before it: emitted only with the id after.
    result = judged([HELLO, 0xF0, 0x9F, 0x98, 0x80, ord("!")], "hello😀", stop="!")
    assert (result.codes, result.kept) == (["TRIMMED_STOP"], 6)


def test_a_stop_string_before_min_tokens_does_not_count():
    result = judged([HELLO, WORLD, HELLO2, WORLD], "hello world hello", stop=" world", min_tokens=2)
    assert (result.codes, result.kept) == (["TRIMMED_STOP"], 4)


def test_a_named_stop_string_that_is_not_in_the_ids_is_reported():
    result = judged([HELLO, WORLD], "hello world", stop="STOP")
    assert result.stop_missing
    assert not result.codes


def test_text_beyond_the_stop_string_is_extra():
    difference = judged([HELLO, 83, 84, WORLD], "hello world", stop="ST").difference
    assert difference is not None
    assert (difference.code, difference.offset) == ("EXTRA_TEXT", 5)


def test_any_beginning_will_do_where_the_stream_was_broken_off_and_nothing_else():
    assert judged([HELLO, WORLD], "hello wo", broken_off=True).codes == ["ABORTED_PREFIX"]
    assert judged([HELLO, WORLD], "", broken_off=True).codes == ["ABORTED_PREFIX"]
    assert judged([HELLO, WORLD], "hello Wo", broken_off=True).difference is not None


def test_text_past_the_end_of_the_engines_log_is_undecided_not_wrong():
    result = judged([HELLO], "hello world", engine_open=True)
    assert result.difference is None
    assert result.undecided
    assert judged([HELLO], "jello", engine_open=True).difference is not None


def test_sentencepiece_drops_a_leading_space_only_behind_a_prompt_without_text():
    ids = SPM.encode("what is dropout")
    nothing = TextRules(prompt_len=1, prompt_tail=[1])
    result = judged(ids, "what is dropout", tokenizer=SPM, rules=nothing)
    assert result.codes == ["EXACT", "LEADING_SPACE"]
    some = TextRules(prompt_len=4, prompt_tail=SPM.encode("what"))
    assert judged(ids, " what is dropout", tokenizer=SPM, rules=some).codes == ["EXACT"]
    assert judged(ids, "what is dropout", tokenizer=SPM, rules=some).difference is not None


def test_a_leading_space_is_undecided_where_too_little_of_the_prompt_is_known():
    ids = SPM.encode("what is dropout")
    unknown = TextRules(prompt_len=40, prompt_tail=[1] * 16)
    assert judged(ids, "what is dropout", tokenizer=SPM, rules=unknown).undecided
    assert judged(ids, " what is dropout", tokenizer=SPM, rules=unknown).codes == ["EXACT"]


def test_spaces_lost_by_decoding_token_by_token_are_found_at_the_token():
    ids = SPM.encode("what is dropout")
    rules = TextRules(prompt_len=1, prompt_tail=[1])
    result = judged(ids, "whatisdropout", tokenizer=SPM, rules=rules)
    assert result.difference is not None
    assert (result.token_index, result.difference.offset) == (1, 4)


def test_broken_bytes_are_judged_by_the_servers_own_detokenizer():
    ids = [SPM.encode("what")[-1], 3 + 0xE4, 3 + 0xBD]  # byte tokens <0xE4> <0xBD>: never a character
    stream = DecodeStream(ids=[1], skip_special_tokens=True)
    came = "".join(stream.step(SPM._library, token) or "" for token in [*ids, SPM.encode("is")[-1]])
    result = judged([*ids, SPM.encode("is")[-1]], came, tokenizer=SPM, rules=TextRules(prompt_len=1, prompt_tail=[1]))
    assert result.difference is None


@pytest.mark.parametrize(
    ("due", "came", "code", "offset"),
    [
        ("hello world hello", "hello hello", "MISSING_TEXT", 5),
        ("hello world", "hello world world", "DUPLICATED_TEXT", 11),
        ("hello world", "hello there world", "EXTRA_TEXT", 5),
        ("hello world", "hello PROMPT world", "PROMPT_LEAK", 5),
        ("one two three", "two one three", "REORDERED", 0),
        ("hello world", "hello w\ufffdrld", "ALTERED_TEXT", 5),
    ],
)
def test_a_difference_is_named_and_placed_where_a_piece_begins(due, came, code, offset):
    ends = [i for i, (a, b) in enumerate(pairwise(due), 1) if b == " "] + [len(due)]
    difference = classify(due, came, prompt_tail="the PROMPT ends", due_ends=ends, came_ends=[5, 11, 12, 17])
    assert (difference.code, difference.offset) == (code, offset)
    assert due[: difference.offset] == came[: difference.offset]
    assert difference.broken_utf8 == ("\ufffd" in came)


# ----------------------------------------------------------------------------- really sampled streams, real tokenizer


def real_streams() -> list[dict]:
    return [json.loads(line) for line in STREAMS.read_text().splitlines()]


def served(tokenizer: Tokenizer, prompt: list[int], ids: list[int], ended_by_token: bool) -> list[str]:
    """The deltas of a server that streams one token a chunk, as the demo backend makes them."""
    detokenizer = Detokenizer(tokenizer._library, prompt, Sampling(len(ids), eos_id=-1))
    deltas = []
    for token in ids[:-1] if ended_by_token else ids:
        detokenizer.add(token, is_end=False)
        deltas.append(detokenizer.delta(finished=False))
    return deltas


def rules_of(prompt: list[int]) -> TextRules:
    return TextRules(prompt_len=len(prompt), prompt_tail=prompt[-16:])


def test_no_really_sampled_stream_is_called_wrong_however_it_is_cut():
    tokenizer = load_tokenizer(SMOLLM2)
    for stream in real_streams():
        ids, prompt = stream["ids"], stream["prompt_ids"]
        for length in {*range(1, len(ids) + 1, 7), len(ids)}:
            by_token = length == len(ids) and stream["finish"] == "stop"
            came = "".join(served(tokenizer, prompt, ids[:length], by_token))
            result = compare(tokenizer, ids[:length], rules_of(prompt), came, Ending(by_token=by_token))
            assert result.codes, f"stream {stream['prompt'][:30]!r} cut at {length}: {result}"


def test_every_fault_in_a_really_sampled_stream_is_found_at_its_place():
    tokenizer = load_tokenizer(SMOLLM2)
    rng = random.Random(7)
    trials = 0
    for stream in real_streams():
        ids, prompt = stream["ids"], stream["prompt_ids"]
        by_token = stream["finish"] == "stop"
        deltas = served(tokenizer, prompt, ids, by_token)
        right = "".join(deltas)
        for fault in (drop, duplicate, swap, alter):
            at = rng.choice([i for i, delta in enumerate(deltas) if delta])
            wrong = "".join(fault(deltas, at))
            if wrong == right:
                continue  # swapping two equal chunks changes nothing
            trials += 1
            result = compare(tokenizer, ids, rules_of(prompt), wrong, Ending(by_token=by_token))
            assert result.difference is not None, (stream["prompt"], fault.__name__, at)
            assert result.token_index is not None
            # What is reported is the whole truth: undoing it there gives the right text back.
            found = result.difference
            assert wrong[: found.offset] + found.due + wrong[found.offset + len(found.came) :] == right
            assert len("".join(deltas[: result.token_index])) <= found.offset
    assert trials > 100


def drop(deltas: list[str], at: int) -> list[str]:
    return deltas[:at] + deltas[at + 1 :]


def duplicate(deltas: list[str], at: int) -> list[str]:
    return deltas[: at + 1] + deltas[at:]


def swap(deltas: list[str], at: int) -> list[str]:
    return [*deltas[:at], *deltas[at : at + 2][::-1], *deltas[at + 2 :]]


def alter(deltas: list[str], at: int) -> list[str]:
    return [*deltas[:at], chr(ord(deltas[at][0]) ^ 1) + deltas[at][1:], *deltas[at + 1 :]]


OTHERS = [pytest.param(SHARED / name, id=name) for name in ("qwen3", "gpt2", "deepseek-v4", "mistral-v1")]


@pytest.mark.parametrize("path", [SMOLLM2, BYTE_LEVEL, SENTENCEPIECE, *OTHERS])
def test_random_ids_give_what_the_servers_detokenizer_gives(path):
    """Random ids are full of broken characters and specials: the worst case for a byte table."""
    if not path.exists():
        pytest.skip("this real tokenizer is not beside the checkout")
    tokenizer = load_tokenizer(path)
    rng = random.Random(path.name)
    known = sorted(tokenizer.table or {})
    for _ in range(150):
        prompt, ids = rng.choices(known, k=8), rng.choices(known, k=40)
        if tokenizer.text(prompt).endswith("\ufffd"):
            continue  # the server leaks such a prompt: a fault, see below
        rules = rules_of(prompt)
        came = "".join(served(tokenizer, prompt, ids, False))
        result: Comparison = compare(tokenizer, ids, rules, came, Ending())
        assert result.codes, (prompt, ids, result)


@pytest.mark.parametrize("ids", [[HELLO, WORLD], [HELLO, 0xC3, WORLD]], ids=["clean bytes", "broken bytes too"])
def test_a_prompt_that_ends_inside_a_character_and_is_streamed_back_is_a_prompt_leak(ids):
    prompt = [HELLO2, HELLO2, 0xE4]  # vLLM issue 48853
    came = "".join(served(TOY, prompt, ids, False))
    assert came.startswith(" hello hello")
    difference = judged(ids, came, rules=rules_of(prompt)).difference
    assert difference is not None
    assert difference.code == "PROMPT_LEAK"
