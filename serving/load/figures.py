"""From outcomes to a window's figures. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.load.model import Outcome
from serving.model import Slo
from serving.slo import Timing, attainment, goodput, quality, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of complete answers; None where there are none."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """One window's result."""

    seconds: float
    arrivals: int
    failed: int
    good: int
    good_rps: float
    attainment: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    q: float | None
    goodput: float | None
    answers_by_uid: Mapping[str, int]
    """Complete answers by the version that served them; without one the key is empty."""
    unscored: int
    """Complete answers of versions whose cross-entropy is not known; they carry no weight in ``q``."""
    failures: Mapping[str, int]
    """By reason."""
    output_tokens: int
    late_ms: float
    """How late the generator sent its latest request."""


def window_figures(
    outcomes: Sequence[Outcome], *, seconds: float, slo: Slo, ce_by_uid: Mapping[str, float]
) -> WindowFigures:
    """Return the figures of one window of ``seconds``; all arrivals are in the denominator of attainment."""
    timings = [timing for outcome in outcomes if (timing := outcome.timing) is not None]
    good = sum(within(timing, slo) for timing in timings)
    served = Counter(outcome.uid or "" for outcome in outcomes if outcome.timing is not None)
    q = quality((ce_by_uid[uid], n) for uid, n in served.items() if uid in ce_by_uid)
    return WindowFigures(
        seconds=seconds,
        arrivals=len(outcomes),
        failed=len(outcomes) - len(timings),
        good=good,
        good_rps=good / seconds,
        attainment=attainment(good, len(outcomes)),
        ttft_ms=percentiles_ms(timing.ttft_s for timing in timings),
        tpot_ms=percentiles_ms(tpot_of(timings)),
        e2e_ms=percentiles_ms(timing.e2e_s for timing in timings),
        q=q,
        goodput=goodput(good / seconds, q),
        answers_by_uid=dict(served),
        unscored=sum(n for uid, n in served.items() if uid not in ce_by_uid),
        failures=Counter(outcome.failure for outcome in outcomes if outcome.failure is not None),
        output_tokens=sum(outcome.tokens for outcome in outcomes),
        late_ms=1_000 * max((outcome.sent_s - outcome.scheduled_s for outcome in outcomes), default=0.0),
    )


def tpot_of(timings: Iterable[Timing]) -> list[float]:
    """Return the mean gaps of answers that have one: a single token has no gap."""
    return [timing.tpot_s for timing in timings if timing.tokens > 1]


def percentiles_ms(seconds: Iterable[float]) -> Percentiles:
    """Return p50, p95 and p99 in milliseconds."""
    ordered = sorted(seconds)
    p50, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(p50=milli(p50), p95=milli(p95), p99=milli(p99))


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return a percentile of sorted values by linear interpolation between the two nearest; None of nothing."""
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def milli(seconds: float | None) -> float | None:
    """Return milliseconds."""
    return None if seconds is None else seconds * 1_000


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None of nothing, or where a value is missing."""
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return math.fsum(known) / len(known) if known else None


def ratio(above: float | None, below: float | None) -> float | None:
    """Return ``above / below``; None where it is undefined."""
    return None if above is None or not below else above / below
