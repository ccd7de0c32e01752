"""What the logs take on disk, measured on real streams. benchmarks/log_budget.py prints the figures."""

from benchmarks.log_budget import LINE_BUDGET, ROOT, TOKEN_BUDGET, chunk_lines, of_four_characters, packed_sizes


def test_a_chunk_line_of_a_four_character_delta_keeps_its_budget():
    sizes = of_four_characters(chunk_lines(ROOT / "tests/data/sse"))
    assert len(sizes) > 10
    assert max(sizes) <= LINE_BUDGET


def test_both_logs_packed_keep_their_budget_for_each_token():
    sizes = list(packed_sizes([ROOT / "deploy/demo/streams.jsonl"]))
    packed = [size / tokens for source, size, tokens in sizes if source in ("proxy", "engine")]
    assert len(packed) == 2
    assert 5 < sum(packed) <= TOKEN_BUDGET
