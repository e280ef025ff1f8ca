"""Which replica gets the next request. Pure: counts in, a choice out.

Requests follow the dispatch weights by smooth weighted round robin: exact over a few requests, without bursts to
one replica. A bound on each replica's requests in flight overrides it: one that answers slowly, or whose
heartbeats are a slot old, does not go on collecting requests while others are free.
"""

from collections.abc import Mapping, Set

from db.records import ReplicaId

MARGIN = 2
"""A replica may hold this many requests more than its weighted share of what is in flight."""
MAX_CREDIT = 2.0
"""Requests that a replica may be owed, or have had too many of, after it was passed over."""


class Dispatcher:
    """Remembers what each replica is owed."""

    def __init__(self) -> None:
        self._credit: dict[ReplicaId, float] = {}

    def choose(
        self, weights: Mapping[ReplicaId, float], inflight: Mapping[ReplicaId, int], *, exclude: Set[ReplicaId]
    ) -> ReplicaId | None:
        """Return the replica for the next request; None if every one is excluded.

        ``weights`` holds every replica that can be asked. Those of weight 0 come last, with equal weights: the
        controller has given them up, but a request that has nowhere else to go is still worth trying.
        """
        asked = {r: w for r, w in weights.items() if r not in exclude}
        if not asked:
            return None
        shares = normalised(asked)
        for replica in [r for r in self._credit if r not in weights]:
            del self._credit[replica]
        for replica, share in shares.items():
            self._credit[replica] = min(MAX_CREDIT, self._credit.get(replica, 0.0) + share)
        total = sum(inflight.get(r, 0) for r in shares)
        free = [r for r, share in shares.items() if inflight.get(r, 0) < MARGIN + share * (total + 1)]
        chosen = max(free, key=lambda r: (self._credit[r], shares[r], r))
        self._credit[chosen] = max(-MAX_CREDIT, self._credit[chosen] - 1)
        return chosen


def normalised(weights: Mapping[ReplicaId, float]) -> dict[ReplicaId, float]:
    """Return the positive weights, scaled to sum 1; equal ones if none is positive."""
    positive = {r: w for r, w in weights.items() if w > 0}
    total = sum(positive.values())
    if not total > 0:
        return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
    return {r: w / total for r, w in positive.items()}
