"""A stability run's result as one page for a browser. Pure.

One file that fetches nothing and runs nothing: its policy allows its own style sheet and no script at all, since what a
model wrote is hostile input. The whole result is in it as JSON too.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from json import dumps
from pathlib import Path

from msgspec.json import decode as decode_json

from verifier.findings import numbered
from verifier.stability import words
from verifier.stability.charts import series, shift_chart, shift_counts, shift_labels, survival_chart
from verifier.stability.exports import json
from verifier.stability.markup import bullets, details, section, table, text
from verifier.stability.model import Output
from verifier.stability.result import Analysis, Comparison, Decision, Difference

Decode = Callable[[Sequence[int]], str]
_STYLE = Path(__file__).with_name("page.css").read_text()
_MARKS: dict[Decision, str] = {"accept": "✓", "reject": "✗", "inconclusive": "?"}
_CHECKS = {True: ("good", "✓ holds"), False: ("bad", "✗ does not hold"), None: ("open", "? not known")}
_ROWS = 500  # of a table of differences
_TEXT = 12  # tokens before and after a difference whose text is shown


def html(analysis: Analysis, decode: Decode | None = None, outputs: Sequence[Output] = ()) -> bytes:
    """decode and outputs: only with both does the page show text, around each difference."""
    digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    name = text(f"Stability run {analysis.facts.run}".strip())
    texts = _Texts(decode, outputs)
    page = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{name}: {analysis.verdict.decision}</title><style>{_STYLE}</style></head><body>",
        '<a class="skip" href="#numbers">To the numbers</a>',
        f"<header><h1>{name}</h1>{_subtitle(analysis)}</header><main>",
        *_sections(analysis, texts),
        f'</main><script type="application/json" id="result">{_data(analysis)}</script></body></html>\n',
    ]
    return "".join(page).encode()


def _data(analysis: Analysis) -> str:
    """JSON that cannot end the element it stands in."""
    data = dumps(decode_json(json(analysis)))  # as ASCII
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def _subtitle(analysis: Analysis) -> str:
    requests = sum(arm.requests for arm in analysis.arms)
    said = (
        f"{numbered(analysis.prompts, 'prompt')}, {numbered(requests, 'request')}, contract {analysis.verdict.contract}"
    )
    return f'<p class="note">{text(said)}</p>'


def _sections(analysis: Analysis, texts: "_Texts") -> Iterator[str]:
    yield _verdict(analysis)
    yield section("Conditions", _conditions(analysis))
    if analysis.comparisons:
        yield section("Numbers", _numbers(analysis), "numbers")
        yield section("How long outputs stay identical", _survival(analysis))
        yield section("How wide the gap is where they part", _shifts(analysis))
    if analysis.verdict.sprt or analysis.verdict.bounds or analysis.yardsticks:
        yield section("Gate", _gate(analysis))
    if analysis.forced:
        yield section("Teacher forcing: prefill path only", _forced(analysis))
    yield section("Cost and sparsity", _cost(analysis))
    if any(len(each.by_length) > 1 for each in analysis.comparisons):
        yield section("By length of the context", _by_length(analysis))
    if analysis.repeats:
        yield section("Repeats within an arm", _repeats(analysis))
    for each in analysis.comparisons:
        if each.differences:
            yield section(f"First differences of {words.title(each)[0]}", _differences(each, texts))
    yield section("Method and limits", _method(analysis))


def _verdict(analysis: Analysis) -> str:
    verdict = analysis.verdict
    warned = f'<p class="open">Warnings</p>{bullets(verdict.warnings)}' if verdict.warnings else ""
    notes = f'<p class="note">Notes</p>{bullets(analysis.facts.notes)}' if analysis.facts.notes else ""
    decision = f"{_MARKS[verdict.decision]} {verdict.decision.upper()}"
    return (
        f'<div class="verdict {verdict.decision}"><strong>{decision}</strong> '
        f"(exit code {verdict.exit_code}){bullets(verdict.reasons)}{warned}{notes}</div>"
    )


def _conditions(analysis: Analysis) -> str:
    rows = "".join(
        f'<tr><td class="{_CHECKS[check.ok][0]}">{_CHECKS[check.ok][1]}</td><th scope="row">{text(check.name)}</th>'
        f"<td>{text(check.detail)}</td></tr>"
        for check in analysis.checks
    )
    band = f"A difference up to a shift of {words.nats(analysis.band.shift)} nats is a tie: {analysis.band.detail}"
    return f'<div class="wide"><table><tbody>{rows}</tbody></table></div><p class="note">{text(band)}</p>'


def _numbers(analysis: Analysis) -> str:
    arms = {each.arm: each for each in analysis.arms}
    level = f"{analysis.settings.confidence:.0%}"
    head = ["", "", f"identical prompts ({level})", "first differences / 1,000 tokens", "hard, per prompt"]
    rows = []
    for each in analysis.comparisons:
        cost = arms[each.second] if each.first != each.second else None
        rows.append(
            [
                *words.title(each),
                words.share(each.identical),
                words.rate(each.hazard),
                words.count(each.hard),
                words.kinds(each),
                words.times_with_limits(cost.ttft_ratio if cost else None),
                words.times_with_limits(cost.tpot_ratio if cost else None),
            ]
        )
    causes = filter(None, map(words.cause, analysis.comparisons))
    return table([*head, "kinds", "TTFT ratio", "TPOT ratio"], rows, "Arms compared") + bullets(causes)


def _legend(comparisons: Sequence[Comparison]) -> str:
    keys = "".join(
        f'<span class="key"><svg viewBox="0 0 40 12" aria-hidden="true">'
        f'<path class="line {series(number)}" d="M0 6H40"/></svg>{text(" · ".join(words.title(each)))}</span>'
        for number, each in enumerate(comparisons)
    )
    return f"<p>{keys}</p>"


def _survival(analysis: Analysis) -> str:
    shown = analysis.comparisons
    rows = []
    for each in shown:
        median = each.survival.median
        quartiles = " / ".join(map(str, each.survival.quartiles)) or words.NOTHING
        rows.append([words.title(each)[0], "not reached" if median is None else median, quartiles, each.early])
    head = ["", "half have parted at token", "quartiles of first differences", "of them at tokens 0 to 4"]
    soft = [
        f"{words.title(each)[0]}: ties against the noise arm's, log-rank z = {each.soft.z:.2f}, one-sided "
        f"{words.chance(each.soft.one_sided)}; {each.soft.events} of {each.soft.needed} differences for 90 % power"
        for each in shown
        if each.soft
    ]
    return _legend(shown) + survival_chart(shown) + table(head, rows) + bullets(soft)


def _shifts(analysis: Analysis) -> str:
    shown = analysis.comparisons
    if not any(each.differences for each in shown):
        return '<p class="note">No output differs.</p>'
    rows = [[words.title(each)[0], *shift_counts(each, analysis.band)] for each in shown]
    as_table = table(["shift, nats", *shift_labels(analysis.band)], rows)
    return _legend(shown) + shift_chart(shown, analysis.band) + details("The same as a table", as_table)


def _gate(analysis: Analysis) -> str:
    verdict, parts = analysis.verdict, []
    if sprt := verdict.sprt:
        said = f"after {numbered(sprt.prompts, 'prompt')}" if sprt.decided else "not decided"
        how = " by the Wilson bound" if sprt.truncated else ""
        parts.append(
            f"<p>Sequential test: {said}{how}, {sprt.hard} hard; log likelihood ratio {sprt.log_ratio:.2f}, "
            f"accept below {sprt.accept_below:.2f}, reject above {sprt.reject_above:.2f}.</p>"
        )
    if verdict.bounds:
        rows = [[bound.name, bound.decision, bound.detail, bound.estimate.method] for bound in verdict.bounds]
        parts.append(table(["bound", "decision", "measured", "method"], rows))
    if analysis.yardsticks:
        rows = [
            [
                one.arm,
                one.reading,
                words.times_with_limits(one.hazard_ratio),
                f"{one.hard_candidate_only} / {one.hard_yardstick_only}",
                words.chance(one.hard_p),
                words.times_with_limits(one.forced_ratio),
            ]
            for one in analysis.yardsticks
        ]
        head = [
            "yardstick",
            "B moves",
            "hazard ratio",
            "hard in B only / in it only",
            "McNemar",
            "teacher-forced ratio",
        ]
        parts.append(table(head, rows))
    return "".join(parts)


def _forced(analysis: Analysis) -> str:
    head = ["arm", "another token", "positions", "hard", "prompts with hard", "|margin moved|: median / p90 / max"]
    rows = []
    for one in analysis.forced:
        moved = " / ".join(map(words.nats, (one.delta_median, one.delta_p90, one.delta_max)))
        share = words.percent(one.disagree.value, 2)
        rows.append([words.arm(one.arm), share, one.positions, one.hard, words.count(one.hard_prompts), moved])
    bins = []
    for one in analysis.forced:
        cells = [f"{each.disagree} of {each.positions}" for each in one.bins]
        bins.append([words.arm(one.arm), *cells])
    ends = ["more" if each.last is None else f"to {each.last:g}" for each in analysis.forced[0].bins]
    note = (
        "Every position is compared, not only the first difference; but prompts are read by prefill kernels, without "
        "the prefix cache: what is sparse in decode alone does not show here."
    )
    by_margin = table(["reference's lead, nats", *ends], bins, "Positions with another token, by the reference's lead")
    return f'<p class="note">{note}</p>{table(head, rows)}{by_margin}'


def _cost(analysis: Analysis) -> str:
    head = [
        "arm",
        "TTFT",
        "TPOT",
        "zero share",
        "attention skipped",
        "KV evicted",
        "prefix reused",
        "preemptions",
        "failed",
    ]
    rows = [
        [
            words.arm(one.arm),
            words.seconds(one.ttft),
            words.seconds(one.tpot),
            words.percent(one.zero_share),
            words.percent(one.skipped_share),
            words.percent(one.evicted_share),
            words.percent(one.reused_share),
            words.NOTHING if one.preemptions is None else one.preemptions,
            f"{one.failed} of {one.requests}",
        ]
        for one in analysis.arms
    ]
    return table(head, rows, f"{words.NOTHING}: no log says it, which is not zero")


def _by_length(analysis: Analysis) -> str:
    rows = [
        [words.title(each)[0], f"{b.first} to {'any' if b.last is None else b.last}", words.rate(b.differences), b.hard]
        for each in analysis.comparisons
        for b in each.by_length
    ]
    return table(["", "context, tokens", "first differences / 1,000 tokens", "hard"], rows)


def _repeats(analysis: Analysis) -> str:
    parts = []
    for one in analysis.repeats:
        said = (
            f"{words.arm(one.arm)}: all alike in {words.count(one.stable)} prompts; "
            f"{words.nats(one.distinct_mean)} distinct outputs on average"
        )
        parts.append(f"<p>{text(said)}</p>")
        if one.factors:
            rows = [[f.name, f"{f.explains} of {f.of}", f"{f.chance:.1f}"] for f in one.factors]
            parts.append(table(["condition", "prompts whose outputs go by it", "by luck"], rows))
        trees = [
            [
                tree.prompt,
                " + ".join(str(len(leaf.requests)) for leaf in tree.leaves),
                ", ".join(f"token {fork.index} (margin {words.nats(fork.margin)})" for fork in tree.forks),
                words.percent(tree.largest, 0),
                words.nats(tree.entropy),
            ]
            for tree in one.trees[:_ROWS]
        ]
        if trees:
            head = ["prompt", "outputs that are alike", "forks", "largest group", "entropy, nats"]
            parts.append(details(f"{numbered(len(one.trees), 'prompt')} with several outputs", table(head, trees)))
    return "".join(parts)


class _Texts:
    """Text around a difference, for whoever asked for it."""

    def __init__(self, decode: Decode | None, outputs: Sequence[Output]) -> None:
        self._decode = decode
        self._ids = {output.request_id: output.ids for output in outputs} if decode else {}

    def __bool__(self) -> bool:
        return bool(self._decode and self._ids)

    def around(self, found: Difference) -> list[str]:
        """What both have before it, and how either goes on."""
        begin = max(0, found.index - _TEXT)
        end = found.index + _TEXT
        return [
            self._of(found.first, begin, found.index),
            self._of(found.first, found.index, end),
            self._of(found.second, found.index, end),
        ]

    def _of(self, request: str, begin: int, end: int) -> str:
        ids = self._ids.get(request, [])[begin:end]
        return self._decode(ids) if self._decode and ids else ""


def _differences(comparison: Comparison, texts: _Texts) -> str:
    head = ["prompt", "repeat", "load", "token", "context", "ids", "margins, nats", "shift", "requests"]
    if texts:
        head += ["text before", f"{words.arm(comparison.first)} goes on", f"{words.arm(comparison.second)} goes on"]
    parts = []
    for kind in ("HARD", "LENGTH", "UNKNOWN", "NEAR_TIE", "EXACT_TIE"):
        found = sorted((d for d in comparison.differences if d.kind == kind), key=lambda d: -(d.shift or 0.0))
        if not found:
            continue
        rows = [[*_cells(d), *(texts.around(d) if texts else [])] for d in found[:_ROWS]]
        cut = f", the {_ROWS} widest shown" if len(found) > _ROWS else ""
        parts.append(details(f"{kind}: {len(found)}{cut}", table(head, rows), is_open=kind == "HARD"))
    if not texts:
        parts.append('<p class="note">Text is hidden: it is in this file only if it was asked for.</p>')
    return "".join(parts)


def _cells(found: Difference) -> list[object]:
    least = "at least " if found.bounded else ""
    return [
        found.prompt,
        found.repeat,
        found.load,
        found.index,
        words.NOTHING if found.context is None else found.context,
        f"{words.token(found.first_id)} | {words.token(found.second_id)}",
        f"{least}{words.nats(found.first_margin)} | {words.nats(found.second_margin)}",
        words.nats(found.shift),
        f"{found.first} | {found.second}",
    ]


def _method(analysis: Analysis) -> str:
    settings = [[name, getattr(analysis.settings, name)] for name in analysis.settings.__struct_fields__]
    arms = [
        [
            words.arm(name),
            one.model or words.NOTHING,
            one.dtype or words.NOTHING,
            one.engine or words.NOTHING,
            (one.tokenizer or words.NOTHING)[:12],
            ", ".join(f"{key} {value}" for key, value in sorted({**one.parameters, **one.flags}.items())),
        ]
        for name, one in analysis.facts.arms.items()
    ]
    said = [
        "The unit of evidence is the prompt: repeats of one prompt fork at the same ties.",
        "After the first difference nothing is compared token by token.",
        "A hard difference is one whose shift (the sum of both sides' margins there) is beyond the tie band.",
        "A cause is named only with evidence.",
    ]
    parts = [bullets(said)]
    if arms:
        parts.append(table(["arm", "model", "dtype", "engine", "tokenizer", "parameters and flags"], arms))
    parts.append(details("Settings of the gate", table(["setting", "value"], settings)))
    return "".join(parts)
