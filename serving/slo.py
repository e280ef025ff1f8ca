"""What a good answer is, and what it is worth: TTFT, TPOT, attainment, goodput. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.model import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a complete answer came; all on one clock, in seconds.

    ``scheduled_s`` is when the trace wanted the request sent: a generator that falls behind must not flatter the
    server (coordinated omission).
    """

    scheduled_s: float
    first_s: float
    """First token."""
    last_s: float
    """Last token."""
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Scheduled arrival to first token."""
        return self.first_s - self.scheduled_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between later tokens; 0 for a single token, as vLLM's bench has it."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def e2e_s(self) -> float:
        """Scheduled arrival to last token."""
        return self.last_s - self.scheduled_s


def within(timing: Timing, slo: Slo) -> bool:
    """Return whether a complete answer met both targets."""
    return timing.ttft_s <= slo.ttft_s and timing.tpot_s <= slo.tpot_s


def attainment(good: int, arrivals: int) -> float:
    """Return the share of all arrivals, failed ones too, that were answered well; 1 where nothing arrived."""
    return good / arrivals if arrivals else 1.0


def quality(ce: Iterable[tuple[float, int]]) -> float | None:
    """Return ``Q = 1 / CE``, CE being the mean over answers of their version's cross-entropy.

    ``ce`` holds (nats per token, answers) by version. None without answers, or where CE is not positive.
    """
    weighted = [(nats, answers) for nats, answers in ce if answers > 0]
    total = sum(answers for _, answers in weighted)
    if total == 0:
        return None
    mean = sum(nats * answers for nats, answers in weighted) / total
    return 1 / mean if mean > 0 else None


def goodput(good_rps: float, q: float | None) -> float | None:
    """Return ``good_rps · Q``; None where quality is unknown."""
    return None if q is None else good_rps * q
