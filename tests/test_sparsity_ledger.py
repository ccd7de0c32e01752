"""Which request and phase each row of a step belongs to, and what of it is a second look."""

from sampler_hook.ledger import Ledger, Rows, Segment


def rows(start: int, count: int, name: str = "a", prompt: int = 5, drafts: int = 0, exact: bool = True) -> Rows:
    return Rows(name, count, start=start, prompt_len=prompt, drafts=drafts, exact=exact)


def phases(ledger: Ledger, *steps: Rows) -> list[list[tuple[str, int | None, int]]]:
    return [[(each.phase, each.start, each.count) for each in ledger.segments([step])] for step in steps]


def test_the_prompt_is_prefill_and_what_was_generated_is_decode() -> None:
    assert phases(Ledger(), rows(0, 5), rows(5, 1), rows(6, 1)) == [
        [("prefill", 0, 5)],
        [("decode", 5, 1)],
        [("decode", 6, 1)],
    ]


def test_a_prompt_in_chunks_is_all_prefill() -> None:
    assert phases(Ledger(), rows(0, 3), rows(3, 2), rows(5, 1)) == [
        [("prefill", 0, 3)],
        [("prefill", 3, 2)],
        [("decode", 5, 1)],
    ]


def test_tokens_from_the_prefix_cache_are_not_computed_and_not_counted() -> None:
    assert phases(Ledger(), rows(4, 1)) == [[("prefill", 4, 1)]]


def test_after_a_preemption_the_same_positions_are_recomputed_and_counted_apart() -> None:
    steps = (rows(0, 5), rows(5, 1), rows(6, 1), rows(0, 8), rows(8, 1))
    assert phases(Ledger(), *steps)[3:] == [[("recomputed", 0, 7), ("decode", 7, 1)], [("decode", 8, 1)]]


def test_a_request_preempted_within_its_prompt_goes_on_where_it_was() -> None:
    assert phases(Ledger(), rows(0, 3), rows(0, 4), rows(4, 1))[1:] == [
        [("recomputed", 0, 3), ("prefill", 3, 1)],
        [("prefill", 4, 1)],
    ]


def test_the_position_of_a_rejected_draft_is_computed_for_the_first_time() -> None:
    steps = (rows(0, 5), rows(5, 4, drafts=3), rows(7, 4, drafts=3))  # one of three drafts was accepted
    assert phases(Ledger(), *steps)[1:] == [[("decode", 5, 4)], [("decode", 7, 4)]]


def test_drafts_are_counted_where_they_were_computed() -> None:
    (segment,) = Ledger().segments([rows(5, 4, drafts=3)])
    assert segment == Segment("a", "decode", 5, 4, drafts=3)


def test_a_start_that_may_be_too_high_gives_a_phase_but_no_positions() -> None:
    ledger = Ledger()
    assert phases(ledger, rows(0, 5, exact=False), rows(9, 1, exact=False), rows(7, 1, exact=False)) == [
        [("prefill", None, 5)],
        [("decode", None, 1)],
        [("decode", None, 1)],
    ]


def test_each_row_of_a_batch_has_the_slot_of_its_own_request() -> None:
    ledger = Ledger()
    first = ledger.place(ledger.segments([rows(0, 3, "a", prompt=3), rows(0, 2, "b", prompt=2)]), 0)
    assert first == [0, 0, 0, 1, 1]
    second = ledger.place(ledger.segments([rows(2, 1, "b", prompt=2), rows(3, 1, "a", prompt=3)]), 1)
    assert second == [2, 3]
    assert ledger.capacity == 4


def test_a_finished_request_leaves_what_it_computed_and_its_slots() -> None:
    ledger = Ledger()
    ledger.place(ledger.segments([rows(0, 5)]), 0)
    ledger.place(ledger.segments([rows(5, 1)]), 1)
    ledger.place(ledger.segments([rows(6, 1)]), 2)
    left = ledger.finished(["a", "never seen"])
    assert [(slot.phase, slot.tokens, slot.positions, slot.step) for slot in left] == [
        ("prefill", 5, [(0, 5)], 0),
        ("decode", 2, [(5, 2)], 2),
    ]
    assert ledger.finished(["a"]) == []
    ledger.place(ledger.segments([rows(0, 5, "b")]), 3)
    assert ledger.capacity == 2  # its slots are used again


def test_a_long_request_is_written_down_in_parts_that_leave_nothing_out() -> None:
    ledger = Ledger(every=4)
    parts = []
    for position in range(11):
        ledger.place(ledger.segments([rows(position, 1, prompt=0)]), position)
        parts += ledger.due()
    parts += ledger.finished()
    assert [slot.positions for slot in parts] == [[(0, 4)], [(4, 4)], [(8, 3)]]
    assert {slot.index for slot in parts} == {0}


def test_a_slot_with_nothing_new_is_not_written_down_again() -> None:
    ledger = Ledger(every=4)
    ledger.place(ledger.segments([rows(0, 5)]), 0)
    assert len(ledger.due()) == 1
    assert ledger.finished() == []


def test_an_id_used_again_after_its_end_begins_anew() -> None:
    ledger = Ledger()
    ledger.place(ledger.segments([rows(0, 5)]), 0)
    ledger.finished(["a"])
    assert phases(ledger, rows(0, 5)) == [[("prefill", 0, 5)]]
