"""What the analysis of a run says: field cases of public bug reports, causes, costs, teacher forcing."""

import pytest
from msgspec.structs import replace

from tests.stability_runs import baseline_ids, output, parted, run, served, tops
from verifier.stability.analysis import analyse
from verifier.stability.model import Forced
from verifier.stability.result import Facts, GateSettings

IDS = list(range(10, 20))


def of(analysis, arm):
    return next(each for each in analysis.repeats if each.arm == arm)


def groups(tree):
    return [leaf.requests for leaf in tree.leaves]


def factors(repeats):
    return {factor.name: (factor.explains, factor.of) for factor in repeats.factors}


# ------------------------------------------------------------------------------------------------------ field cases


def test_another_batch_another_answer_is_the_engines_near_tie():
    """vLLM issue 5898 (case A5-01): the streams are right, the third run under load parts at token 7."""
    other = [*IDS[:7], 99, 98, 97]
    lists = tops(IDS)
    lists[7] = [(IDS[7], -0.7), (99, -0.7)]
    theirs = tops(other)
    theirs[7] = [(99, -0.7), (IDS[7], -0.7)]
    outputs = [
        output("a1", 0, IDS, repeat=0, load=1, top=lists),
        output("a1", 0, IDS, repeat=1, load=1, top=lists),
        output("a1", 0, other, repeat=2, load=16, top=theirs),
        output("a1", 0, IDS, repeat=3, load=16, top=lists),
    ]
    analysis = analyse(outputs)
    tree = of(analysis, "a1").trees[0]
    assert (len(tree.leaves), tree.forks[0].index, tree.forks[0].margin) == (2, 7, 0.0)
    assert (of(analysis, "a1").tie_forks, of(analysis, "a1").hard_forks) == (1, 0)
    noise = analysis.comparison("noise")
    assert [d.kind for d in noise.differences] == ["EXACT_TIE"]
    assert noise.cause.name == "batch"
    assert "1 and 16 at once" in noise.cause.evidence[1]
    assert factors(of(analysis, "a1"))["load"] == (0, 1)  # one of the two at 16 was like those at 1
    assert tree.largest == 0.75


def test_a_first_run_that_differs_from_all_later_ones_goes_by_the_prefix_cache():
    """vLLM issue 40896 (case A5-02)."""
    other = [*IDS[:7], 99, 98, 97]
    outputs = [output("a1", 0, other, repeat=0, request_id="1", served=served(computed=64, reused=0))]
    outputs += [
        output("a1", 0, IDS, repeat=n, request_id=str(n + 1), served=served(computed=16, reused=48))
        for n in range(1, 5)
    ]
    repeats = of(analyse(outputs), "a1")
    assert groups(repeats.trees[0]) == [["2", "3", "4", "5"], ["1"]]
    assert repeats.trees[0].forks[0].index == 7
    assert factors(repeats) == {"reused": (1, 1)}
    assert repeats.factors[0].chance == pytest.approx(1 / 5)


def test_where_and_how_wide_pairs_part_tells_drift_from_a_defect():
    """NeMo Automodel pull request 2560 (case A5-04)."""
    cases = {
        0: (IDS, None),
        1: ([*IDS[:7], 99, 98, 97], 0.004),
        2: ([55, *IDS[1:]], 6.2),
        3: (IDS[:4], None),
    }
    outputs = []
    for prompt, (ids, gap) in cases.items():
        lists, theirs = tops(IDS), tops(ids)
        if gap is not None:
            index = next(n for n, pair in enumerate(zip(IDS, ids, strict=True)) if pair[0] != pair[1])
            lists[index] = [(IDS[index], -0.1), (ids[index], -0.1 - gap)]
            theirs[index] = [(ids[index], -0.1), (IDS[index], -0.1 - gap)]
        outputs += [output("a1", prompt, IDS, top=lists), output("b", prompt, ids, top=theirs, finish="stop")]
    candidate = analyse(outputs).comparison("candidate")
    found = {d.prompt: (d.kind, d.index) for d in candidate.differences}
    assert found == {1: ("NEAR_TIE", 7), 2: ("HARD", 0), 3: ("LENGTH", 4)}
    assert (candidate.identical.hits, candidate.identical.of, candidate.early) == (1, 4, 2)
    assert candidate.survival.quartiles == [0, 4, 4]
    assert analyse(outputs).verdict.exit_code == 3  # four prompts are no evidence


