"""Known answers. Those without a source beside them were computed once with scipy 1.17, lifelines and statsmodels."""

from itertools import pairwise
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.stability.intervals import (
    clustered_ratio,
    clustered_share,
    mcnemar,
    median_limits,
    paired_difference,
    poisson,
    ratio_limits,
    resampled,
    share_limits,
    t_value,
    wilson,
)
from verifier.stability.survival import events_needed, log_rank, survival

# Freireich et al., Blood 21 (1963): weeks in remission, the classic example of survival and log-rank.
TREATED = [6, 6, 6, 7, 10, 13, 16, 22, 23]
TREATED_CENSORED = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
PLACEBO = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]


def leukaemia():
    """A patient censored in week t was still at risk in week t; a pair of length n no longer is at index n."""
    treated = [(week, True) for week in TREATED] + [(week + 1, False) for week in TREATED_CENSORED]
    return treated, [(week, True) for week in PLACEBO]


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        (31, 101, 0.225, 0.403),  # the measured pairs: float32 against bfloat16, two batch sizes, dense against sparse
        (66, 101, 0.557, 0.739),
        (38, 101, 0.288, 0.474),
        (0, 101, 0.0, 0.037),
        (21, 101, 0.14, 0.30),
        (0, 300, 0.0, 0.013),  # what no difference in so many prompts says
        (0, 1000, 0.0, 0.004),
    ],
)
def test_wilson_intervals_are_those_of_the_measured_runs(hits, of, low, high):
    assert wilson(hits, of) == pytest.approx((low, high), abs=0.005)


def test_wilson_is_that_of_newcombes_table():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe, Stat. Med. 17 (1998) 857, table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_exact_share_is_that_of_newcombes_table():
    assert share_limits(81, 263, 0.025, 0.025) == pytest.approx((0.25270, 0.36762), abs=5e-5)
    assert share_limits(0, 20, 0.025, 0.025) == pytest.approx((0.0, 0.16843), abs=5e-6)
    assert share_limits(1, 29, 0.025, 0.025) == pytest.approx((0.00087, 0.17764), abs=5e-6)


@pytest.mark.parametrize(
    ("events", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668), (100, 81.364, 121.627)]
)
def test_poisson_limits_are_those_of_garwoods_table(events, low, high):
    assert poisson(events) == pytest.approx((low, high), abs=0.0006)


def test_the_paired_difference_is_that_of_newcombes_example():
    """36 and 12 against 2 and 0: table III of the paper, method 10."""
    assert paired_difference(36, 12, 2, 0, 0.95) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_mcnemar_counts_disagreements_like_coin_tosses():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(3000, 3000) == 1.0  # no overflow


def test_the_ratio_of_two_rates_is_bounded_even_where_one_is_0():
    low, high = ratio_limits(8, 1000, 0, 1000, 0.05, 0.05)
    assert low == pytest.approx(0.05 ** (1 / 8) / (1 - 0.05 ** (1 / 8)))
    assert high == inf
    assert ratio_limits(0, 10, 0, 10, 0.05, 0.05) == (0.0, inf)
    assert ratio_limits(11, 1000, 5, 900, 0.025, 0.025) == pytest.approx((0.63421, 7.26920), abs=5e-5)


def test_the_median_is_bounded_by_order_statistics():
    assert median_limits(range(5), 0.95) == (None, None)  # the whole range covers it in 94 % of samples only
    assert median_limits(range(6), 0.95) == (0, 5)
    assert median_limits(range(20), 0.95) == (5, 14)  # the 6th and the 15th: published tables of the sign test
    assert median_limits(range(100), 0.95) == (39, 60)


def test_resampling_is_the_same_each_time_and_as_wide_as_theory_says():
    groups = [(1.0, 1.0)] * 30 + [(0.0, 1.0)] * 70
    low, high = resampled(groups, (0, 2000), 0.025, 0.025)
    assert (low, high) == resampled(groups, (0, 2000), 0.025, 0.025)
    assert (low, high) == pytest.approx((0.3 - 1.96 * 0.0458, 0.3 + 1.96 * 0.0458), abs=0.02)


def test_repeats_that_are_alike_do_not_narrow_what_is_resampled():
    once = [(1.0, 1.0)] * 30 + [(0.0, 1.0)] * 70
    often = [(other * 8, of * 8) for other, of in once]
    assert resampled(often, (0, 500), 0.025, 0.025) == resampled(once, (0, 500), 0.025, 0.025)


