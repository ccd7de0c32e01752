"""Ids to text and ends, as vLLM's engine and front end do it."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.demo.replay import (
    Ended,
    Piece,
    Sampling,
    Stream,
    Tick,
    chat_prompt,
    encoder,
    load_streams,
    pick,
    replay,
    together,
)

DEMO = Path(__file__).parent.parent / "deploy" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer" / "tokenizer.json"))
STREAMS = load_streams(DEMO / "streams.jsonl")
END = 2  # <|im_end|>


def run(ids: list[int], *, prompt_ids: list[int] | None = None, max_tokens: int = 10_000, **more: object) -> list[Tick]:
    stream = Stream(kind="en", greedy=False, prompt="", prompt_ids=[], ids=ids, finish="stop")
    sampling = Sampling(max_tokens=max_tokens, eos_id=END, **more)  # type: ignore[arg-type]
    return replay(TOKENIZER, stream, prompt_ids or [1, 520, 9531, 198], sampling, 0)


def text_of(ticks: list[Tick]) -> str:
    return "".join(piece.text for tick in ticks for piece in tick.pieces)


def last_piece(ticks: list[Tick]) -> Piece:
    return [piece for tick in ticks for piece in tick.pieces][-1]


def encode(text: str) -> list[int]:
    return encoder(TOKENIZER)(text)


def test_the_streams_are_many_and_mixed() -> None:
    assert len(STREAMS) >= 40
    assert {stream.kind for stream in STREAMS} == {"en", "code", "zh", "other", "emoji", "misc"}
    texts = [TOKENIZER.decode(stream.ids) for stream in STREAMS]
    assert sum(text.endswith("�") for text in texts) >= 3, "some end inside a character"
    odd = [encode(text) != [i for i in stream.ids if i != END] for text, stream in zip(texts, STREAMS, strict=True)]
    assert sum(odd) >= 10, "some are not what re-tokenizing their text gives"
    assert (DEMO / "streams.jsonl").stat().st_size < 200_000


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.kind}-{stream.prompt[:12]!r}")
def test_a_stream_gives_its_decoded_text_up_to_the_last_whole_character(stream: Stream) -> None:
    ticks = run(stream.ids, prompt_ids=stream.prompt_ids, max_tokens=len(stream.ids))
    decoded = TOKENIZER.decode(stream.ids)
    assert decoded.startswith(text_of(ticks))
    assert len(decoded) - len(text_of(ticks)) == 0 or decoded.endswith("�")
    assert [tick.rows[0] for tick in ticks] == [[i] for i in stream.ids]
    assert last_piece(ticks).finish_reason == stream.finish


def test_what_precedes_a_cut_character_in_its_token_is_held_back_too_and_never_flushed() -> None:
    *whole, cut = encode("🎉")
    assert text_of(run([*whole, cut], max_tokens=len(whole))) == ""
    assert text_of(run([*whole, cut, END])) == "🎉"


def test_the_end_token_is_counted_but_not_detokenized_even_where_special_tokens_are_shown() -> None:
    ticks = run([*encode("Hi"), END], skip_special_tokens=False)
    assert text_of(ticks) == "Hi"
    assert last_piece(ticks) == Piece(0, "", [END], 2, "stop", None)
    assert text_of(run([*encode("Hi"), END], skip_special_tokens=False, include_stop_str_in_output=True)) == (
        "Hi<|im_end|>"
    )


def test_a_stop_token_is_named_and_not_detokenized() -> None:
    dog = encode(" dog")[0]
    ticks = run([*encode("A big dog barks"), END], stop_token_ids=[dog])
    assert text_of(ticks) == "A big"
    assert last_piece(ticks).stop_reason == dog
    assert ticks[-1].ended == {0: Ended("stop", dog)}


@pytest.mark.parametrize(("included", "text"), [(False, "A big "), (True, "A big do")])
def test_a_stop_string_cuts_inside_a_token(included: bool, text: str) -> None:
    ticks = run([*encode("A big dog barks"), END], stop=["do", "barks"], include_stop_str_in_output=included)
    assert text_of(ticks) == text
    assert (last_piece(ticks).finish_reason, last_piece(ticks).stop_reason) == ("stop", "do")


def test_the_engine_samples_on_after_a_stop_string_until_the_abort_arrives() -> None:
    ids = [*encode("A big dog barks"), END]
    ticks = run(ids, stop=["dog"])
    assert [tick.rows[0][0] for tick in ticks] == ids[:4]
    assert ticks[-1] == Tick({0: [ids[3]]}, [], {0: Ended("abort")})
    assert last_piece(ticks).total == 3, "what the client is told of ends with the id that completed the stop string"


def test_text_that_a_stop_string_may_take_back_is_held_back() -> None:
    ticks = run([*encode("A big dog barks"), END], stop=["12345"])
    for count in range(1, len(ticks)):
        decoded = TOKENIZER.decode(encode("A big dog barks")[:count])
        assert text_of(ticks[:count]) == decoded[:-4], "four characters, one less than the stop string has"
    assert text_of(ticks) == "A big dog barks"


def test_the_stop_string_that_completes_first_wins_even_if_listed_later() -> None:
    ticks = run([*encode("one two three"), END], stop=["wo three", "two"])
    assert last_piece(ticks).stop_reason == "two"


def test_stray_bytes_that_are_no_utf8_do_not_end_the_reply() -> None:
    lone = encode("🎉")
    for ids in ([*lone[1:], *encode("Hi"), END], [lone[-1]] * 30 + [*encode(" Hi"), END]):
        assert text_of(run(ids)).endswith("Hi")


def test_a_stream_that_was_cut_by_length_ends_with_an_end_token_when_more_is_asked_for() -> None:
    ticks = run(encode("A big dog"))
    assert [tick.rows[0][0] for tick in ticks] == [*encode("A big dog"), END]
    assert last_piece(ticks).finish_reason == "stop"


def test_ignoring_the_end_token_goes_on_until_max_tokens() -> None:
    ticks = run([*encode("Hi"), END], max_tokens=5, ignore_eos=True)
    assert [tick.rows[0][0] for tick in ticks] == [*encode("Hi"), END, *encode("Hi"), END, *encode("Hi")]
    assert text_of(ticks) == "HiHiHi"
    assert ticks[-1].ended == {0: Ended("length")}


def test_children_of_one_prompt_get_different_streams_and_its_own_first() -> None:
    prompt = next(stream.prompt for stream in STREAMS if sum(s.prompt == stream.prompt for s in STREAMS) == 2)
    picked = [pick(STREAMS, prompt, child, greedy=False) for child in range(4)]
    assert [stream.prompt == prompt for stream in picked] == [True, True, False, False]
    assert len({id(stream) for stream in picked}) == 4
    assert not picked[0].greedy
    assert pick(STREAMS, prompt, 0, greedy=True).greedy


def test_a_prompt_is_known_by_its_text_or_its_ids_and_any_other_always_gets_the_same() -> None:
    stream = STREAMS[3]
    assert pick(STREAMS, stream.prompt, 0, greedy=stream.greedy) is stream
    assert pick(STREAMS, stream.prompt_ids, 0, greedy=stream.greedy) is stream
    assert pick(STREAMS, "never heard", 0, greedy=False) is pick(STREAMS, "never heard", 0, greedy=False)


def test_side_by_side_sequences_share_their_steps() -> None:
    one, two = run([*encode("A big dog"), END]), run([*encode("Hi"), END])
    merged = together([one, [Tick({1: t.rows[0]}, t.pieces, {1: t.ended[0]} if t.ended else {}) for t in two]])
    assert [sorted(tick.rows) for tick in merged] == [[0, 1], [0, 1], [0], [0]]
    assert [sorted(tick.ended) for tick in merged] == [[], [1], [], [0]]


def test_the_chat_template_is_the_models() -> None:
    prompt = chat_prompt([("user", STREAMS[0].prompt)])
    assert encode(prompt)[-len(STREAMS[0].prompt_ids) :] == STREAMS[0].prompt_ids
    assert chat_prompt([("system", "Be brief."), ("user", "Hi")]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
