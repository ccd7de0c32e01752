"""Accept, reject, or say that it cannot be told: by contract, with exit codes."""

from random import Random

import pytest
from msgspec.structs import replace

from tests.stability_runs import baseline_ids, output, run, tops
from verifier.stability.analysis import analyse
from verifier.stability.gate import sprt
from verifier.stability.model import Forced
from verifier.stability.result import ArmFacts, Facts, GateSettings

HARD = (5, 1.2, 0.9)
TIE = (5, 0.1, 0.1)


def parts(prompts, how):
    return dict.fromkeys(prompts, how)


def verdict(outputs, contract="same-model", forced=(), facts=None, **settings):
    return analyse(outputs, forced, GateSettings(**settings), contract, facts).verdict


# ------------------------------------------------------------------------------------------------------ same-model


def test_71_prompts_without_a_hard_difference_are_accepted_and_70_are_too_few():
    accepted, too_few = verdict(run(71)), verdict(run(70))
    assert (accepted.decision, accepted.exit_code) == ("accept", 0)
    assert (too_few.decision, too_few.exit_code) == ("inconclusive", 3)
    assert "too few prompts" in too_few.reasons[0]


def test_outputs_that_part_at_ties_alone_are_accepted_however_many():
    analysis = analyse(run(71, b=parts(range(71), TIE), a2=parts(range(0), TIE)))
    assert analysis.verdict.exit_code == 0
    assert analysis.comparison("candidate").identical.hits == 0


def test_hard_differences_are_rejected_and_the_first_one_is_named():
    analysis = analyse(run(71, b=parts(range(20, 40), HARD)))
    assert analysis.verdict.exit_code == 1
    assert "hard first difference" in analysis.verdict.reasons[0]


def test_the_test_follows_the_order_of_the_plan_not_that_of_the_replies():
    outputs = run(200, b=parts(range(190, 200), HARD))
    backwards = Facts(order=list(range(199, -1, -1)))
    assert analyse(outputs).verdict.sprt.prompts == 71
    early = analyse(outputs, facts=backwards).verdict
    assert (early.exit_code, early.sprt.prompts, early.sprt.hard) == (1, 3, 3)
    shuffled = outputs.copy()
    Random(0).shuffle(shuffled)
    assert analyse(shuffled, facts=backwards).verdict.sprt == early.sprt


@pytest.mark.parametrize(
    ("hard", "decision", "truncated"),
    [
        ([False] * 71, "accept", False),
        ([True] * 3, "reject", False),
        ([True, *[False] * 70], "inconclusive", False),
        ([True, *[False] * 98], "accept", False),  # one more costs ln(3) / 0.04167 = 27 prompts
        (([True] + [False] * 27) * 22, "accept", True),  # 22 of 600: an upper bound of 5.5 %
    ],
)
def test_the_sequential_test_decides_where_wald_says(hard, decision, truncated):
    test = sprt(hard, GateSettings())
    assert (test.decision, test.truncated) == (decision, truncated)
    assert (test.accept_below, test.reject_above) == (pytest.approx(-2.944, abs=0.001), pytest.approx(2.944, abs=0.001))


def test_what_is_left_open_at_the_end_is_rejected_above_the_wilson_bound():
    for hard, decision, truncated in ((1, "accept", False), (4, "reject", True)):  # 4 of 100: up to 9.8 %
        test = sprt([False] * 50 + [True] * hard + [False] * (50 - hard), GateSettings(truncate=100))
        assert (test.decision, test.truncated) == (decision, truncated)


def test_a_prompt_counts_once_however_many_repeats_fork_there():
    outputs = [o for r in range(4) for o in run(71, b=parts(range(5), HARD), repeat=r)]
    candidate = analyse(outputs).comparison("candidate")
    assert (candidate.hard.hits, candidate.hard.of, candidate.pairs) == (5, 71, 284)
    assert candidate.identical_pairs.method == "prompts resampled"
    assert candidate.hazard.method == "prompts resampled"