def test_backends_that_are_stable_each_and_differ_between_them_are_no_noise():
    """llama.cpp pull request 25294 (case A5-06)."""
    sparse = [*IDS[:5], 70, 71, 72, 73, 74]
    outputs = [output("a1", 0, IDS, repeat=n) for n in range(2)]
    outputs += [output("b", 0, sparse, repeat=n) for n in range(2)]
    analysis = analyse(outputs)
    assert [of(analysis, arm).distinct_mean for arm in ("a1", "b")] == [1.0, 1.0]
    assert [of(analysis, arm).stable.hits for arm in ("a1", "b")] == [1, 1]
    assert analysis.comparison("noise").differences == []
    assert {d.index for d in analysis.comparison("candidate").differences} == {5}


def test_runs_on_both_sides_of_a_wake_up_are_not_pooled():
    """vLLM issue 29341 (case A7-04): fluent nonsense after sleep and wake-up."""
    outputs = [output(arm, 71, IDS, epoch="engine 0") for arm in ("a1", "a2")]
    outputs += [output("b", 71, IDS, repeat=0, epoch="engine 0")]
    outputs += [output("b", 71, [33] * 10, repeat=n, epoch="engine 2") for n in (1, 2)]
    analysis = analyse([*run(71, epoch="engine 0"), *outputs])
    (tree,) = of(analysis, "b").trees
    assert [len(leaf.requests) for leaf in tree.leaves] == [2, 1]
    assert (tree.forks[0].index, set(tree.forks[0].ids)) == (0, {IDS[0], 33})
    assert factors(of(analysis, "b"))["epoch"] == (1, 1)
    assert analysis.verdict.exit_code == 3
    assert "slept or got other weights" in analysis.verdict.reasons[0]


# ----------------------------------------------------------------------------------------------------------- causes


def lossy(prompts, hard, lost, settings=None):
    """A candidate that is hard at some prompts and read a third less of its context at some."""
    outputs = []
    for o in run(prompts, b=dict.fromkeys(hard, (9, 1.2, 0.9))):
        read = 700 if o.arm == "b" and o.prompt in lost else 1000
        outputs.append(output(o.arm, o.prompt, o.ids, top=o.top, served=served(attended=read, context=1000, evicted=0)))
    return analyse(outputs, settings=settings).comparison("candidate").cause


def test_kv_loss_is_named_where_the_log_shows_it_at_the_hard_differences_and_not_elsewhere():
    assert lossy(40, range(10), range(12)).name == "KV loss"
    assert "10 of 10 hard" in lossy(40, range(10), range(12)).evidence[0]
    everywhere = lossy(40, range(10), range(40))
    assert (everywhere.name, "so did all others" in everywhere.evidence[1]) == ("KV loss", True)
    assert lossy(40, range(10), range(20, 30)).name == "unknown"  # lost elsewhere
    assert lossy(40, range(10), range(5)).name == "unknown"  # half of them
    assert lossy(40, range(3), range(30)).name == "unknown"  # three of thirty in forty: chance
    assert lossy(40, range(10), []).name == "unknown"


def test_repeats_of_a_prompt_are_no_further_evidence_of_a_cause():
    def cause(repeats):
        outputs = []
        for repeat in range(repeats):
            for each in run(40, b=dict.fromkeys(range(3), (5, 1.2, 0.9)), repeat=repeat):
                lost = 5 if each.arm == "b" and each.prompt < 30 else 0
                outputs.append(replace(each, served=served(computed=100, reused=0, evicted=lost)))
        return analyse(outputs).comparison("candidate").cause

    assert (cause(1).name, cause(4).name) == ("unknown", "unknown")  # three prompts of thirty in forty: chance


def test_repeats_do_not_make_a_rate_by_length_surer_than_the_whole():
    def rates(repeats):
        how = dict.fromkeys(range(5), (5, 0.1, 0.1))
        comparison = analyse([o for r in range(repeats) for o in run(50, b=how, repeat=r)]).comparison("candidate")
        return comparison.hazard, comparison.by_length[0].differences

    (_, once), (whole, four) = rates(1), rates(4)
    assert four.rate == once.rate
    assert (four.low, four.high, four.method) == (whole.low, whole.high, whole.method)
    assert four.high > 1.3 * four.rate


