"""A stability run's result in a terminal, for programs, and as a page."""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.stability_runs import baseline_ids, output, parted, run, served
from verifier.stability import catalogue, render
from verifier.stability.analysis import analyse
from verifier.stability.model import Forced
from verifier.stability.result import ArmFacts, Facts

HOSTILE = (
    "</script><script>document.title='taken'</script>"
    "<img src=http://127.0.0.1:9/x onerror=document.title=1>\u202e\x1b[2J"
)


def rejected(**facts):
    outputs = run(80, b={p: (5 + p % 20, 1.2, 0.9) for p in range(30)}, a2=dict.fromkeys(range(40, 50), (9, 0.1, 0.1)))
    named = {arm: ArmFacts(model="smollm2", dtype="bfloat16") for arm in ("a1", "a2", "b")}
    return analyse(outputs, facts=Facts(**({"run": "2026-11-29", "arms": named} | facts))), outputs


def hostile():
    analysis, outputs = rejected(
        run=HOSTILE, notes=[HOSTILE], arms={"a1": ArmFacts(model=HOSTILE, flags={HOSTILE: HOSTILE})}
    )
    return analysis, outputs


# --------------------------------------------------------------------------------------------------------- terminal


def test_the_terminal_says_conditions_numbers_evidence_and_the_verdict_last():
    analysis, _ = rejected()
    text = render.text(analysis)
    assert text.startswith("stability run 2026-11-29   80 prompts   240 requests   contract same-model\n")
    assert "  ok    prompt ids equal: 80 prompts by their hashes" in text
    assert re.search(r"A1 vs A2 +noise +87\.5 % \(78-93 %\)", text)
    assert re.search(r"A1 vs B +candidate +62\.5 % \(52-72 %\) .* 30 of 80 \(28-48 %\)", text)
    assert "A1 vs B: hard ones begin at token 8 (p25), median margin 1.20, median shift 2.10 nats" in text
    assert "A1 vs B: likely cause unknown (no evidence for any)" in text
    assert "gate  SPRT  p0 2.0%  p1 6.0%   decided after 3 prompts" in text
    ids = baseline_ids(0)[5]
    lines = text.splitlines()
    assert lines[-3].startswith("VERDICT  REJECT         3 of 3 prompts have a hard first difference")
    assert f"hard divergence: prompt 0, token 5:  A1 {ids}  B {ids + 1000}  (HARD, shift 2.10 nats)" in lines[-2]
    assert lines[-1] == "exit code 1"


def test_an_inconclusive_run_says_why():
    text = render.text(analyse(run(20)))
    assert "VERDICT  INCONCLUSIVE   too few prompts" in text
    assert text.endswith("exit code 3\n")


def test_an_empty_run_can_be_shown_in_every_form():
    analysis = analyse([])
    assert "no request ended with token ids" in render.text(analysis)
    assert json.loads(render.json(analysis))["verdict"]["exit_code"] == 3
    assert b"INCONCLUSIVE" in render.html(analysis)
    ElementTree.fromstring(render.junit(analysis))


def test_teacher_forcing_is_labelled_as_the_prefill_path():
    forced = [
        Forced(arm=arm, prompt=p, reference=f"a1-{p}-0-1-cold", ids=baseline_ids(p), top=output("b", p).top)
        for p in range(10)
        for arm in ("a1", "b")
    ]
    analysis = analyse(run(71), forced)
    assert "teacher-forced B (prefill path only): another token at 0.00 % (0.0-8.8 %) of 400" in render.text(analysis)
    assert b"what is sparse in decode alone does not show here" in render.html(analysis)


def test_nothing_that_a_server_or_a_model_says_moves_the_cursor():
    analysis, outputs = hostile()
    failing = [output("b", 90, [], error=HOSTILE), *outputs]
    for text in (
        render.text(analyse(failing, facts=analysis.facts)),
        render.single(analysis, failing, lambda ids: HOSTILE),
    ):
        assert not set(text) & {"\x1b", "\u202e", "\r"}


# --------------------------------------------------------------------------------------------------- for programs


def test_the_json_is_strict_and_holds_the_numbers_but_no_text():
    analysis, _ = rejected()
    data = json.loads(render.json(analysis), parse_constant=pytest.fail)
    assert data["schema"] == 1
    assert data["verdict"]["decision"] == "reject"
    candidate = next(each for each in data["comparisons"] if each["name"] == "candidate")
    assert candidate["hard"] == {"hits": 30, "of": 80, "share": 0.375, "low": pytest.approx(0.277, abs=0.001)} | {
        "high": pytest.approx(0.484, abs=0.001),
        "method": "Wilson",
    }
    assert len(candidate["differences"]) == 30


