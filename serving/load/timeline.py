"""The plot over time: requests, latency against SLO, cross-entropy, training share, versions. Pure.

The windows stand side by side to scale; the time between two of them, when nothing is measured, is squeezed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.load import svg
from serving.load.schema import Report, RequestRow, RoundPart, Sample, WindowPart

WIDTH, LEFT, RIGHT = 1120.0, 58.0, 14.0
GAP = 16.0
"""Pixels between two windows."""
BIN_S = 1.5
REPLICA_CSS = ("r0", "r1", "r2", "r3")
HEADER = 26.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Time → pixels."""

    windows: Sequence[WindowPart]
    per_s: float
    """Pixels per second inside windows."""

    @classmethod
    def of(cls, windows: Sequence[WindowPart]) -> "Axis":
        """Fit the windows into the plot."""
        total = sum(window.seconds for window in windows) or 1.0
        return cls(windows, (WIDTH - LEFT - RIGHT - GAP * (len(windows) - 1)) / total)

    def left(self, index: int) -> float:
        """Return where a window begins."""
        return LEFT + sum(w.seconds for w in self.windows[:index]) * self.per_s + GAP * index

    def right(self, index: int) -> float:
        """Return where a window ends."""
        return self.left(index) + self.windows[index].seconds * self.per_s

    def __call__(self, at_s: float) -> float:
        """Return the pixel of a moment, squeezed between windows, clipped outside them."""
        for i, window in enumerate(self.windows):
            if at_s < window.start_s:
                if i == 0:
                    return LEFT
                before = self.windows[i - 1]
                ended = before.start_s + before.seconds
                share = (at_s - ended) / max(1e-9, window.start_s - ended)
                return self.right(i - 1) + GAP * min(1.0, max(0.0, share))
            if at_s <= window.start_s + window.seconds:
                return self.left(i) + (at_s - window.start_s) * self.per_s
        return self.right(len(self.windows) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One strip of the plot."""

    title: str
    height: float
    draw: Callable[[float, float], list[str]]
    """(top, bottom) pixels → elements."""


def timeline(report: Report) -> str:
    """Return the whole plot as one SVG element."""
    axis = Axis.of(report.windows)
    ttft = [row.ttft_ms for row in report.timeline.requests if row.ttft_ms is not None]
    tpot = [row.tpot_ms for row in report.timeline.requests if row.tpot_ms is not None]
    panels = [
        Panel(title="requests per second", height=84, draw=lambda t, b: requests(report, axis, t, b)),
        Panel(
            title="time to first token, s",
            height=110,
            draw=lambda t, b: latency(
                report, axis, t, b, of=lambda r: r.ttft_ms, slo_ms=1e3 * report.slo.ttft_s, seen=ttft
            ),
        ),
        Panel(
            title="time per output token, s",
            height=84,
            draw=lambda t, b: latency(
                report, axis, t, b, of=lambda r: r.tpot_ms, slo_ms=1e3 * report.slo.tpot_s, seen=tpot
            ),
        ),
        Panel(
            title="cross-entropy of the version that answered, nats per token (lower is better)",
            height=110,
            draw=lambda t, b: ce_lines(report, axis, t, b),
        ),
        Panel(title="share of time spent training", height=84, draw=lambda t, b: shares(report, axis, t, b)),
        Panel(
            title="active version by replica",
            height=24.0 * max(1, len(replicas(report.timeline.samples))),
            draw=lambda t, b: lanes(report, axis, t, b),
        ),
    ]
    body: list[str] = []
    top = HEADER
    for panel in panels:
        bottom = top + 20 + panel.height
        body.append(svg.text(LEFT, top + 13, panel.title, "panel"))
        body += panel.draw(top + 20, bottom)
        top = bottom + 12
    height = top + 18
    bands = [window_band(axis, i, window, height - 18) for i, window in enumerate(report.windows)]
    marks = [mark for part in report.rounds for mark in round_mark(axis, part, height - 18)]
    inner = "".join([*bands, *marks, *body, *time_ticks(axis, height)])
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="Requests, latency, cross-entropy, training share and versions over time">{inner}</svg>'
    )


def window_band(axis: Axis, index: int, window: WindowPart, bottom: float) -> str:
    """Return a window's background and name."""
    left, right = axis.left(index), axis.right(index)
    css = "band-s" if window.kind == "static" else "band-c"
    name = f"{window.name} static" if window.kind == "static" else f"{window.name} CoLLM"
    return svg.rect(left, 2, right - left, bottom - 2, css, rounded=4) + svg.text(left + 6, 17, name, "window")


def round_mark(axis: Axis, part: RoundPart, bottom: float) -> list[str]:
    """Return a line where a round was decided."""
    if part.decided_s is None:
        return []
    x = axis(part.decided_s)
    label = f"round {part.number}: {part.decision}. {part.reason}"
    css = "mark-good" if part.decision == "promoted" else "mark-bad"
    return [f"<g>{svg.tip(label)}{svg.line(x, 22, x, bottom, css)}{svg.circle(x, 22, 3.2, css)}</g>"]


def time_ticks(axis: Axis, height: float) -> list[str]:
    """Return seconds within each window."""
    out: list[str] = []
    for i, window in enumerate(axis.windows):
        for at in svg.ticks(0, window.seconds, 3)[:-1]:
            x = axis.left(i) + at * axis.per_s
            out.append(svg.text(x, height - 5, f"{svg.number(at)} s", "tick", anchor="start" if at == 0 else "middle"))
    return out


def grid(y: svg.Linear, values: Sequence[float], axis: Axis, scale: float = 1.0) -> list[str]:
    """Return horizontal lines with their values (divided by ``scale``)."""
    out: list[str] = []
    for value in values:
        out += [
            svg.line(LEFT, y(value), axis.right(len(axis.windows) - 1), y(value), "grid"),
            svg.text(LEFT - 6, y(value) + 4, svg.number(value / scale), "tick", anchor="end"),
        ]
    return out


def requests(report: Report, axis: Axis, top: float, bottom: float) -> list[str]:
    """Return stacked bars: answered well, late, failed."""
    counted: dict[tuple[int, int], list[int]] = {}
    names = [window.name for window in report.windows]
    for row in report.timeline.requests:
        i = names.index(row.window)
        inside = min(row.at_s - report.windows[i].start_s, report.windows[i].seconds - 1e-6)
        bar = counted.setdefault((i, int(inside / BIN_S)), [0, 0, 0])
        bar[0 if row.good else 2 if row.failed else 1] += 1
    high = max((sum(bar) for bar in counted.values()), default=1) / BIN_S
    y = svg.Linear(low=0, high=high * 1.05, start=bottom, end=top)
    out = grid(y, svg.ticks(0, high, 3), axis)
    for (i, slot), bar in counted.items():
        x, base = axis.left(i) + slot * BIN_S * axis.per_s, 0.0
        for amount, css in zip(bar, ("good", "late", "failed"), strict=True):
            if amount:
                upper = base + amount / BIN_S
                height = y(base) - y(upper)
                out.append(svg.rect(x + 0.5, y(upper), BIN_S * axis.per_s - 1, height, css, title=f"{amount} {css}"))
                base = upper
    return out


def latency(
    report: Report,
    axis: Axis,
    top: float,
    bottom: float,
    *,
    of: Callable[[RequestRow], float | None],
    slo_ms: float,
    seen: Sequence[float],
) -> list[str]:
    """Return a dot per answer and the target; dots above the plot are drawn at its edge."""
    high = min(max([slo_ms * 1.25, *seen]), slo_ms * 2.5)
    y = svg.Linear(low=0, high=high, start=bottom, end=top)
    out = grid(y, svg.ticks(0, high, 3), axis, 1e3)
    for row in report.timeline.requests:
        value = of(row)
        if value is not None:
            css = "dot-good" if value <= slo_ms else "dot-late"
            title = f"{value / 1e3:.2f} s, version {row.version or '?'} on {row.replica or '?'}"
            out.append(svg.circle(axis(row.at_s), y(value), 2.4, css, title=title))
    right = axis.right(len(axis.windows) - 1)
    out += [
        svg.line(LEFT, y(slo_ms), right, y(slo_ms), "slo"),
        svg.text(right, y(slo_ms) - 4, "SLO", "slo-text", anchor="end"),
    ]
    return out


def ce_lines(report: Report, axis: Axis, top: float, bottom: float) -> list[str]:
    """Return a stepped line per replica, and where the run began."""
    rows = [row for row in report.timeline.requests if row.ce is not None]
    values = [row.ce for row in rows if row.ce is not None] + [report.ce.start, report.ce.end]
    low, high = min(values), max(values)
    room = max(0.02, (high - low) * 0.15)
    y = svg.Linear(low=low - room, high=high + room, start=bottom, end=top)
    out = grid(y, svg.ticks(low - room, high + room, 3), axis)
    right = axis.right(len(axis.windows) - 1)
    out += [svg.line(LEFT, y(report.ce.start), right, y(report.ce.start), "start")]
    for n, replica in enumerate(replicas(report.timeline.samples)):
        for i, window in enumerate(report.windows):
            points = [
                (axis(row.at_s), y(row.ce))
                for row in rows
                if row.replica == replica and row.window == window.name and row.ce is not None
            ]
            if points:
                held = svg.steps([(axis.left(i), points[0][1]), *points, (axis.right(i), points[-1][1])])
                out.append(svg.path(held, f"line {REPLICA_CSS[n % 4]}"))
    return out


def shares(report: Report, axis: Axis, top: float, bottom: float) -> list[str]:
    """Return the training share of each replica, within windows."""
    y = svg.Linear(low=0, high=1, start=bottom, end=top)
    out = grid(y, [0, 0.5, 1], axis)
    for n, replica in enumerate(replicas(report.timeline.samples)):
        for window in report.windows:
            inside = [s for s in samples_in(report.timeline.samples, window) if replica in s.train_share]
            points = [(axis(s.at_s), y(s.train_share[replica])) for s in inside]
            out.append(svg.path(points, f"line {REPLICA_CSS[n % 4]}"))
    return out


def lanes(report: Report, axis: Axis, top: float, bottom: float) -> list[str]:
    """Return a lane per replica with a block per version."""
    names = replicas(report.timeline.samples)
    numbers = sorted({federated(s.active[r]) for s in report.timeline.samples for r in s.active})
    out: list[str] = []
    for n, replica in enumerate(names):
        y = top + 24 * n
        out += [
            svg.text(LEFT - 6, y + 14, replica.removeprefix("replica-"), f"tick {REPLICA_CSS[n % 4]}t", anchor="end")
        ]
        for window in report.windows:
            for label, begin, end in runs(samples_in(report.timeline.samples, window), replica, window):
                tone = min(5, numbers.index(federated(label)))
                css = f"v{tone} local" if "+" in label else f"v{tone}"
                x, width = axis(begin), axis(end) - axis(begin)
                out.append(svg.rect(x, y, width, 18, css, title=f"{replica}: {label} in {window.name}", rounded=2))
                if width > 9 * len(label) + 6:
                    out.append(svg.text(x + width / 2, y + 13, label, "lane", anchor="middle"))
    return out


def runs(samples: Sequence[Sample], replica: str, window: WindowPart) -> list[tuple[str, float, float]]:
    """Return (label, begin, end) of each stretch with one version, filling the window."""
    seen = [(s.at_s, s.active[replica]) for s in samples if replica in s.active]
    out: list[tuple[str, float, float]] = []
    for at, label in seen:
        if out and out[-1][0] == label:
            continue
        begin = at if out else window.start_s
        if out:
            out[-1] = (out[-1][0], out[-1][1], at)
        out.append((label, begin, window.start_s + window.seconds))
    return out


def samples_in(samples: Sequence[Sample], window: WindowPart) -> list[Sample]:
    """Return the samples taken within a window."""
    return [s for s in samples if window.start_s <= s.at_s <= window.start_s + window.seconds]


def replicas(samples: Sequence[Sample]) -> list[str]:
    """Return all replicas seen, by name."""
    return sorted({replica for sample in samples for replica in sample.train_share})


def federated(label: str) -> int:
    """Return the federated number of a version's label; -1 where it has none."""
    head = label.partition("+")[0]
    return int(head) if head.isdigit() else -1