def test_without_a_noise_arm_nothing_is_concluded_unless_a1_was_repeated():
    outputs = run(71, arms=("a1", "b"))
    assert "no noise arm" in verdict(outputs).reasons[0]
    assert verdict(outputs).exit_code == 3
    again = [output("a1", prompt, repeat=1) for prompt in range(71)]
    assert verdict([*outputs, *again]).exit_code == 0


def test_a_noisy_baseline_breaks_the_bench_not_the_candidate():
    noisy = verdict(run(100, a2=parts(range(3), HARD), b=parts(range(50), (9, 1.0, 1.0))))
    assert noisy.exit_code == 3
    assert "the bench is broken, not the candidate" in noisy.reasons[0]
    assert verdict(run(100, a2=parts(range(2), HARD))).exit_code == 0  # 2 % is not more than p0


def test_ties_that_come_sooner_are_a_warning_alone():
    told = verdict(run(200, b=parts(range(150), TIE), a2=parts(range(150, 160), TIE)))
    assert told.exit_code == 0
    assert any("times as often as in the noise arm" in warning for warning in told.warnings)
    alike = verdict(run(200, b=parts(range(40), TIE), a2=parts(range(40, 80), TIE)))
    assert not any("times as often as in the noise arm (log-rank" in warning for warning in alike.warnings)


# --------------------------------------------------------------------------------------------------------- validity


def test_prompts_within_the_sparsity_budget_prove_nothing():
    told = verdict(run(71), budget=2048)
    assert told.exit_code == 3
    assert "take longer prompts" in told.reasons[0]
    assert verdict(run(71), budget=110).exit_code == 0  # 100 tokens of prompt, 40 of output: 29 of 40 are beyond


def test_a_stream_that_failed_verification_ends_it():
    outputs = [*run(71), output("b", 71, verdict="fail"), output("a1", 71), output("a2", 71)]
    told = verdict(outputs)
    assert told.exit_code == 3
    assert "b-71-0-1-cold" in told.reasons[0]


def test_streams_that_nobody_verified_are_said_and_do_not_end_it():
    analysis = analyse(run(71, verdict=None))
    assert analysis.verdict.exit_code == 0
    assert next(c for c in analysis.checks if c.name == "streams verified").ok is None


def test_prompts_that_reached_the_arms_as_other_ids_end_it():
    outputs = [*run(71), output("a1", 71), output("a2", 71), output("b", 71, prompt_sha256="another")]
    assert verdict(outputs).reasons[0].startswith("prompt ids equal")
    outputs = [*run(71), output("a1", 71), output("a2", 71), output("b", 71, prompt_sha256=None, prompt_tokens=99)]
    assert verdict(outputs).reasons[0].startswith("prompt ids equal")


def test_other_tokenizers_or_parameters_end_it():
    arms = {"a1": ArmFacts(tokenizer="aa", parameters={"temperature": "0"})}
    for other in (
        ArmFacts(tokenizer="bb", parameters={"temperature": "0"}),
        ArmFacts(tokenizer="aa", parameters={"temperature": "0.6"}),
    ):
        assert verdict(run(71), facts=Facts(arms=arms | {"b": other})).exit_code == 3
    assert verdict(run(71), facts=Facts(arms=arms | {"b": arms["a1"]})).exit_code == 0


def test_a_server_that_died_midway_leaves_its_results_and_no_verdict():
    outputs = run(100)
    lost = {o.prompt: output("b", o.prompt, [], error="connection lost") for o in outputs if o.prompt >= 80}
    analysis = analyse([lost[o.prompt] if o.arm == "b" and o.prompt in lost else o for o in outputs])
    assert analysis.verdict.exit_code == 3
    assert analysis.verdict.reasons == ["complete: 280 of 300 planned requests ended well (20 x b: connection lost)"]
    assert analysis.comparison("candidate").prompts == 80


