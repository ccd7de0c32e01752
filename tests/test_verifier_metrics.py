"""What a watch publishes: each definition of the catalogue and nothing else, and numbers that add up."""

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparseety.metrics import most_series
from tests.logbook import BYTE_LEVEL, EOS, Logbook
from tests.test_hook_metrics import parse
from tests.test_verifier_run import HELLO, WORLD
from verifier.catalogue import MODELS, RUN, TOKENS, WATCH
from verifier.findings import RequestVerdict, Verdict
from verifier.metrics import Metrics
from verifier.options import JudgeOptions
from verifier.run import verify
from verifier.tokenizer import TokenizerShelf

Found = dict[str, dict[str, float]]


def published(folder: Path, *, engines: bool = True, options: JudgeOptions | None = None) -> Found:
    """Samples by name, then by labels as text, after a log's requests were judged."""
    metrics = Metrics(drift=options is not None and options.drift)
    report = verify(sorted(folder.iterdir()), TokenizerShelf([]), options=options or JudgeOptions())
    for verdict in report.verdicts:
        metrics.judged(verdict, engines=engines)
    metrics.unusable(report.problems.torn)
    return parse(metrics.series.text().decode())


def tokens(found: Found, model: str = "toy") -> dict[str, float]:
    of = {label.partition("result=")[2]: value for label, value in found["sparseety_verify_tokens_total"].items()
          if f"model_name={model}," in label}  # fmt: skip
    return {result: count for result, count in of.items() if count}


def test_the_scrape_has_each_metric_of_the_catalogue_before_anything_happens_and_no_other() -> None:
    metrics = Metrics()
    port = metrics.serve("127.0.0.1", 0)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families.keys() == {metric.name for metric in WATCH}
    for metric in WATCH:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        assert family.documentation.startswith("ALPHA ")
        names = {label.name for label in metric.labels} | ({"le"} if metric.bounds else set())
        assert family.samples
        for sample in family.samples:
            assert set(sample.labels) <= names
            for label in metric.labels:
                assert not label.values or sample.labels[label.name] in label.values


def test_labels_keep_to_their_closed_sets_whatever_is_found(tmp_path: Path) -> None:
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " wOrld"])
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-2", model="made up by a client")
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-3", usage=7, end_marker=False)
    book.stream("chatcmpl-4", ["hello"])
    found = published(book.write(tmp_path / "logs"))
    allowed = {label.name: set(label.values) for metric in WATCH for label in metric.labels if label.values}
    for name, samples in found.items():
        for text in samples:
            labels = dict(pair.split("=", 1) for pair in text.split(",") if pair)
            for label in labels.keys() & allowed.keys() - {"result"}:
                assert labels[label] in allowed[label], name
    assert sum(found["sparseety_verify_requests_total"].values()) == 4
    assert "made up" not in str(found)


@pytest.mark.parametrize(
    ("ids", "pieces", "expected"),
    [
        ([HELLO, WORLD, EOS], ["hello", " world"], {"match": 3}),
        ([HELLO, WORLD, EOS], ["hello", " wOrld"], {"match": 2, "mismatch": 1}),
        ([HELLO, WORLD, EOS], ["hello"], {"match": 2, "missing": 1}),
        ([HELLO, WORLD, WORLD, WORLD, EOS], ["hello", " world"], {"match": 3, "missing": 2}),
        ([HELLO, EOS], ["hello", " world"], {"match": 2, "extra": 1}),
        ([HELLO, WORLD, EOS], ["hello", " world", " world"], {"match": 3, "extra": 1}),
    ],
)
def test_each_sampled_id_is_counted_once_by_what_became_of_it(
    tmp_path: Path, ids: list[int], pieces: list[str], expected: dict[str, float]
) -> None:
    book = Logbook()
    book.exchange(ids, pieces)
    assert tokens(published(book.write(tmp_path / "logs"))) == expected
    assert set(expected) <= set(TOKENS.labels[1].values)


def test_ids_that_could_not_be_checked_are_unverifiable_and_those_that_tokenize_otherwise_drifted(
    tmp_path: Path,
) -> None:
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"], name="chatcmpl-beam", use_beam_search=True)
    spelled = list(b"hello")  # which tokenizes anew into one id
    book.exchange([*spelled, EOS], ["hello"], name="chatcmpl-drift")
    found = published(book.write(tmp_path / "logs"), options=JudgeOptions(drift=True))
    assert tokens(found) == {"unverifiable": 2, "drift": 5, "match": 1}