def test_a_few_disagreements_against_none_do_not_prove_a_ratio():
    few = [(1.5, 0.5)] * 3 + [(0.0, 0.0)] * 13
    spread = [(ours + 0.03, theirs + 0.03) for ours, theirs in few]
    nothing = [(0.03, 0.03)] * 16
    assert clustered_ratio([(1.03, 0.03)] * 3 + nothing[:13], 0.05, 0.05)[0] < 1
    assert clustered_ratio(nothing, 0.05, 0.05)[1] > 10  # none against none bounds nothing
    assert clustered_ratio(spread, 0.05, 0.05)[0] < 3 < clustered_ratio(spread, 0.05, 0.05)[1]


def test_a_share_whose_hits_come_together_is_less_sure():
    even, uneven = [(2.0, 100.0)] * 20, [(8.0, 100.0)] * 5 + [(0.0, 100.0)] * 15
    low, high = clustered_share(even, 0.05, 0.05)
    wide = clustered_share(uneven, 0.05, 0.05)
    assert wide[0] < low < 0.02 < high < wide[1]
    assert clustered_share([(5.0, 100.0)] + [(0.0, 100.0)] * 9, 0.05, 0.05) == (0.0, 1.0)  # all in one prompt


def test_students_quantiles_are_those_of_the_table():
    assert [round(t_value(0.95, n), 3) for n in (1, 5, 15, 30)] == [6.314, 2.015, 1.753, 1.697]


def test_survival_of_the_leukaemia_trial():
    treated, placebo = leukaemia()
    curve = survival(treated)
    published = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert {p.index: p.share for p in curve.points} == pytest.approx(published, abs=0.0006)
    assert curve.median == 23
    assert survival(placebo).median == 8


def test_log_rank_of_the_leukaemia_trial():
    """Chi-squared is 16.79, with 19.25 expected and 9 observed (and 10.75, 21)."""
    treated, placebo = leukaemia()
    test = log_rank(treated, placebo)
    assert test is not None
    assert test.z**2 == pytest.approx(16.79, abs=0.005)
    assert test.z > 0  # the second one's patients relapse sooner
    assert test.two_sided == pytest.approx(4.17e-5, rel=0.01)
    assert test.one_sided == pytest.approx(test.two_sided / 2)
    assert test.ratio == pytest.approx(21 / 10.75 / (9 / 19.25), rel=0.002)
    assert test.events == 30


def test_a_pair_is_at_risk_at_its_tokens_and_not_beyond():
    """Two pairs of 3 tokens never part, one parts at index 3 of more: alone at risk there."""
    curve = survival([(3, False), (3, False), (3, True)])
    assert [(p.index, p.share, p.at_risk) for p in curve.points] == [(3, 0.0, 1)]
    assert curve.longest == 4


def test_nothing_parted_is_no_test():
    assert log_rank([(5, False)], [(5, False)]) is None
    assert survival([]).points == []


def test_the_numbers_of_differences_needed_are_those_of_the_plan():
    assert [events_needed(ratio) for ratio in (1.5, 2, 3)] == [209, 72, 29]


TIMES = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=40)


@given(first=TIMES, second=TIMES)
def test_log_rank_is_the_same_from_either_side(first, second):
    one, other = log_rank(first, second), log_rank(second, first)
    assert (one is None) == (other is None)
    if one and other:
        assert one.z == pytest.approx(-other.z, abs=1e-9)
        if one.ratio and other.ratio:
            assert log(one.ratio) == pytest.approx(-log(other.ratio), abs=1e-9)


@given(times=TIMES)
def test_a_survival_curve_falls_and_never_rises(times):
    shares = [1.0, *(point.share for point in survival(times).points)]
    assert all(later < earlier for earlier, later in pairwise(shares))
    assert shares[-1] >= 0


@given(of=st.integers(1, 3000), data=st.data())
def test_intervals_hold_their_share_and_mirror_when_yes_and_no_are_swapped(of, data):
    hits = data.draw(st.integers(0, of))
    for limits in (wilson(hits, of), share_limits(hits, of, 0.025, 0.025)):
        assert 0 <= limits[0] <= hits / of <= limits[1] <= 1
    low, high = wilson(hits, of)
    assert wilson(of - hits, of) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(cells=st.tuples(*[st.integers(0, 60)] * 4).filter(any))
def test_a_paired_difference_is_turned_round_when_the_sides_are(cells):
    both, first, second, neither = cells
    low, high = paired_difference(both, first, second, neither, 0.95)
    assert low <= (first - second) / sum(cells) <= high
    assert paired_difference(both, second, first, neither, 0.95) == pytest.approx((-high, -low), abs=1e-12)


@given(events=st.tuples(st.integers(0, 80), st.integers(0, 80)))
def test_a_ratio_and_its_inverse_have_inverse_limits(events):
    low, high = ratio_limits(events[0], 700, events[1], 900, 0.05, 0.05)
    back = ratio_limits(events[1], 900, events[0], 700, 0.05, 0.05)
    if low > 0 and high < inf:
        assert back == pytest.approx((1 / high, 1 / low), rel=1e-6)