def test_a_candidate_may_not_fail_where_it_would_differ():
    outputs = run(200, b=dict.fromkeys(range(8), HARD))
    outputs = [output("b", o.prompt, [], error="HTTP 500") if o.arm == "b" and o.prompt < 8 else o for o in outputs]
    told = verdict(outputs)  # 8 of 600 requests are few, 8 of the candidate's 200 are not
    assert (told.exit_code, told.reasons[0]) == (
        3,
        "complete: 592 of 600 planned requests ended well (8 x b: HTTP 500)",
    )


def test_outputs_of_a_few_tokens_are_said_to_prove_little():
    outputs = [output(o.arm, o.prompt, o.ids[:4]) for o in run(71)]
    assert any("only 4 tokens a pair" in warning for warning in verdict(outputs).warnings)
    assert not any("tokens a pair" in warning for warning in verdict(run(71)).warnings)


def test_requests_that_were_never_sent_count_as_missing():
    told = verdict(run(80), facts=Facts(planned=600))
    assert told.exit_code == 3
    assert "240 of 600" in told.reasons[0]


def test_no_log_probabilities_no_verdict_on_what_differs():
    outputs = [output(o.arm, o.prompt, o.ids, top=[]) for o in run(71, b=parts(range(3), TIE))]
    told = verdict(outputs)
    assert told.exit_code == 3
    assert told.reasons[0].startswith("log probabilities")


def test_nothing_at_all_is_no_pass():
    assert analyse([]).verdict.exit_code == 3


# ---------------------------------------------------------------------------------------------------------- bitwise


def test_bitwise_takes_no_difference_and_enough_prompts():
    assert verdict(run(100), "bitwise").exit_code == 0
    assert "3.7%" in verdict(run(100), "bitwise").reasons[0]
    assert verdict(run(100, b=parts([7], (5, 0.0, 0.0))), "bitwise").exit_code == 1
    assert verdict(run(20), "bitwise").exit_code == 3
    noisy = verdict(run(100, a2=parts([7], (5, 0.0, 0.0))), "bitwise")
    assert (noisy.exit_code, "not bitwise equal to itself" in noisy.reasons[0]) == (3, True)


def test_bitwise_needs_no_log_probabilities_and_no_candidate():
    outputs = [output("a1", prompt, repeat=repeat, top=[]) for prompt in range(100) for repeat in (0, 1)]
    assert verdict(outputs, "bitwise").exit_code == 0


# --------------------------------------------------------------------------------------------------- bounded-change


def forced(arm, every, prompts=16):
    """Another token at each so many positions of each prompt; 0: at none."""
    found = []
    for prompt in range(prompts):
        ids = baseline_ids(prompt)
        thought = [token + 1000 if every and n % every == 1 else token for n, token in enumerate(ids)]
        reference = f"a1-{prompt}-0-1-cold"
        found.append(Forced(arm=arm, prompt=prompt, reference=reference, ids=ids, top=tops(thought)))
    return found


def test_a_change_within_all_bounds_is_accepted():
    outputs = run(200, b=parts(range(100, 140), TIE), a2=parts(range(50), TIE))
    told = verdict(outputs, "bounded-change", [*forced("a1", 0, 40), *forced("b", 0, 40)])
    assert told.exit_code == 0
    assert [bound.name for bound in told.bounds] == [
        "hard rate",
        "hazard ratio to the noise arm",
        "teacher-forced disagreement",
    ]


@pytest.mark.parametrize(
    ("b", "every", "beyond"),
    [
        (parts(range(60, 100), (5, 1.0, 1.0)), 0, "hard rate"),
        (parts(range(60, 180), TIE), 0, "hazard ratio"),
        ({}, 8, "teacher-forced disagreement"),
    ],
)
def test_one_bound_that_is_exceeded_rejects(b, every, beyond):
    outputs = run(200, b=b, a2=parts(range(30), TIE))
    told = verdict(outputs, "bounded-change", [*forced("a1", 0), *forced("b", every)])
    assert told.exit_code == 1
    assert told.reasons[0].startswith(beyond)


def test_too_few_prompts_to_tell_a_bound_are_inconclusive():
    told = verdict(run(20, b=parts([3], HARD), a2=parts([5], TIE)), "bounded-change")
    assert told.exit_code == 3
    assert any("nothing was teacher-forced" in warning for warning in told.warnings)