def test_junit_has_a_case_for_each_condition_and_the_gate():
    analysis, _ = rejected()
    suite = ElementTree.fromstring(render.junit(analysis))[0]
    assert suite.get("tests") == str(len(analysis.checks) + 1)
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    gate = next(case for case in suite if case.get("classname") == "gate")
    assert "hard first difference" in gate.find("failure").get("message")


def test_a_condition_that_is_not_met_is_an_error_and_the_gate_is_skipped():
    outputs = [*run(71), output("b", 71, verdict="fail"), output("a1", 71), output("a2", 71)]
    suite = ElementTree.fromstring(render.junit(analyse(outputs)))[0]
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["streams verified"]
    assert next(case for case in suite if case.get("classname") == "gate").find("skipped") is not None


def test_junit_stays_well_formed_whatever_a_server_says():
    outputs = [*run(71), output("b", 71, [], error=HOSTILE)]
    ElementTree.fromstring(render.junit(analyse(outputs)))


def families(analysis):
    text = render.prometheus(analysis, 1_700_000_000.5).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_text_file_is_what_the_catalogue_says():
    outputs = [o for r in (0, 1) for o in run(40, b={3: (9, 1.0, 1.0)}, repeat=r)]
    named = Facts(arms={"a1": ArmFacts(model="smollm2")})
    found = families(analyse(outputs, facts=named))
    assert set(found) == {metric.name for metric in catalogue.METRICS}
    for metric in catalogue.METRICS:
        family = found[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert labels == {label.name for label in metric.labels}
    gates = {s.labels["gate"]: s.value for s in found["sparseety_stability_run_gate"].samples}
    assert gates == {"same-model": -1, "valid": 1}
    matches = {s.labels["comparison"]: s.value for s in found["sparseety_stability_run_exact_match_ratio"].samples}
    assert matches == {"repeat_baseline": 1.0, "baseline_vs_candidate": 39 / 40, "repeat_candidate": 1.0}
    buckets = [s for s in found["sparseety_stability_first_divergence_tokens"].samples if s.name.endswith("_bucket")]
    at = {s.labels["le"]: s.value for s in buckets if s.labels["comparison"] == "baseline_vs_candidate"}
    assert (at["5"], at["10"], at["+Inf"]) == (0, 2, 2)


def test_a_hostile_model_name_stays_one_label():
    found = families(analyse(run(5), facts=Facts(arms={"a1": ArmFacts(model='a"} 1\nb\\')})))
    assert {s.labels["model_name"] for s in found["sparseety_stability_run_gate"].samples} == {'a"} 1\nb\\'}


# ------------------------------------------------------------------------------------------------- diff and single


def test_two_outputs_side_by_side():
    other, lists = parted("b", 2, 9, (1.77, 1.07), served=served(attended=831, context=1204))
    ids = baseline_ids(2)
    first = output("a1", 2, top=lists, served=served(attended=1204, context=1204))
    text = render.diff(first, other, analyse([first, other]))
    assert "equal: 9 tokens, then different" in text
    assert f"A1: token {ids[9]}  logprob -0.50   next likely {other.ids[9]} (-2.27)   context 109" in text
    assert "KV: 831 of 1204 positions read over the request" in text
    assert "HARD   gap 1.77 nats in A and 1.07 nats in B (shift 2.84, band 0.50)" in text
    assert (
        "likely cause: KV loss (1 of 1 hard first differences are of requests that read less of their context" in text
    )
    assert "‹" not in text


def test_equal_outputs_are_said_to_be():
    first, second = output("a1", 0), output("b", 0)
    assert "equal: all 40 tokens" in render.diff(first, second, analyse([first, second]))


def test_the_next_equal_run_is_shown_to_find_ones_way_and_decides_nothing():
    ids = baseline_ids(0)
    other = [*ids[:5], 7777, 7778, *ids[5:]]
    first, second = output("a1", 0), output("b", 0, other)
    text = render.diff(first, second, analyse([first, second]))
    assert "next equal run: A[5..39] = B[7..41] (no rule goes by it)" in text
    assert "HARD" in text


def test_text_is_shown_only_where_it_was_asked_for():
    analysis, outputs = rejected()
    b = next(o for o in outputs if o.request_id == "b-0-0-1-cold")
    decode = {tuple(b.ids[5:17]): "a secret"}.get
    first = next(o for o in outputs if o.request_id == "a1-0-0-1-cold")
    assert '"a secret"' in render.diff(first, b, analysis, lambda ids: decode(tuple(ids), ""))
    assert "a secret" not in render.diff(first, b, analysis)
    assert "a secret" in render.html(analysis, lambda ids: decode(tuple(ids), ""), outputs).decode()
    assert b"Text is hidden" in render.html(analysis)


def test_the_same_prompt_n_times_shows_each_request_and_each_distinct_output():
    outputs = [output("a1", 0, repeat=n) for n in range(4)] + [output("a1", 0, parted("a1", 0, 7)[0].ids, repeat=4)]
    text = render.single(analyse(outputs), outputs, lambda ids: "x" * 500)
    assert text.startswith("prompt 0   A1   5 requests   2 distinct outputs\n")
    assert re.search(r"a1-0-4-1-cold +1 +cold +100 ms +490 ms +40 +#2", text)
    assert f"#1  4 times  40 tokens  length   {'x' * 200}\n" in text
    assert "fork at token 7" in text
    assert "x" * 9 not in render.single(analyse(outputs), outputs)


# --------------------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.data, self._open = [], {}, None
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        self.data[self._open] = self.data.get(self._open, "") + data


def test_the_page_allows_its_own_style_and_nothing_else():
    page = Page(render.html(rejected()[0]))
    style = b64encode(sha256(page.data["style"].encode()).digest()).decode()
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{"type": "application/json", "id": "result"}]
    for tag, attrs in page.tags:
        assert not {name for name in attrs if name.startswith("on") or name in ("style", "src")}, tag
        assert attrs.get("href", "#").startswith("#")
    assert {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "form"} == set()


