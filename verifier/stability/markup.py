"""Bits of HTML whose content is text, whatever it holds. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

from verifier.output import printable


def text(value: object) -> str:
    """Of whatever origin: no markup, and nothing that turns the writing direction."""
    return escape(printable(str(value))).replace(" %", "\u00a0%")


def section(title: str, body: str, anchor: str | None = None) -> str:
    mark = f' id="{anchor}"' if anchor else ""
    return f"<section{mark}><h2>{text(title)}</h2>{body}</section>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Cells are text; the first one of a row names it."""
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    label = text(caption or " ".join(map(str, head)))
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{label}"><table>{said}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def details(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{text(summary)}</summary>{body}</details>"
