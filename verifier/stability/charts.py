"""Charts of a stability run as SVG, without script; told apart by dashes and numbers, not by colour alone. Pure."""

from collections.abc import Sequence
from html import escape

from verifier.stability import words
from verifier.stability.differences import ROUNDING
from verifier.stability.result import Band, Comparison

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 260, 46, 40, 14
_SERIES = 5  # classes s0 to s4; further ones begin again


def series(number: int) -> str:
    """The class of a comparison in every chart and legend."""
    return f"s{number % _SERIES}"


def survival_chart(comparisons: Sequence[Comparison]) -> str:
    """Share still identical by token."""
    longest = max((each.survival.longest for each in comparisons), default=0) or 1
    parts = [_frame("Token", "Still identical"), *_y_ticks()]
    for tick in _ticks(longest):
        x = _x(tick / longest)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick}</text>')
    for number, each in enumerate(comparisons):
        path = [f"M{_x(0):.1f} {_y(1):.1f}"]
        for point in each.survival.points:
            path.append(f"H{_x(point.index / longest):.1f}V{_y(point.share):.1f}")
        path.append(f"H{_x(each.survival.longest / longest):.1f}")
        parts.append(f'<path class="line {series(number)}" d="{"".join(path)}"/>')
    said = "; ".join(f"{words.title(each)[0]}: {_ending(each)}" for each in comparisons)
    return _svg("Share of pairs still identical, by token", said, parts)


def _ending(comparison: Comparison) -> str:
    points = comparison.survival.points
    return f"{words.percent(points[-1].share if points else 1.0, 0)} at token {comparison.survival.longest}"


def shift_bins(band: Band) -> list[float]:
    """Upper ends: 0, then doubling, with the band's end among them."""
    return [0.0, band.shift / 4, band.shift / 2, band.shift, 2 * band.shift, 4 * band.shift, 8 * band.shift]


def shift_counts(comparison: Comparison, band: Band) -> list[int]:
    """First differences by shift; the last one: beyond all ends."""
    ends = shift_bins(band)
    counts = [0] * (len(ends) + 1)
    for found in comparison.differences:
        if found.shift is not None:
            counts[next((n for n, end in enumerate(ends) if found.shift <= end + ROUNDING), len(ends))] += 1
    return counts


def shift_labels(band: Band) -> list[str]:
    ends = shift_bins(band)
    return ["0", *(f"to {end:.3g}" for end in ends[1:]), f"over {ends[-1]:.3g}"]


def shift_chart(comparisons: Sequence[Comparison], band: Band) -> str:
    """How far the difference of two logits moved, where outputs part."""
    counts = [shift_counts(each, band) for each in comparisons]
    highest = max((count for of in counts for count in of), default=0) or 1
    labels = shift_labels(band)
    slot = (_WIDTH - _LEFT) / len(labels)
    parts = [_frame("Shift in nats", "First differences")]
    for n, label in enumerate(labels):
        x = _LEFT + (n + 0.5) * slot
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{label}</text>')
    width = slot * 0.8 / max(len(counts), 1)
    for number, of in enumerate(counts):
        for n, count in enumerate(of):
            if count:
                x, y = _LEFT + n * slot + slot * 0.1 + number * width, _y(0.92 * count / highest)
                parts.append(
                    f'<rect class="bar {series(number)}" x="{x:.1f}" y="{y:.1f}" width="{width * 0.92:.1f}" '
                    f'height="{_HEIGHT - _BOTTOM - y:.1f}"/>'
                    f'<text class="tick" x="{x + width * 0.46:.1f}" y="{y - 3:.1f}" text-anchor="middle">{count}</text>'
                )
    edge = _LEFT + (shift_bins(band).index(band.shift) + 1) * slot
    parts.append(f'<line class="band" x1="{edge:.1f}" y1="{_TOP}" x2="{edge:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
    parts.append(f'<text class="tick" x="{edge - 4:.1f}" y="{_TOP + 9}" text-anchor="end">ties</text>')
    parts.append(f'<text class="tick" x="{edge + 4:.1f}" y="{_TOP + 9}">hard</text>')
    beyond = [sum(of[shift_bins(band).index(band.shift) + 1 :]) for of in counts]
    said = [f"{words.title(each)[0]}: {n} beyond the band" for each, n in zip(comparisons, beyond, strict=True)]
    return _svg("First differences by shift", "; ".join(said), parts)


def _svg(title: str, said: str, parts: Sequence[str]) -> str:
    """`said`: what a reader who does not see it needs."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{title}. {said}")}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _frame(x_title: str, y_title: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    return (
        f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH}"/>'
        f'<text class="tick" x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{x_title}</text>'
        f'<text class="tick" x="{_LEFT + 4}" y="{_TOP - 3}">{y_title}</text>'
    )


def _y_ticks() -> list[str]:
    return [
        f'<line class="grid" x1="{_LEFT}" y1="{_y(share):.1f}" x2="{_WIDTH}" y2="{_y(share):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 5}" y="{_y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 12)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _ticks(longest: int) -> list[int]:
    """Round numbers up to the end, five or so."""
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if longest / step <= 6)
    return list(range(0, longest + 1, step))