def test_what_a_model_wrote_is_text_in_the_page_and_cannot_end_the_data():
    analysis, outputs = hostile()
    page = render.html(analysis, lambda ids: HOSTILE, outputs)
    parsed = Page(page)
    assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 1
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert json.loads(parsed.data["script"])["facts"]["run"] == HOSTILE
    assert "\u202e" not in page.decode()
    assert "&lt;/script&gt;" in page.decode()


def test_the_page_can_be_read_without_colours_and_by_keyboard():
    page = Page(render.html(rejected()[0]))
    images = [attrs for tag, attrs in page.tags if tag == "svg" and "aria-hidden" not in attrs]
    assert len(images) == 2
    assert all(attrs["role"] == "img" and "A1 vs B" in attrs["aria-label"] for attrs in images)
    regions = [attrs for tag, attrs in page.tags if attrs.get("role") == "region"]
    assert regions
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in regions)
    assert "prefers-color-scheme: dark" in page.data["style"]
    assert "@media print" in page.data["style"]


def test_a_long_list_of_differences_is_cut_and_says_so():
    page = render.html(analyse(run(600, b=dict.fromkeys(range(600), (5, 1.2, 0.9))))).decode()
    assert "HARD: 600, the 500 widest shown" in page


def title(document):
    return re.search("<title>(.*?)</title>", document).group(1)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def browse(tmp_path):
    """What a browser makes of a page: (the document afterwards, what it complained of, addresses it asked for)."""

    def call(page: bytes) -> tuple[str, str, set[str]]:
        file, log = tmp_path / "page.html", tmp_path / "net.json"
        file.write_bytes(page)
        result = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", f"--log-net-log={log}",
                "--dump-dom", file.as_uri(),
            ],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        asked = set(re.findall(r'"url":"((?:http|ws)[^"]*)"', log.read_text()))
        said = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
        return result.stdout, "\n".join(said), {url for url in asked if "127.0.0.1" in url}

    return call


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_the_page_runs_nothing_and_asks_nobody(browse):
    analysis, outputs = hostile()
    page = render.html(analysis, lambda ids: HOSTILE, outputs)
    document, complaints, asked = browse(page)
    assert title(document).startswith("Stability run ")
    assert "REJECT" in document
    assert (complaints, asked) == ("", set())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_browser_would_have_told(browse):
    """The test above can fail: without the policy and the escaping the same page runs, asks and is complained of."""
    page = render.html(rejected()[0]).decode()
    open_ = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("<main>", f"<main>{HOSTILE}")
    document, _, asked = browse(open_.encode())
    assert title(document) in ("taken", "1")
    assert asked == {"http://127.0.0.1:9/x"}
    _, complaints, _ = browse(page.replace("main{", "main {").replace("</style>", " </style>").encode())
    assert "style" in complaints


def test_teacher_forcing_that_no_server_answered_is_said_to_be_none():
    refused = [Forced(arm="b", prompt=p, reference=f"a1-{p}", ids=[1], error="HTTP 400") for p in range(2)]
    shown = render.text(analyse(run(5), refused))
    assert "teacher-forced B (prefill path only): none of 2 requests was answered" in shown
    assert "0 of 0" not in shown
