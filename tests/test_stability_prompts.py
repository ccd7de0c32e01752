"""Prompts of a stability run: a file of the user's, and the set that ships."""

from collections import Counter

import pytest

from sparseety.errors import SparseetyError
from verifier.stability import prompts
from verifier.stability.plan import Job, Key, Plan, loads_of, stages


def test_the_set_that_ships_is_mixed_and_large_enough_for_the_sequential_test():
    shipped = prompts.load(None)
    assert len(shipped) >= 120
    kinds = Counter(prompt.kind for prompt in shipped)
    assert {"short", "long", "code", "chinese", "emoji", "other scripts", "multi-turn", "shared prefix"} <= set(kinds)
    assert all(count >= 2 for count in kinds.values())
    texts = [str(prompt.messages or prompt.prompt) for prompt in shipped]
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) > 4000
    assert any(prompt.prompt is not None for prompt in shipped)  # a completion, too


def test_a_context_stands_before_the_first_message_of_the_user():
    data = b"""
{"context": "sea", "text": "The sea is wide."}
{"context": "sea", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}
{"context": "sea", "prompt": "So", "kind": "completion"}
"""
    chat, completion = prompts.parse(data, "file")
    assert [message.content for message in chat.messages] == ["Be brief.", "The sea is wide.\n\nWhy?"]
    assert (completion.prompt, completion.kind) == ("The sea is wide.\n\nSo", "completion")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "messages": []}', 'file:2: it needs either "messages" or "prompt"'),
        (b"{}", 'file:2: it needs either "messages" or "prompt"'),
        (b'{"messages": []}', "file:2: an empty prompt"),
        (b'{"promt": "a"}', "file:2: Object contains unknown field `promt`"),
        (b'{"context": "sky", "prompt": "a"}', 'file:2: no line before it gives the text of the context "sky"'),
        (b"not json", "file:2: JSON is malformed"),
    ],
)
def test_a_wrong_line_is_named(line, said):
    with pytest.raises(SparseetyError, match="file:2") as caught:
        prompts.parse(b'{"prompt": "fine"}\n' + line, "file")
    assert said in str(caught.value)


def plan(**changes) -> Plan:
    fields = {"name": "run", "prompts_sha256": "", "prompts": 20, "repeats": 2, "loads": [1, 8], "caches": ["cold"]}
    return Plan(**(fields | {"max_tokens": 8, "top": 5, "forced": 0, "seed": 0} | changes))


def test_the_order_is_another_for_each_arm_and_the_same_again_for_the_same_seed():
    first, again = stages(plan(), "a1"), stages(plan(), "a1")
    assert first == again
    order = {name: [job.key for job in stages(plan(), name)[0].jobs] for name in ("a1", "a2", "b")}
    assert len({tuple(keys) for keys in order.values()}) == 3
    assert [job.key for job in stages(plan(seed=1), "a1")[0].jobs] != order["a1"]
    assert sorted(order["a1"]) == sorted(order["b"])


@pytest.mark.parametrize("loads", [[1], [2], [8], [1, 8], [1, 8, 16]])
def test_no_repeat_of_a_prompt_meets_the_same_load_in_both_runs_of_the_baseline(loads):
    assert loads_of("a1", loads) == loads_of("b", loads) == loads
    assert all(a != b and b >= 1 for a, b in zip(loads, loads_of("a2", loads), strict=True))


def test_each_attempt_at_each_request_has_a_name_of_its_own():
    names = {
        Job(arm, Key(prompt, repeat, cache), 1).request_id(plan(), session)
        for arm in ("a1", "b")
        for prompt in (1, 11)
        for repeat in (0, 1)
        for cache in ("cold", "warm")
        for session in ("", "1f", "2e")
    }
    assert len(names) == 2 * 2 * 2 * 2 * 3


def test_a_prompt_that_is_there_twice_is_no_evidence_of_its_own():
    with pytest.raises(SparseetyError, match=r"file:3: the same prompt as in line 1; repeats are asked for with -n"):
        prompts.parse(b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a", "kind": "other"}\n', "file")
