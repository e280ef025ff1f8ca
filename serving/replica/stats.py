"""Figures of the last few seconds, for heartbeats. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model import Finished, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened within the window."""

    ttft_p95_s: float
    tpot_p95_s: float
    finished: int
    """Requests that ended, failed ones too."""
    violations: int
    """Of those, how many failed or missed their SLO."""
    tokens_per_s: float
    train_share: float
    """Part of the time that training took."""


@dataclass(frozen=True, slots=True)
class _End:
    at_s: float
    ttft_s: float | None
    tpot_s: float | None
    violated: bool


class Stats:
    """Collects; times are monotonic and passed in."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.requests_total = 0
        self._ends: deque[_End] = deque()
        self._tokens: deque[tuple[float, float]] = deque()
        self._slices: deque[tuple[float, float]] = deque()
        self._began_s: float | None = None

    def finished(self, event: Finished, slo: Slo, now_s: float) -> None:
        """A request was answered whole."""
        self.requests_total += 1
        late = event.ttft_s > slo.ttft_s or event.tpot_s > slo.tpot_s
        self._ends.append(_End(now_s, event.ttft_s, event.tpot_s if event.tokens > 1 else None, late))

    def failed(self, now_s: float) -> None:
        """A request was not."""
        self.requests_total += 1
        self._ends.append(_End(now_s, None, None, True))

    def stepped(self, tokens: int, now_s: float) -> None:
        """A step decoded tokens."""
        self._tokens.append((now_s, tokens))

    def sliced(self, seconds: float, now_s: float) -> None:
        """A slice of training ran."""
        self._slices.append((now_s, seconds))

    def window(self, now_s: float) -> Window:
        """Return the figures, and forget what is older."""
        if self._began_s is None:
            self._began_s = now_s
        since = now_s - self.window_s
        while self._ends and self._ends[0].at_s < since:
            self._ends.popleft()
        for series in (self._tokens, self._slices):
            while series and series[0][0] < since:
                series.popleft()
        span = min(self.window_s, max(1e-3, now_s - self._began_s))
        return Window(
            ttft_p95_s=p95([e.ttft_s for e in self._ends if e.ttft_s is not None]),
            tpot_p95_s=p95([e.tpot_s for e in self._ends if e.tpot_s is not None]),
            finished=len(self._ends),
            violations=sum(e.violated for e in self._ends),
            tokens_per_s=sum(n for _, n in self._tokens) / span,
            train_share=min(1.0, sum(s for _, s in self._slices) / span),
        )


def p95(values: Sequence[float]) -> float:
    """Return the nearest-rank 95th percentile; 0 of nothing."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else 0.0