def test_a_candidate_that_met_the_baselines_engine_in_the_baselines_state_is_said_to():
    same = [replace(each, epoch="engine:1") for each in run(80)]
    other = [replace(each, epoch="engine:2") if each.arm == "b" else each for each in same]
    assert "is the change switched on?" in analyse(same).verdict.warnings[-1]
    assert not any("switched on" in warning for warning in analyse(other).verdict.warnings)


def test_without_a_log_of_it_the_budget_tells_where_hard_differences_begin():
    def cause(at):
        outputs = run(60, b=dict.fromkeys(range(20), (at, 1.2, 0.9)))
        return analyse(outputs, settings=GateSettings(budget=120)).comparison("candidate").cause

    assert cause(30).name == "KV loss"  # context 130
    assert "exceeds the budget of 120" in cause(30).evidence[0]
    assert cause(10).name == "unknown"
    outputs = run(60, b=dict.fromkeys(range(20), (30, 1.2, 0.9)))
    assert analyse(outputs).comparison("candidate").cause.name == "unknown"  # without a budget there is no evidence


def test_a_token_that_is_not_the_likeliest_was_sampled_another_way():
    outputs = run(60, b=dict.fromkeys(range(10), (9, 3.0, -3.0)))
    cause = analyse(outputs).comparison("candidate").cause
    assert cause.name == "sampling path"
    assert "10 of 10 first differences" in cause.evidence[0]


def test_ties_alone_are_the_batch_where_noise_has_as_many_and_another_arithmetic_where_it_has_not():
    tie = (9, 0.1, 0.1)
    as_noise = run(60, b=dict.fromkeys(range(10), tie), a2=dict.fromkeys(range(10, 20), tie))
    assert analyse(as_noise).comparison("candidate").cause.name == "batch"
    beyond = run(60, b=dict.fromkeys(range(40), tie), a2=dict.fromkeys(range(40, 45), tie))
    assert analyse(beyond).comparison("candidate").cause.name == "numeric path"


def test_what_does_not_differ_has_no_cause():
    assert analyse(run(10)).comparison("candidate").cause is None


# ------------------------------------------------------------------------------------------------------------- cost


def test_faster_and_different_stand_together():
    outputs = []
    for o in run(20, b=dict.fromkeys(range(5), (9, 1.2, 0.9))):
        sparse = o.arm == "b"
        log = served(
            zeros=93 if sparse else 81,
            elements=100,
            attended=69 if sparse else 100,
            context=100,
            computed=40,
            reused=60,
            evicted=31 if sparse else 0,
            preemptions=0,
        )
        speed = 0.5 if sparse else 1.0
        outputs.append(output(o.arm, o.prompt, o.ids, top=o.top, ttft=0.2 * speed, tpot=0.02 * speed, served=log))
    arms = {arm.arm: arm for arm in analyse(outputs).arms}
    b, a1 = arms["b"], arms["a1"]
    assert (a1.zero_share, b.zero_share, b.skipped_share, b.evicted_share) == (0.81, 0.93, pytest.approx(0.31), 0.31)
    assert (b.ttft_ratio.value, b.tpot_ratio.value, b.tpot_ratio.low, b.same_conditions) == (0.5, 0.5, 0.5, True)
    assert (a1.ttft_ratio, a1.same_conditions, b.reused_share) == (None, None, 0.6)


def test_what_no_log_says_is_unknown_and_not_zero():
    b = analyse(run(5)).arms[-1]
    assert (b.logged, b.zero_share, b.evicted_share, b.preemptions) == (0, None, None, None)


def test_differences_are_shown_by_the_length_of_the_context_they_came_at():
    outputs = run(20, b=dict.fromkeys(range(5), (30, 1.2, 0.9)), prompt_tokens=240)
    bins = {each.first: each for each in analyse(outputs).comparison("candidate").by_length}
    assert (bins[0].differences.events, bins[0].differences.at_risk) == (0, 20 * 16)
    assert (bins[256].differences.events, bins[256].hard) == (5, 5)
    assert bins[256].differences.at_risk == 15 * 24 + 5 * 15  # those that part are at risk up to there


