"""The gate: may a candidate replace the version in force? Pure.

Candidate and base are scored on the same fixed rows, so each row gives a pair and its difficulty cancels. The
figure is the difference of pooled cross-entropies, a ratio ``R = Σd / Σt`` of the rows' differences ``d`` (nats)
to their tokens ``t``. Its standard error comes from the linearised residuals ``d − R·t``, within each client
(clients' rows are separate samples): ``se² = Σ_c n/(n−1)·Σ(e − ē)² / (Σt)²``.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType

from db.records import ClientId, QualityRecord

MIN_ROWS = 8
"""Fewer paired rows say nothing about the spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """How sure the gate wants to be."""

    confidence: float
    """Of the one-sided bound on the pooled difference."""
    tolerance: float
    """Nats per token by which one client's cross-entropy may rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Cross-entropy on one client's gate rows, base against candidate."""

    before: float
    after: float
    rows: int

    @property
    def change(self) -> float:
        """Below zero: better."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """What the gate says, and on what grounds."""

    promote: bool
    reason: str
    ce_before: float
    """Nats per token over all clients' rows."""
    ce_after: float
    bound: float
    """Upper confidence bound of ``ce_after − ce_before``; promotion needs it below zero."""
    by_client: Mapping[ClientId, Pair]


def student_t(confidence: float, freedom: int) -> float:
    """Return the one-sided quantile of Student's t, by the first two terms of its expansion in 1/freedom."""
    z = NormalDist().inv_cdf(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def decide(
    base: Mapping[ClientId, QualityRecord], candidate: Mapping[ClientId, QualityRecord], rule: GateRule
) -> GateDecision:
    """Compare on the clients that scored both; every doubt ends in rejection."""
    clients = sorted(base.keys() & candidate.keys())
    pairs: dict[ClientId, Pair] = {}
    for client in clients:
        before, after = base[client], candidate[client]
        if before.set_sha256 != after.set_sha256 or before.tokens_by_row != after.tokens_by_row:
            return refuse(f"{client} scored the two versions on different rows", pairs)
        if not all(map(math.isfinite, (*before.nll_by_row, *after.nll_by_row))):
            return refuse(f"{client}: a score is not finite", pairs)
        pairs[client] = Pair(before=before.ce, after=after.ce, rows=len(before.nll_by_row))

    tokens = sum(sum(base[c].tokens_by_row) for c in clients)
    rows = sum(pair.rows for pair in pairs.values())
    if rows < MIN_ROWS or tokens == 0:
        return refuse(f"{rows} paired gate rows are too few to decide on", pairs)

    ce_before = sum(sum(base[c].nll_by_row) for c in clients) / tokens
    ce_after = sum(sum(candidate[c].nll_by_row) for c in clients) / tokens
    change = ce_after - ce_before
    variance, freedom = 0.0, 0
    for client in clients:
        residuals = [
            after - before - change * count
            for before, after, count in zip(
                base[client].nll_by_row, candidate[client].nll_by_row, base[client].tokens_by_row, strict=True
            )
        ]
        n = len(residuals)
        if n < 2:
            continue
        mean = sum(residuals) / n
        variance += n / (n - 1) * sum((e - mean) ** 2 for e in residuals) / tokens**2
        freedom += n - 1
    bound = change + student_t(rule.confidence, max(1, freedom)) * math.sqrt(variance)

    worse = {c: pair for c, pair in pairs.items() if pair.change > rule.tolerance}
    sure = f"{rule.confidence:.0%}"
    if worse:
        promote, reason = False, "gate CE worse for " + ", ".join(f"{c} by {p.change:.4f}" for c, p in worse.items())
    elif bound >= 0:
        promote, reason = False, f"pooled gate CE changed by {change:+.4f}, {sure} bound {bound:+.4f}: no sure gain"
    else:
        promote, reason = True, f"pooled gate CE fell by {-change:.4f}, at least {-bound:.4f} with {sure} confidence"
    return GateDecision(
        promote=promote, reason=reason, ce_before=ce_before, ce_after=ce_after, bound=bound, by_client=pairs
    )


def missing_scores(scored: Set[ClientId], *, asked: Set[ClientId], accepted: Set[ClientId], min_clients: int) -> str:
    """Return why too few clients scored both versions to decide; empty if enough did.

    Enough are all whose update the candidate is made of, or else a majority of those ``asked``.
    """
    needed = max(min_clients, len(asked) // 2 + 1)
    if scored and (accepted <= scored or len(scored) >= needed):
        return ""
    unscored = ", ".join(sorted(asked - scored)) or "none was asked"
    return f"{len(scored)} of {len(asked)} clients scored the candidate, {needed} are needed; not scored: {unscored}"


def refuse(reason: str, pairs: Mapping[ClientId, Pair] = MappingProxyType({})) -> GateDecision:
    """Return a rejection that no figure backs."""
    return GateDecision(
        promote=False, reason=reason, ce_before=math.nan, ce_after=math.nan, bound=math.inf, by_client=pairs
    )