def yardstick(outputs, prompts, how):
    """The same outputs with the candidate's as a yardstick's too, parted at other prompts."""
    other = run(len({o.prompt for o in outputs}), b=parts(prompts, how))
    found = {o.prompt: o for o in other if o.arm == "b"}
    lists = {o.prompt: o.top for o in other if o.arm == "a1"}
    for o in outputs:
        if o.arm == "a1" and o.prompt in prompts:
            o.top[how[0]] = lists[o.prompt][how[0]]
    named = [output("fp8", prompt, o.ids, top=o.top) for prompt, o in found.items()]
    return [*outputs, *named]


def test_no_worse_than_a_yardstick_is_within_and_worse_is_beyond():
    moved = yardstick(run(200, b=parts(range(20, 60), TIE)), range(40, 90), (9, 0.2, 0.1))
    within = analyse(moved, contract="bounded-change")
    assert within.verdict.exit_code == 0
    assert within.verdict.bounds[0].name == "hard rate over yardstick"
    worse = yardstick(run(200, b=parts(range(20, 60), HARD)), range(40, 90), (9, 0.2, 0.1))
    beyond = analyse(worse, contract="bounded-change")
    assert beyond.verdict.exit_code == 1
    assert beyond.yardsticks[0].reading == "more"
    assert (beyond.yardsticks[0].hard_candidate_only, beyond.yardsticks[0].hard_yardstick_only) == (40, 0)


def test_how_a_candidate_moves_beside_a_yardstick_is_said_only_where_it_can_be_told():
    def reading(b, prompts, how, n=200):
        return analyse(yardstick(run(n, b=b), prompts, how)).yardsticks[0].reading

    assert reading(parts(range(10), TIE), range(40, 190), (9, 0.2, 0.1)) == "less"
    assert reading(parts(range(5), TIE), range(40, 46), (9, 0.2, 0.1)) == "not told apart"
    assert reading(parts(range(0, 600, 2), TIE), range(1, 600, 2), (5, 0.1, 0.1), n=600) == "as much"
    assert reading({}, range(40, 80), (9, 2.0, 2.0)) == "less"


def test_a_yardstick_that_is_not_there_is_no_verdict():
    assert verdict(run(71), "bounded-change", yardstick="fp8").exit_code == 3


def test_every_bound_can_be_left_out():
    told = verdict(run(71), "bounded-change", hard_rate=None, hazard_ratio=None, forced_disagreement=None)
    assert (told.exit_code, told.reasons) == (3, ["no bound is asked for"])


def test_a_candidate_with_a_shorter_context_is_no_other_model_but_not_wholly_compared():
    """vLLM caps max_tokens at what max_model_len leaves, without a word."""
    outputs = run(100, arms=("a1", "a2"))
    outputs += [output("b", p, baseline_ids(p)[: 12 if p % 2 else 40], finish="length") for p in range(100)]
    result = analyse(outputs)
    assert result.verdict.decision == "accept"
    assert (result.comparison("candidate").kinds, result.comparison("candidate").hazard.at_risk) == ({}, 50 * 52)
    (check,) = [check for check in result.checks if check.name == "outputs cut at one length"]
    assert "in 50 pairs one output was cut earlier" in check.detail
    assert verdict(outputs, "bitwise").decision == "inconclusive"
    outputs = [replace(o, ids=o.ids[:3], top=o.top[:3]) if o.arm == "b" else o for o in outputs]
    assert verdict(outputs).decision == "inconclusive"  # too little is left of it


def test_an_arm_that_broke_off_early_is_not_complete_however_many_others_there_are():
    arms = ("a1", "a2", *(f"y{n}" for n in range(8)))
    outputs = [output(arm, prompt) for arm in arms for prompt in range(100)] + [output("b", p) for p in range(85)]
    decided = verdict(outputs, facts=Facts(planned=1100))
    assert decided.decision == "inconclusive"
    assert "complete: 1085 of 1100 planned requests" in decided.reasons[0]
