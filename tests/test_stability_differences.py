"""Where two outputs part, and what counts as a tie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stability_runs import baseline_ids, output, parted, run, tops
from verifier.stability.analysis import analyse, compare
from verifier.stability.differences import difference, pair, positions_at_risk, precision_band, tie_band
from verifier.stability.model import Tops
from verifier.stability.result import ArmFacts, Band, Facts, GateSettings

BAND = precision_band(GateSettings(), Facts())


def found(margins, band=BAND, index=7):
    other, lists = parted("b", 0, index, margins)
    return difference(output("a1", 0, top=lists), other, band)


@pytest.mark.parametrize(
    ("margins", "kind"),
    [
        ((0.0, 0.0), "EXACT_TIE"),
        ((0.0, 0.125), "EXACT_TIE"),
        ((0.25, 0.25), "NEAR_TIE"),
        ((0.25, 0.26), "HARD"),
        ((0.0, 3.0), "HARD"),  # a tie for one side alone is none
        ((1.77, 1.07), "HARD"),
        ((3.0, -2.9), "HARD"),  # the other side took what it held less likely: no tie, whatever the sum
    ],
)
def test_a_difference_is_a_tie_up_to_the_band_and_hard_beyond(margins, kind):
    difference_ = found(margins)
    assert difference_.kind == kind
    assert difference_.hard == (kind == "HARD")
    assert difference_.index == 7
    assert difference_.shift == pytest.approx(abs(margins[0]) + abs(margins[1]))


def test_with_log_probabilities_of_one_side_its_margin_decides():
    for margin, kind in ((0.3, "NEAR_TIE"), (0.31, "HARD")):
        other, lists = parted("b", 0, 7, (margin, 0.0), top=[])
        assert difference(output("a1", 0, top=lists), other, BAND).kind == kind


def test_without_any_a_difference_is_unknown_and_not_called_hard():
    other, _ = parted("b", 0, 7, top=[])
    difference_ = difference(output("a1", 0, top=[]), other, BAND)
    assert (difference_.kind, difference_.hard, difference_.shift) == ("UNKNOWN", False, None)


def test_a_token_that_was_not_logged_is_at_least_as_far_as_the_last_that_was():
    other, lists = parted("b", 0, 7, (0.0, 0.1))
    lists[7] = [(baseline_ids(0)[7], -0.1), (5555, -0.2), (5556, -0.9)]
    difference_ = difference(output("a1", 0, top=lists), other, BAND)
    assert difference_.bounded
    assert difference_.first_margin == pytest.approx(0.8)
    assert difference_.kind == "HARD"


def test_a_beginning_of_the_other_is_a_length_difference_that_only_a_tie_excuses():
    ids = baseline_ids(0)
    for lead, hard in ((2.0, True), (0.2, False)):
        difference_ = difference(output("a1", 0, top=tops(ids, lead)), output("b", 0, ids[:12], finish="stop"), BAND)
        assert (difference_.kind, difference_.index, difference_.hard) == ("LENGTH", 12, hard)
        assert (difference_.first_id, difference_.second_id) == (ids[12], None)


@given(margins=st.tuples(st.floats(-1, 4), st.floats(-1, 4)), index=st.integers(0, 39))
def test_neither_side_is_favoured(margins, index):
    other, lists = parted("b", 0, index, margins)
    first = output("a1", 0, top=lists)
    one, back = difference(first, other, BAND), difference(other, first, BAND)
    assert (one.kind, one.hard, one.index, one.shift) == (back.kind, back.hard, back.index, pytest.approx(back.shift))
    assert (one.first_margin, one.second_margin) == (back.second_margin, back.first_margin)


def test_outputs_are_paired_by_prompt_repeat_and_cache_state():
    first = [output("a1", p, repeat=r, cache=c) for p in (0, 1) for r in (0, 1) for c in ("cold", "warm")]
    second = [output("b", 0, repeat=1, cache="warm", load=9), output("b", 0, repeat=7), output("b", 5)]
    pairs, alone = pair(first, second)
    assert [(a.request_id, b.request_id) for a, b in pairs] == [("a1-0-1-1-warm", "b-0-1-9-warm")]
    assert alone == 7 + 2


def test_the_band_is_2_and_4_units_in_the_last_place_of_the_coarser_format():
    assert (BAND.margin, BAND.shift) == (pytest.approx(0.3), 0.5)
    assert "assumed" in BAND.detail
    both = Facts(arms={"a1": ArmFacts(dtype="float32"), "b": ArmFacts(dtype="torch.bfloat16")})
    assert precision_band(GateSettings(), both).shift == 0.5
    assert "assumed" not in precision_band(GateSettings(), both).detail
    half = Facts(arms={"a1": ArmFacts(dtype="float16")})
    assert precision_band(GateSettings(), half).shift == pytest.approx(4 * 16 / 1024)
    assert precision_band(GateSettings(largest_logit=64), Facts()).shift == 1.0
    single = Facts(arms={"a1": ArmFacts(dtype="float32")})
    assert precision_band(GateSettings(), single).shift == 0.01  # far above its last place, far below any reader


def noise(count, margin, prompts=250):
    outputs = run(prompts, a2=dict.fromkeys(range(count), (3, margin, margin)))
    settings, facts = GateSettings(), Facts()
    return compare(outputs, settings, facts)[0]


def test_the_noise_arm_gives_the_band_where_it_parted_200_times():
    assert noise(199, 0.1).source == "precision"
    band = noise(200, 0.1)
    assert band.source == "noise arm"
    assert band.shift == pytest.approx(0.2 * 1.2)


def test_a_noise_arm_with_faults_of_its_own_does_not_widen_the_band():
    band = noise(200, 2.0)
    assert band.source == "precision"
    assert "no rounding" in band.detail
    verdict = analyse(run(250, a2=dict.fromkeys(range(200), (3, 2.0, 2.0)))).verdict
    assert verdict.exit_code == 3
    assert "the bench is broken" in verdict.reasons[0]


def test_repeats_that_fork_at_the_same_tie_count_once_for_the_band():
    outputs = [o for r in range(4) for o in run(60, a2=dict.fromkeys(range(60), (3, 0.1, 0.1)), repeat=r)]
    assert compare(outputs, GateSettings(), Facts())[0].source == "precision"


def test_noise_of_another_number_format_does_not_give_the_band():
    differences = [found((0.1, 0.1)) for _ in range(300)]
    facts = Facts(arms={"a1": ArmFacts(dtype="float32"), "b": ArmFacts(dtype="bfloat16")})
    assert tie_band(differences, GateSettings(), facts) == Band(
        margin=BAND.margin, shift=0.5, source="precision", detail=tie_band(differences, GateSettings(), facts).detail
    )


def test_an_output_that_was_cut_short_is_compared_as_far_as_it_goes():
    ids = baseline_ids(0)
    whole, cut = output("a1", 0, finish="stop"), output("b", 0, ids[:12], finish="length")
    for both in ((whole, cut), (cut, whole)):
        assert difference(*both, BAND) is None
        assert positions_at_risk(*both, None) == 12
    ended = output("a1", 0, ids[:12], finish="stop")  # it chose its end, where the other goes on: that differs
    assert difference(ended, output("b", 0, ids[:20], finish="length"), BAND).kind == "LENGTH"
    assert difference(output("a1", 0, ids[:10], finish="length"), ended, BAND) is None


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**40), st.floats(-9999, 0)))))
def test_log_probabilities_are_the_same_in_little_memory(tops):
    packed = Tops(tops)
    assert packed == tops
    assert [packed[i] for i in range(-len(tops), len(tops))] == tops * 2
    assert packed[1:3] == tops[1:3]
    with pytest.raises(IndexError):
        packed[len(tops)]