def test_requests_are_joined_only_where_both_logs_should_know_them(tmp_path: Path) -> None:
    book = Logbook()
    book.exchange([HELLO, EOS], ["hello"])
    book.stream("chatcmpl-proxy", ["hello"])
    book.engine_request("chatcmpl-engine", [HELLO, EOS])
    # A client that left before its request had an id, and one whose request was refused, are in one log each by right.
    book.stream(None, [], finish=None, outcome="client_gone", end_marker=False)
    book.engine_request("chatcmpl-left", [HELLO], finish="abort")
    folder = book.write(tmp_path / "logs")
    both = {"result=both": 1, "result=proxy_only": 1, "result=plugin_only": 1}
    assert published(folder)["sparseety_join_requests_total"] == both
    assert sum(published(folder, engines=False)["sparseety_join_requests_total"].values()) == 0


def test_what_is_out_of_order_is_counted_by_kind(tmp_path: Path) -> None:
    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " world", " world"], name="chatcmpl-1")
    book.exchange([HELLO, WORLD, EOS], ["hello", "wor ld"], name="chatcmpl-2")
    book.exchange([HELLO, WORLD, EOS], ["hello", " world"], name="chatcmpl-3", end_marker=False)
    folder = book.write(tmp_path / "logs")
    with (folder / "proxy-h-1-1.jsonl").open("ab") as file:
        file.write(b'{"event":"chunk","ts":')
    found = published(folder)["sparseety_capture_sequence_errors_total"]
    assert {labels: count for labels, count in found.items() if count} == {
        "kind=duplicate,model_name=toy": 1,
        "kind=reorder,model_name=toy": 1,
        "kind=missing_end,model_name=toy": 1,
        "kind=torn_line,model_name=other": 1,
    }


def test_models_beyond_the_first_few_and_those_that_no_engine_serves_are_other() -> None:
    metrics = Metrics()
    metrics.served(f"lora-{number}" for number in range(2 * MODELS))
    for model in ("lora-3", f"lora-{2 * MODELS - 1}", None):
        metrics.judged(RequestVerdict("a", Verdict.PASS, model=model, choices=1), engines=True)
    found = parse(metrics.series.text().decode())
    requests = found["sparseety_verify_requests_total"]
    assert requests["model_name=lora-3,verdict=pass"] == 1
    assert requests["model_name=other,verdict=pass"] == 2
    assert sum(map(len, found.values())) <= most_series(WATCH)


def test_drift_that_nobody_looks_for_is_not_0() -> None:
    metrics = Metrics()
    metrics.served(["m"])
    metrics.judged(RequestVerdict("a", Verdict.PASS, model="m", choices=1, tokens=3), engines=True)
    page = metrics.series.text().decode()
    assert "DRIFT" not in page
    assert 'result="drift"' not in page
    assert 'result="match"' in page


def test_a_models_series_are_there_before_its_first_request() -> None:
    metrics = Metrics(drift=True)
    metrics.served(["m"])
    found = parse(metrics.series.text().decode())
    assert found["sparseety_verify_requests_total"]["model_name=m,verdict=fail"] == 0
    assert found["sparseety_verify_findings_total"]["code=ALTERED_TEXT,model_name=m,severity=error"] == 0
    assert found["sparseety_verify_findings_total"]["code=DRIFT,model_name=m,severity=info"] == 0
    assert found["sparseety_capture_sequence_errors_total"]["kind=gap,model_name=m"] == 0


def test_a_runs_text_file_has_each_metric_of_the_catalogue_and_no_other(tmp_path: Path) -> None:
    from verifier.exports import prometheus

    book = Logbook()
    book.exchange([HELLO, WORLD, EOS], ["hello", " wOrld"])
    report = verify(sorted(book.write(tmp_path / "logs").iterdir()), TokenizerShelf([BYTE_LEVEL]))
    families = {
        family.name: family for family in text_string_to_metric_families(prometheus(report, 1, now=1.8e9).decode())
    }
    assert families.keys() == {metric.name for metric in RUN}
    for metric in RUN:
        assert (families[metric.name].type, families[metric.name].documentation) == (metric.kind, metric.text)
        assert families[metric.name].samples