# -------------------------------------------------------------------------------------------------- teacher forcing


def taught(arm, prompt, changes=(), margin=2.0, reference=None):
    ids = baseline_ids(prompt)
    top = [[(token, -0.1), (token + 1000, -0.1 - margin)] for token in ids]
    for index in changes:
        top[index] = [(ids[index] + 1000, -0.1), (ids[index], -0.1 - margin)]
    return Forced(arm=arm, prompt=prompt, reference=reference or f"a1-{prompt}-0-1-cold", ids=ids, top=top)


def test_every_position_counts_under_teacher_forcing():
    forced = [taught(arm, p, (3, 9) if arm == "b" else ()) for p in range(10) for arm in ("a1", "b")]
    (result,) = analyse(run(10), forced).forced
    assert (result.arm, result.path, result.reference) == ("b", "prefill path only", "a1, forced")
    assert (result.positions, result.disagreements, result.hard, result.hard_prompts.hits) == (400, 20, 20, 10)
    assert result.disagree.value == 0.05
    assert result.disagree.low < 0.05 < result.disagree.high
    assert (result.delta_median, result.delta_max) == (0.0, 4.0)
    assert [(each.last, each.disagree) for each in result.bins if each.disagree] == [(2.0, 20)]


def test_near_ties_under_teacher_forcing_are_not_hard():
    forced = [taught("b", p, (3,), margin=0.1) for p in range(10)]
    outputs = run(10)
    for o in outputs:
        o.top[3] = [(o.ids[3], -0.1), (o.ids[3] + 1000, -0.2)]
    (result,) = analyse(outputs, forced).forced
    assert (result.disagreements, result.hard, result.reference) == (10, 0, "the output itself")


def test_a_forced_request_that_failed_is_counted_and_compared_with_nothing():
    failed = Forced(arm="b", prompt=0, reference="a1-0-0-1-cold", ids=baseline_ids(0), error="timeout")
    (result,) = analyse(run(3), [failed, taught("b", 1)]).forced
    assert (result.failed, result.prompts, result.disagreements) == (1, 1, 0)


# -------------------------------------------------------------------------------------------------------- structure


def test_repeats_are_a_tree_with_forks_groups_and_entropy():
    first, second = parted("a1", 0, 20)[0].ids, parted("a1", 0, 7)[0].ids
    ids = [baseline_ids(0), baseline_ids(0), first, second]
    repeats = of(analyse([output("a1", 0, each, repeat=n) for n, each in enumerate(ids)]), "a1")
    (tree,) = repeats.trees
    assert [fork.index for fork in tree.forks] == [7, 20]
    assert (tree.largest, tree.entropy) == (0.5, pytest.approx(1.0397, abs=1e-4))
    assert repeats.hard_forks == 2


def test_the_order_in_which_outputs_are_given_changes_nothing():
    outputs = [o for r in (0, 1) for o in run(30, b=dict.fromkeys(range(7), (9, 1.2, 0.9)), repeat=r)]
    facts = Facts(order=list(range(30)))
    one, other = analyse(outputs, facts=facts), analyse(outputs[::-1], facts=facts)
    assert one.verdict == other.verdict
    assert one.comparison("candidate").hazard == other.comparison("candidate").hazard
    assert one.comparison("candidate").soft == other.comparison("candidate").soft


def test_failed_requests_are_counted_and_never_compared():
    broken = output("b", 3, baseline_ids(3)[:5], error="connection lost")
    outputs = [o for o in run(10) if (o.arm, o.prompt) != ("b", 3)] + [broken]
    analysis = analyse(outputs)
    assert (analysis.comparison("candidate").prompts, analysis.comparison("candidate").unpaired) == (9, 1)
    assert {arm.arm: arm.failed for arm in analysis.arms} == {"a1": 0, "a2": 0, "b": 1}


def test_a_pair_that_parts_hard_was_at_risk_of_a_tie_up_to_there():
    soft = (
        analyse(run(20, b=dict.fromkeys(range(1, 20), (5, 1.0, 1.0)), a2={0: (5, 0.0, 0.0)}))
        .comparison("candidate")
        .soft
    )
    assert (soft.events, soft.z < 0) == (1, True)
