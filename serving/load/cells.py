"""Cells and tables of the page, and figures as people read them. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

from serving.load.schema import Spread


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "") -> str:
    """Return a table; cells are escaped unless they are ``Markup``."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head) if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def html(cell: str) -> str:
    """Return a cell's HTML."""
    return cell if isinstance(cell, Markup) else escape(cell)


def section(title: str, note: str, content: str) -> str:
    """Return a titled section."""
    return f"<section><h2>{escape(title)} <small>{escape(note)}</small></h2>{content}</section>"


def spread(found: Spread) -> str:
    """Return three percentiles."""
    return " / ".join(ms(value) for value in (found.p50, found.p95, found.p99))


def ms(value: float | None) -> str:
    """Return milliseconds with three figures or so."""
    return (
        "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    )


def percent(value: float | None) -> str:
    """Return a share."""
    return "–" if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    """Return a ratio."""
    return "–" if value is None else f"×{value:.3f}"
