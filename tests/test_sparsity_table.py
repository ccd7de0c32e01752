"""Sums of sparsity records, and the table made of them."""

import csv
import io
from pathlib import Path

import pytest

from sampler_hook.sparsity_cli import main
from sparseety.clock import monotonic_clock
from sparseety.logwriter import LogWriter
from sparseety.records import AnyRecord, Phase, Scope, Site, Sparsity, SparsityStart
from sparseety.sparsity import SparsityTable


def start(*widths: int, rank: int = 0, threshold: float = 1e-6) -> SparsityStart:
    sites = [Site(name=f"layers.{layer}.down_proj", layer=layer, width=width) for layer, width in enumerate(widths)]
    return SparsityStart(
        ts=0.0, runtime="vllm 0", model="m", threshold=threshold, sites=sites, tensor_parallel_rank=rank
    )


def counted(tokens: int, *numbers: tuple[int, int, int], phase: Phase = "decode") -> Sparsity:
    """`numbers`: (zeros, near zeros, elements) of each site."""
    zeros, near, elements = (list(each) for each in zip(*numbers, strict=True))
    return Sparsity(ts=0.0, engine_id="a", phase=phase, tokens=tokens, zeros=zeros, near=near, elements=elements)


def table(*logs: list[AnyRecord]) -> SparsityTable:
    made = SparsityTable()
    for log in logs:
        made.add_log(log)
    return made


def rows(made: SparsityTable) -> list[dict[str, str]]:
    file = io.StringIO()
    made.write_csv(file)
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def test_the_overall_share_is_weighted_by_elements() -> None:
    made = table([start(10, 90), counted(1, (10, 10, 10), (0, 0, 90))])
    assert made.overall().zero_share == 0.1  # and not 0.5, the mean of 1 and 0


def test_records_of_one_request_and_of_many_add_up() -> None:
    made = table([start(10), counted(1, (4, 5, 10)), counted(2, (2, 3, 20), phase="prefill"), counted(1, (1, 1, 10))])
    counts = made.overall()
    assert (counts.zeros, counts.near, counts.elements) == (7, 9, 40)
    assert (made.overall(("prefill",)).zeros, made.overall(("decode",)).zeros) == (2, 5)


def test_ranks_of_a_tensor_parallel_group_add_up_to_the_whole_layer() -> None:
    made = table([start(5), counted(2, (1, 1, 10))], [start(5, rank=1), counted(2, (3, 3, 10))])
    decode = next(row for row in rows(made) if row["phase"] == "decode" and row["layer"] == "0")
    assert (decode["zeros"], decode["elements"], decode["elements_not_observed"]) == ("4", "20", "0")


def test_what_was_not_observed_has_no_share_and_is_no_zero() -> None:
    made = table([start(10, 10), counted(3, (15, 15, 30), (0, 0, 0))])
    unseen = [row for row in rows(made) if row["site"] == "layers.1.down_proj" and row["phase"] == "decode"]
    assert [(row["zero_share"], row["skips_over_half"], row["elements_not_observed"]) for row in unseen] == [
        ("", "", "30")
    ]
    assert [place.site for place in made.unseen()] == ["layers.1.down_proj"]
    assert made.overall().zero_share == 0.5


def test_a_layer_that_skips_more_than_half_is_listed_and_one_with_half_is_not() -> None:
    made = table([start(10, 10), counted(1, (5, 5, 10), (0, 6, 10))])
    assert [place.site for place in made.skipping()] == ["layers.1.down_proj"]


def test_what_was_computed_again_has_rows_of_its_own_and_is_in_no_sum() -> None:
    made = table([start(10), counted(1, (5, 5, 10)), counted(4, (40, 40, 40), phase="recomputed")])
    assert made.overall().elements == 10
    assert [row["elements"] for row in rows(made) if row["phase"] == "recomputed"] == ["40"]


def test_the_table_has_a_row_for_each_layer_and_phase_and_the_weighted_sums() -> None:
    made = table([start(10), counted(1, (5, 6, 10))])
    found = [(row["layer"], row["phase"], row["zero_share"], row["near_zero_share"]) for row in rows(made)]
    assert found == [
        ("0", "prefill", "", ""),
        ("0", "decode", "0.500000", "0.600000"),
        ("overall", "prefill", "", ""),
        ("overall", "decode", "0.500000", "0.600000"),
        ("overall", "", "0.500000", "0.600000"),
    ]
    assert {row["threshold"] for row in rows(made)} == {"1e-06"}


def test_the_command_adds_up_the_logs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = LogWriter(tmp_path / "logs", "worker", Scope(), clock=monotonic_clock())
    for record in (start(10, 10), counted(1, (6, 6, 10), (1, 2, 10))):
        writer.put(record)
    writer.close()
    assert main(["report", str(tmp_path / "logs"), "--csv", str(tmp_path / "out.csv")]) == 0
    out = capsys.readouterr().out
    assert "prefill not observed\n" in out
    assert "decode  35.00% zeros, 40.00% near zero (<= 1e-06), of 20 elements\n" in out
    assert "1 of 2 modules skip more than half: layers.0.down_proj\n" in out
    assert (tmp_path / "out.csv").read_text().startswith("layer,site,phase,zeros,near_zeros,elements,")


def test_logs_without_counts_are_an_error_that_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "SPARSEETY_HOOK_CAPTURE" in capsys.readouterr().err


def test_without_torch_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        assert main(["run", str(tmp_path), "--prompt", "x"]) == 2
        assert "torch and transformers" in capsys.readouterr().err
    else:
        pytest.skip("transformers is installed here")
