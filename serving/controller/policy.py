"""Fast-timescale policy: heartbeats and arrivals in, dispatch weights and training shares out. Pure.

It acts on queue age and predicted TTFT, and on percentiles and violations only over a minimum sample: the raw
counts of one slot are noise. Its memory is the decision before, so that a new leader goes on where the old one
stopped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from db.records import Arrivals, FleetDecision, Heartbeat, ReplicaId
from serving.model import Slo

MIN_SAMPLE = 5
"""Requests that must have ended in a heartbeat's window before its percentiles and violations count."""

FLOOR = 0.2
"""A live replica's weight is at least this part of an equal share, so that there is something to judge it by."""
GAIN = 0.5
"""Weights go by pressure to the power of minus this. They start from equal shares, never from the weights before:
figures lag behind by their window, and what adds up over that lag swings."""
MAX_STEP = 0.03
"""A weight moves at most this far per slot, unless a replica comes or goes: one burst moves little within the window
of a heartbeat's figures, and the gateway's own bound on requests in flight is faster anyway."""
DEAD_BAND = 0.03
"""Weights within this of their target stay."""
MIN_PRESSURE = 0.1
BALANCED = 0.5
"""While nobody's pressure exceeds this, weights go back to equal shares."""

DANGER = 0.8
"""Pressure above which the SLO is in danger."""
DANGER_AGE = 0.5
"""A request that has waited for this part of its TTFT has it in danger: its prefill is still to come."""
DANGER_MISSED = 0.1
"""Share of requests that missed their SLO."""
CUT = 0.5
RAISE = 0.1
RAISE_BELOW_FORECAST = 0.3
BELOW_FORECAST = 0.7
"""Arrivals below this part of the forecast count as a lull."""

RECENT_SLOTS = 4
FORECAST_SLOTS = 30
SMOOTHING = 0.2
"""Weight of the newest slot in the moving average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Arrivals at the whole fleet."""

    recent_per_s: float
    forecast_per_s: float

    @property
    def lull(self) -> bool:
        """Whether clearly fewer requests come than were to be expected."""
        return self.recent_per_s < BELOW_FORECAST * self.forecast_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to decide for the next slot."""

    weights: Mapping[ReplicaId, float]
    train_shares: Mapping[ReplicaId, float]
    reason: str


def decide(
    ready: Sequence[Heartbeat], known: Sequence[ReplicaId], previous: FleetDecision | None, *, slo: Slo, load: Load
) -> Choice:
    """Return weights that sum to 1 over the ``ready`` replicas, and training shares.

    ``known`` are all that have announced themselves: those that are not ready get weight and share 0.
    """
    absent = {r: 0.0 for r in known if r not in {b.replica_id for b in ready}}
    if not ready:
        return Choice(weights=absent, train_shares=absent, reason="no live replica")
    pressures = {b.replica_id: pressure(b, slo) for b in ready}
    dangers = {b.replica_id: why for b in ready if (why := danger(b, slo))}
    before = {} if previous is None else previous.train_shares
    shares = {b.replica_id: train_share(b, before.get(b.replica_id, 1.0), slo=slo, load=load) for b in ready}
    weights = dispatch_weights(pressures, {} if previous is None else previous.weights)
    reason = "; ".join(f"{r}: {why}" for r, why in sorted(dangers.items())) or ("lull" if load.lull else "steady")
    return Choice(weights={**weights, **absent}, train_shares={**shares, **absent}, reason=reason)


def predicted_ttft_s(beat: Heartbeat) -> float:
    """Return what the next first token will take: what the last ones took, or what the oldest one waits already."""
    sampled = beat.ttft_p95_s if beat.finished >= MIN_SAMPLE else 0.0
    return max(sampled, beat.queue_age_s + beat.tpot_p95_s)


def pressure(beat: Heartbeat, slo: Slo) -> float:
    """Return how near a replica is to its SLO; 1 is at it."""
    tpot = beat.tpot_p95_s / slo.tpot_s if beat.finished >= MIN_SAMPLE else 0.0
    return max(MIN_PRESSURE, predicted_ttft_s(beat) / slo.ttft_s, tpot)


def danger(beat: Heartbeat, slo: Slo) -> str:
    """Return why the SLO is in danger; empty if it is not."""
    if beat.queue_age_s > DANGER_AGE * slo.ttft_s:
        return "queue age"
    if beat.finished >= MIN_SAMPLE and beat.violations > DANGER_MISSED * beat.finished:
        return "missed SLOs"
    if pressure(beat, slo) > DANGER:
        return "TTFT or TPOT"
    return ""


def train_share(beat: Heartbeat, before: float, *, slo: Slo, load: Load) -> float:
    """Return the ceiling of a replica's training: cut at once when the SLO is in danger, raised slowly.

    It is only a ceiling: within it the replica trains in the slack that it sees itself.
    """
    if beat.queue_age_s > slo.ttft_s:
        return 0.0
    if danger(beat, slo):
        return CUT * before
    return min(1.0, before + (RAISE_BELOW_FORECAST if load.lull else RAISE))


def dispatch_weights(
    pressures: Mapping[ReplicaId, float], previous: Mapping[ReplicaId, float]
) -> dict[ReplicaId, float]:
    """Return weights of the live replicas: away from pressure, slowly, and never below the floor."""
    n = len(pressures)
    before = _scaled({r: previous.get(r) or 1 / n for r in pressures})
    target = dict.fromkeys(pressures, 1 / n)
    if max(pressures.values()) > BALANCED:
        target = _floored(_scaled({r: p**-GAIN for r, p in pressures.items()}), FLOOR / n)
    gap = max(abs(target[r] - before[r]) for r in pressures)
    step = 0.0 if gap < DEAD_BAND else min(1.0, MAX_STEP / gap)
    return _floored({r: w + step * (target[r] - w) for r, w in before.items()}, FLOOR / n)


def _scaled(weights: Mapping[ReplicaId, float]) -> dict[ReplicaId, float]:
    total = math.fsum(weights.values())
    return {r: w / total for r, w in weights.items()}


def _floored(weights: dict[ReplicaId, float], floor: float) -> dict[ReplicaId, float]:
    """Raise what is below the floor to it, at the others' expense; the sum stays 1."""
    low: set[ReplicaId] = set()
    while more := {r for r, w in weights.items() if r not in low and w < floor}:
        low |= more
        rest = math.fsum(w for r, w in weights.items() if r not in low)
        scale = (1 - floor * len(low)) / rest if rest else 0.0
        weights = {r: floor if r in low else w * scale for r, w in weights.items()}
    return weights


def observe_load(arrivals: Sequence[Arrivals], *, now_s: float, slot_s: float) -> Load:
    """Return recent arrivals and what the slots before let expect. The slot that is running does not count."""
    current = math.floor(now_s / slot_s)
    by_slot: dict[int, int] = {}
    for a in arrivals:
        slot = round(a.slot_s / slot_s)
        by_slot[slot] = by_slot.get(slot, 0) + a.requests
    past = [by_slot.get(slot, 0) / slot_s for slot in range(current - FORECAST_SLOTS, current)]
    # The newest slot is often not written yet.
    recent, older = past[-RECENT_SLOTS - 1 : -1], past[: -RECENT_SLOTS - 1]
    average = older[0]
    for rate in older[1:]:
        average += SMOOTHING * (rate - average)
    return Load(recent_per_s=sum(recent) / len(recent), forecast_per_s=average)
