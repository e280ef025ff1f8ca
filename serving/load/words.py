"""The figures that are set side by side, in the page and at the terminal. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.load.figures import mean
from serving.load.schema import Spread, WindowPart

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a window."""

    name: str
    of: Callable[[WindowPart], float | None]
    digits: int = 3
    better: Better = "neither"

    def mean(self, windows: Sequence[WindowPart]) -> float | None:
        """Return the mean over windows."""
        return mean(self.of(window) for window in windows)

    def text(self, value: float | None) -> str:
        """Return the figure for people."""
        return "–" if value is None else f"{value:,.{self.digits}f}"


def spread_metrics(title: str, of: Callable[[WindowPart], Spread]) -> list[Metric]:
    """Return the three percentiles as metrics."""
    return [
        Metric(name=f"{title} p50, ms", of=lambda w: of(w).p50, digits=0, better="lower"),
        Metric(name=f"{title} p95, ms", of=lambda w: of(w).p95, digits=0, better="lower"),
        Metric(name=f"{title} p99, ms", of=lambda w: of(w).p99, digits=0, better="lower"),
    ]


def metrics() -> list[Metric]:
    """Return the figures in the order in which they are shown."""
    return [
        Metric(name="arrivals", of=lambda w: float(w.arrivals), digits=0),
        Metric(name="failed", of=lambda w: float(w.failed), digits=0, better="lower"),
        Metric(name="good requests/s", of=lambda w: w.good_rps, better="higher"),
        Metric(name="SLO attainment", of=lambda w: w.attainment, better="higher"),
        Metric(name="Q = 1/CE", of=lambda w: w.q, digits=4, better="higher"),
        Metric(name="goodput = good/s × Q", of=lambda w: w.goodput, better="higher"),
        *spread_metrics("TTFT", lambda w: w.ttft_ms),
        *spread_metrics("TPOT", lambda w: w.tpot_ms),
        *spread_metrics("end to end", lambda w: w.e2e_ms),
        Metric(name="tokens trained", of=lambda w: float(w.train_tokens), digits=0),
        Metric(name="… while decoding", of=lambda w: float(w.train_tokens_while_decoding), digits=0),
    ]


def mean_of(windows: Sequence[WindowPart], field: Literal["attainment", "good_rps"]) -> float | None:
    """Return the mean of a field that every window has."""
    return mean(window.attainment if field == "attainment" else window.good_rps for window in windows)


def goodness(ratio: float, better: Better) -> str:
    """Return ``up`` where a ratio is clearly for the better, ``down`` for the worse, else ``same``."""
    if better == "neither" or abs(ratio - 1) < 0.005:
        return "same"
    return "up" if (ratio > 1) == (better == "higher") else "down"
