"""The verdict on a stability run, from the command line: a toy model, and what may be different about it."""

import json
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.toy_model_server import Toy, tokens, toy_serving
from verifier.stability import diff
from verifier.stability.cli import main

WORDS = ["sea", "wall", "stone", "gate", "lamp", "river", "boat", "hill", "mill", "cart", "rope", "bell"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """72 prompts of 9 to 13 tokens."""
    path = tmp_path / "prompts-in.jsonl"
    texts = [" ".join(WORDS[(n * k) % 12] for k in range(1, 10 + n % 5)) + f" {n}" for n in range(72)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def run(tmp_path: Path, prompts: Path, capsys):
    """Serve two toys, run, and return (exit code, stdout, stderr)."""

    def call(baseline: Toy, candidate: Toy, *arguments: str, out: str = "run") -> tuple[int, str, str]:
        fixed = ["run", "--out", str(tmp_path / out), "--prompts", str(prompts), "--max-tokens", "10", "--quiet"]
        fixed += ["--teacher-forcing", "4", "--concurrency", "4"]
        with ExitStack() as stack:
            a, b = (stack.enter_context(toy_serving(toy)) for toy in (baseline, candidate))
            code = main([*fixed, "--baseline", a, "--candidate", b, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_same_model_under_other_noise_is_accepted(run, tmp_path):
    """Its outputs do differ: one position in ten is a tie, and the noise decides it."""
    code, out, _ = run(Toy(noise=0.01), Toy(noise=0.01), "--json")
    assert code == 0
    result = json.loads(out)
    assert result["verdict"]["decision"] == "accept"
    candidate = next(each for each in result["comparisons"] if each["name"] == "candidate")
    assert candidate["hard"]["hits"] == 0
    assert len(candidate["differences"]) >= 10


@pytest.mark.parametrize("loads", ["1", "4", "1,4", "1,2,4"])
def test_every_output_has_its_counterpart_in_every_other_arm(run, loads):
    arguments = ("--first", "5", "-n", "2", "--cache", "cold,warm", "--concurrency", loads, "--json")
    _, out, _ = run(Toy(), Toy(), *arguments)
    outputs = 5 * 2 * 2 * len(loads.split(","))
    for comparison in json.loads(out)["comparisons"]:
        assert (comparison["name"], comparison["pairs"], comparison["unpaired"]) == (comparison["name"], outputs, 0)


def test_the_page_has_text_only_if_it_was_asked_for(run, tmp_path):
    page = tmp_path / "run.html"
    tokenizer = str(Path(__file__).parent / "data" / "toy" / "bytebpe.json")
    run(Toy(), Toy(weights="two"), "--html", str(page))
    assert "Text is hidden" in page.read_text()
    assert main(["compare", str(tmp_path / "run"), "--html", str(page), "--show-text", "--tokenizer", tokenizer]) == 1
    assert "B goes on" in page.read_text()
    assert "Text is hidden" not in page.read_text()


def test_a_model_that_sees_less_is_rejected_and_the_first_difference_shown(run, tmp_path, capsys):
    code, out, _ = run(Toy(noise=0.01), Toy(noise=0.01, window=12), "--gate", "budget=12")
    assert code == 1
    assert "VERDICT  REJECT" in out
    assert "hard divergence: prompt" in out
    folder = str(tmp_path / "run")
    assert main(["compare", folder, "--gate", "budget=12"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == out.splitlines()[0]
    assert diff.main([folder]) == 1
    said = capsys.readouterr().out
    assert "72 pairs:" in said
    assert "HARD" in said
    number = said.split("prompt ")[1].split()[0]
    assert diff.main([folder, "--prompt", number]) == 1
    assert f"prompt {number}" in capsys.readouterr().out
    assert diff.main([f"{folder}:a1", f"{folder}:a1"]) == 0


def test_a_run_says_for_every_program_what_it_says_to_people(run, tmp_path):
    files = {name: tmp_path / name for name in ("junit.xml", "run.prom", "run.html")}
    arguments = ("--junit", str(files["junit.xml"]), "--prom-textfile", str(files["run.prom"]))
    code, _, _ = run(Toy(), Toy(weights="two"), *arguments, "--html", str(files["run.html"]))
    assert code == 1
    assert ElementTree.parse(files["junit.xml"]).getroot().find(".//failure") is not None
    assert "# TYPE" in files["run.prom"].read_text()
    assert "REJECT" in files["run.html"].read_text()


def test_too_few_prompts_are_no_verdict(run):
    code, out, _ = run(Toy(), Toy(), "--first", "20")
    assert code == 3
    assert "VERDICT  INCONCLUSIVE" in out
    assert "too few prompts" in out


def test_prompts_inside_the_budget_are_no_verdict(run):
    code, out, _ = run(Toy(), Toy(window=512), "--gate", "budget=512")
    assert code == 3
    assert "0% of tokens were generated with a context of more than 512" in out


def test_a_noisy_baseline_is_no_verdict_on_the_candidate(run):
    code, out, _ = run(Toy(noise=2.0), Toy(weights="two"))
    assert code == 3
    assert "the bench is broken, not the candidate" in out


def test_a_server_that_dies_midway_is_no_verdict_and_what_came_is_shown(run):
    code, out, err = run(Toy(), Toy(die_after=60))
    assert code == 3
    assert "the run stopped: 5 requests in a row failed" in out
    assert "stopped: 5 requests in a row failed" in err
    assert "A1 vs A2" in out  # the partial result
    assert "exit code 3" in out


def test_a_part_of_a_run_is_no_verdict(tmp_path, prompts, capsys):
    fixed = ["run", "--out", str(tmp_path / "run"), "--prompts", str(prompts), "--max-tokens", "6", "--quiet"]
    with toy_serving(Toy()) as url:
        assert main([*fixed, "--baseline", url]) == 3
        assert "INCONCLUSIVE" in capsys.readouterr().out
        assert main([*fixed, "--candidate", url]) == 0
        assert "ACCEPT" in capsys.readouterr().out


def test_any_arm_can_be_judged_and_measured_by_another(run, tmp_path, capsys):
    with toy_serving(Toy(noise=0.01)) as other, toy_serving(Toy(weights="two")) as worse:
        code, _, _ = run(Toy(), Toy(), "--yardstick", f"mild={other}", "--yardstick", f"worse={worse}")
    assert code == 0
    folder = str(tmp_path / "run")
    assert main(["compare", folder, "--as-candidate", "worse", "--as-yardstick", "mild"]) == 1
    said = capsys.readouterr().out
    assert "B moves more than mild" in said
    assert "A1 vs mild" in said
    assert "A1 vs worse" not in said  # it is B now
    assert main(["compare", folder, "--as-candidate", "nobody"]) == 2
    assert "no arm nobody in this run; it has: a1, a2, b, mild, worse" in capsys.readouterr().err


def test_one_arm_as_the_baseline_has_its_repeats_as_noise_and_no_other_servers_outputs(run, tmp_path, capsys):
    with toy_serving(Toy(weights="two")) as other:
        run(Toy(), Toy(), "--yardstick", f"two={other}", "-n", "2")
    folder = str(tmp_path / "run")
    assert main(["compare", folder, "--as-baseline", "two", "--as-candidate", "two"]) == 0
    said = capsys.readouterr().out
    assert "A1 repeats" in said
    assert "A1 vs A2" not in said  # A2 is of another model
    assert "VERDICT  ACCEPT" in said


def test_the_candidate_may_be_in_a_run_of_its_own(tmp_path, prompts, capsys):
    with toy_serving(Toy()) as url:
        for out, arm in (("dense", "--baseline"), ("sparse", "--candidate")):
            fixed = ["run", "--out", str(tmp_path / out), "--prompts", str(prompts), "--max-tokens", "6", "--quiet"]
            assert main([*fixed, arm, url, "--gather", "--teacher-forcing", "0"]) == 0
        capsys.readouterr()
        assert main(["compare", str(tmp_path / "dense"), str(tmp_path / "sparse")]) == 0
        fixed = ["run", "--out", str(tmp_path / "longer"), "--prompts", str(prompts), "--max-tokens", "7", "--quiet"]
        assert main([*fixed, "--candidate", url, "--gather", "--teacher-forcing", "0"]) == 0
    assert main(["compare", str(tmp_path / "dense"), str(tmp_path / "longer")]) == 2
    assert "cannot be compared: their max_tokens differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gate", "p9=1"], '--gate "p9=1" is not NAME=VALUE; names: p0, p1'),
        (["--gate", "p0=x"], "--gate p0: Expected float, got str"),
        (["--gate", "truncate=0"], "--gate truncate: Expected int >= 1"),  # rejected what did not differ
        (["--gate", "confidence=95"], "--gate confidence: Expected float < 1.0"),
        (["--gate", "p0=0.06", "--gate", "p1=0.02"], "--gate: p0 (0.06) must be below p1 (0.02)"),
        (["--gate", "dtype=fp32"], "one of: bfloat16, float16, float32, float64"),  # was taken for bfloat16
        (["--as-baseline", "b,b,b"], "one arm, or two that are the same server twice"),
        (["--as-yardstick", "a2=b"], "--as-yardstick b needs a name of its own"),
        (["--show-text"], "--show-text makes text of ids: give --tokenizer too"),
    ],
)
def test_wrong_use_of_the_gate_is_said_in_words(tmp_path, prompts, capsys, arguments, said):
    with toy_serving(Toy()) as url:
        fixed = ["run", "--out", str(tmp_path / "run"), "--prompts", str(prompts), "--max-tokens", "4", "--quiet"]
        assert main([*fixed, "--candidate", url, "--gather", "--first", "2"]) == 0
    assert main(["compare", str(tmp_path / "run"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 2
    assert "holds no stability run (no plan.json in it)" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- the same prompt N times


def single(url: str, *arguments: str) -> int:
    return main(["single", "8", "--url", url, "--prompt", "sea wall stone", "--max-tokens", "20", "-q", *arguments])


def test_the_same_prompt_many_times_gives_each_distinct_output_its_count(capsys):
    with toy_serving(Toy()) as url:
        assert single(url) == 0
    said = capsys.readouterr().out
    assert "8 requests   1 distinct outputs" in said
    assert "#1  8 times  20 tokens" in said
    assert "text hidden" in said


def test_text_is_shown_where_asked_for_and_comes_from_the_stream_itself(capsys):
    with toy_serving(Toy()) as url:
        assert single(url, "--show-text") == 0
    said = capsys.readouterr().out
    ids = [top[0][0] for top in Toy().generate(tokens("<user> sea wall stone"), 20, "")]
    assert " ".join(map(str, ids)) in said


def test_repeats_that_part_at_ties_are_healthy_unless_bitwise_equality_is_the_contract(capsys):
    with toy_serving(Toy(noise=0.01)) as url:
        assert single(url, "--concurrency", "4") == 0
        assert "1 distinct outputs" not in capsys.readouterr().out
        assert single(url, "--contract", "bitwise") == 1


def test_repeats_that_part_where_no_tie_explains_it_are_a_fault(capsys):
    with toy_serving(Toy(noise=3.0)) as url:
        assert single(url) == 1
    assert "fork at token" in capsys.readouterr().out


def test_a_single_request_is_nothing_to_compare(capsys):
    with toy_serving(Toy()) as url:
        assert main(["single", "1", "--url", url, "--prompt", "sea", "--max-tokens", "4", "-q"]) == 3


def test_repeats_of_which_too_many_failed_are_no_pass(capsys):
    with toy_serving(Toy(fail_every=3)) as url:
        assert single(url) == 3
    assert "failed: HTTP 503: busy" in capsys.readouterr().out


def test_outputs_without_a_counterpart_are_counted_by_diff(tmp_path, prompts, capsys):
    with toy_serving(Toy()) as url:
        fixed = ["run", "--out", str(tmp_path / "run"), "--prompts", str(prompts), "--max-tokens", "4", "--quiet"]
        fixed += ["--baseline", url, "--gather", "--first", "9", "--teacher-forcing", "0"]
        assert main([*fixed, "--only", "a1"]) == 0
        assert main([*fixed, "--only", "a2", "--max-requests", "9"]) == 3
    capsys.readouterr()
    assert diff.main([f"{tmp_path / 'run'}:a1", f"{tmp_path / 'run'}:a2"]) == 0
    assert "5 pairs: 5 equal, 0 different\n4 outputs have no counterpart" in capsys.readouterr().out


def test_a_candidate_that_is_the_baseline_is_said_to_be(tmp_path, prompts, capsys):
    with toy_serving(Toy()) as url:
        fixed = ["run", "--out", str(tmp_path / "run"), "--prompts", str(prompts), "--max-tokens", "4", "--gather"]
        assert main([*fixed, "--baseline", url, "--candidate", url, "--only", "b", "--first", "2"]) == 0
    assert "one server: it is compared with itself" in capsys.readouterr().err
