"""How much time is left for background work before an answer would be late. Pure.

Step times are measured, not modelled: seconds by number of decoding rows, and seconds per prompt token on top.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_GUESS_S = 0.05
"""Of a step before any was measured."""
SMOOTHING = 0.2
TTFT_MARGIN = 0.35
"""Part of a TTFT target that background work may bring a request to; the rest is for what can't be foreseen."""
TPOT_MARGIN = 0.7


class StepCosts:
    """Predicts the seconds of an engine step from those before."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        """By bucket of decoding rows."""
        self._prefill_token_s: float | None = None

    def observe(self, *, decodes: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if prefill_tokens == 0:
            bucket = decodes.bit_length()
            self._decode_s[bucket] = _smooth(self._decode_s.get(bucket), seconds)
            return
        alone = self._decode(decodes) if decodes else 0.0
        self._prefill_token_s = _smooth(self._prefill_token_s, max(0.0, seconds - alone) / prefill_tokens)

    def step_s(self, *, decodes: int, prefill_tokens: int) -> float:
        """Return the predicted seconds."""
        if decodes == 0 and prefill_tokens == 0:
            return 0.0
        decode_s = self._decode(decodes) if decodes else 0.0
        if prefill_tokens == 0:
            return decode_s
        if self._prefill_token_s is None:
            return max(FIRST_GUESS_S, decode_s)
        return decode_s + prefill_tokens * self._prefill_token_s

    def prefill_tokens(self, seconds: float, *, decodes: int) -> int:
        """Return how many prompt tokens a step of that many seconds can compute beside decoding rows."""
        if not self._prefill_token_s or seconds == math.inf:
            return sys.maxsize
        return max(0, int((seconds - self.step_s(decodes=decodes, prefill_tokens=0)) / self._prefill_token_s))

    def prefill_s(self, tokens: int, *, decodes: int, budget: int) -> float:
        """Return the predicted seconds until ``tokens`` prompt tokens are computed beside decoding rows."""
        chunk = max(1, budget - decodes)
        whole, rest = divmod(tokens, chunk)
        seconds = whole * self.step_s(decodes=decodes, prefill_tokens=chunk)
        return seconds + (self.step_s(decodes=decodes, prefill_tokens=rest) if rest else 0.0)

    def _decode(self, rows: int) -> float:
        if not self._decode_s:
            return FIRST_GUESS_S
        bucket = rows.bit_length()
        nearest = min(self._decode_s, key=lambda known: (abs(known - bucket), -known))
        return self._decode_s[nearest]


def _smooth(before: float | None, seen: float) -> float:
    return seen if before is None else before + SMOOTHING * (seen - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A request that is decoding."""

    first_s: float
    """When its first token came."""
    last_s: float
    """When its latest token came."""
    tokens: int
    """So far."""
    tpot_s: float
    left: int
    """Tokens to come at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """A request without a first token, in the order in which it will be computed."""

    due_s: float
    """Its arrival."""
    ttft_s: float
    tokens: int
    """Of its prompt that are still to be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Everything that waits for the engine."""

    streams: Sequence[Stream] = ()
    awaited: Sequence[Awaited] = ()
    blocked: bool = False
    """Requests wait and no KV row is free: serving must make one free first."""
    free_rows: float = 1.0
    """Share of KV rows that are free."""
    budget: int = 1


def slack_s(demand: Demand, costs: StepCosts, now_s: float) -> float:
    """Return the seconds that may pass before the next step begins; infinite when nobody waits, never negative.

    A stream's mean gap may grow to a part of its target, and no gap beyond the target itself; a prompt's first
    token may be put off to a part of its target. Rows that fill up take slack away: slower streams hold them longer.
    """
    if not demand.streams and not demand.awaited:
        return math.inf
    if demand.blocked:
        return 0.0
    decodes, slack = len(demand.streams), math.inf
    chunk = min(max(0, demand.budget - decodes), sum(a.tokens for a in demand.awaited))
    step = costs.step_s(decodes=decodes, prefill_tokens=chunk)
    for s in demand.streams:
        due = min(s.first_s + TPOT_MARGIN * s.tpot_s * s.tokens, s.last_s + s.tpot_s)
        slack = min(slack, due - now_s - step)
    ahead = 0
    for a in demand.awaited:
        ahead += a.tokens
        need = costs.prefill_s(ahead, decodes=decodes, budget=demand.budget)
        slack = min(slack, a.due_s + TTFT_MARGIN * a.ttft_s - now_s - need)
    return max(0.0, slack) * min(1.0, 2 * demand.free_rows)


def allowance_s(streams: Sequence[Stream], costs: StepCosts, now_s: float) -> float:
    """Return how long the next step may last so that no stream's mean gap goes beyond its target; infinite for none.

    Streams that will miss their target whatever is done don't count.
    """
    step = costs.step_s(decodes=len(streams), prefill_tokens=0)
    helped = [s for s in streams if now_s + s.left * step <= s.first_s + s.tpot_s * (s.tokens + s.left - 1)]
    return min((s.first_s + s.tpot_s * s.tokens - now_s for s in helped), default=math.inf)


class ShareMeter:
    """Holds background work to a ceiling on its part of the time."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._credit_s = 0.0
        self._at_s: float | None = None

    def allowed(self, share: float, now_s: float) -> bool:
        """Return whether a slice may run now under this ceiling."""
        if self._at_s is not None:
            self._credit_s += share * (now_s - self._at_s)
        self._at_s = now_s
        self._credit_s = min(self._credit_s, share * self._window_s)
        return share >= 1 or (share > 0 and self._credit_s > 0)

    def spend(self, seconds: float) -> None:
        """Charge a slice."""
        self._credit_s = max(self._credit_s - seconds, -self._window_s)
