"""Which requests are recorded where not all are."""

import pytest

from sparseety.sampling import chosen, join_key, key_id, threshold

IDS = [f"chatcmpl-{n}" for n in range(100_000)]


@pytest.mark.parametrize(("rate", "low", "high"), [(0.001, 60, 140), (0.005, 420, 580), (0.015, 1_360, 1_640)])
def test_a_rate_of_tenths_of_a_per_cent_is_what_it_says(rate: float, low: int, high: int) -> None:
    assert low < sum(chosen(b"key", id_, threshold(rate)) for id_ in IDS) < high


def test_all_and_none_are_exact() -> None:
    assert all(chosen(b"key", id_, threshold(1.0)) for id_ in IDS[:1000])
    assert not any(chosen(b"key", id_, threshold(0.0)) for id_ in IDS[:1000])


def test_a_higher_rate_keeps_what_a_lower_one_chose() -> None:
    few = [id_ for id_ in IDS[:20_000] if chosen(b"key", id_, threshold(0.01))]
    assert few
    assert all(chosen(b"key", id_, threshold(0.02)) for id_ in few)


def test_who_does_not_know_the_key_cannot_choose_an_id_that_is_recorded() -> None:
    one = {id_ for id_ in IDS[:20_000] if chosen(b"one", id_, threshold(0.01))}
    two = {id_ for id_ in IDS[:20_000] if chosen(b"two", id_, threshold(0.01))}
    assert len(one & two) < 20
    assert key_id(b"one") != key_id(b"two")
    assert b"one" not in bytes.fromhex(key_id(b"one"))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_beyond_none_and_all_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        threshold(rate)


@pytest.mark.parametrize(
    ("external_id", "reply_id"),
    [
        ("chatcmpl-x", "chatcmpl-x"),
        ("chatcmpl-x-0", "chatcmpl-x-0"),
        ("cmpl-x-0", "cmpl-x"),
        ("cmpl-x-3-12", "cmpl-x-3"),
        ("cmpl-x", "cmpl-x"),
        ("cmpl-0", "cmpl-0"),
        ("cmpl--0", "cmpl-"),
        ("resp_x", "resp_x"),
    ],
)
def test_the_engine_decides_by_the_id_that_the_proxy_sees(external_id: str, reply_id: str) -> None:
    assert join_key(external_id) == reply_id
