"""Drawing primitives: text of SVG elements, a linear scale, round tick values. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Maps ``[low, high]`` to ``[start, end]`` pixels, clipped at both ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel."""
        span = (self.high - self.low) or 1.0
        share = min(1.0, max(0.0, (value - self.low) / span))
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round values within ``[low, high]``, about ``wanted`` of them."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / max(1, wanted)
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """Return a tick's text."""
    return f"{value:.10g}"


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Return a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def rect(x: float, y: float, width: float, height: float, css: str, *, title: str = "", rounded: float = 0) -> str:
    """Return a rectangle; ``title`` shows on hover."""
    corner = f' rx="{rounded:g}"' if rounded else ""
    head = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"{corner}'
    return f'{head} class="{css}">{tip(title)}</rect>' if title else f'{head} class="{css}"/>'


def circle(x: float, y: float, radius: float, css: str, *, title: str = "") -> str:
    """Return a dot."""
    head = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}"'
    return f"{head}>{tip(title)}</circle>" if title else f"{head}/>"


def text(x: float, y: float, content: str, css: str, *, anchor: str = "start") -> str:
    """Return a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'


def path(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return a polyline; nothing for no points."""
    if not points:
        return ""
    steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path d="{steps}" class="{css}"/>'


def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points of a line that holds each value until the next one."""
    held: list[tuple[float, float]] = []
    for x, y in points:
        if held:
            held.append((x, held[-1][1]))
        held.append((x, y))
    return held


def tip(content: str) -> str:
    """Return a tooltip."""
    return f"<title>{escape(content)}</title>"
