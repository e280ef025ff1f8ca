"""Requests counted by time slot, until the watching thread writes them to Postgres. Thread-safe."""

import math
import threading
from collections import defaultdict

from db.records import AdapterName, Arrivals, ReplicaId

MAX_PENDING = 4096
"""Counts kept while Postgres is away; beyond it the oldest are dropped."""


class ArrivalCounts:
    """Counts of one gateway."""

    def __init__(self, gateway_id: str, slot_s: float) -> None:
        self._gateway_id = gateway_id
        self._slot_s = slot_s
        self._lock = threading.Lock()
        self._counts: dict[tuple[float, ReplicaId | None, AdapterName], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, at_s: float, replica: ReplicaId | None, adapter: AdapterName, *, failed: bool) -> None:
        """Count a request that arrived at wall time ``at_s``."""
        slot = math.floor(at_s / self._slot_s) * self._slot_s
        with self._lock:
            counts = self._counts[slot, replica, adapter]
            counts[0] += 1
            counts[1] += failed
            if len(self._counts) > MAX_PENDING:
                del self._counts[min(self._counts, key=lambda key: key[0])]

    def take(self) -> list[Arrivals]:
        """Return the counts since the last call, oldest slot first."""
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
        return [
            Arrivals(
                slot_s=slot,
                gateway_id=self._gateway_id,
                replica_id=replica,
                adapter=adapter,
                requests=requests,
                failures=failures,
            )
            for (slot, replica, adapter), (requests, failures) in sorted(counts.items(), key=lambda item: item[0][0])
        ]

    def put_back(self, arrivals: list[Arrivals]) -> None:
        """Return counts that could not be written."""
        with self._lock:
            for a in arrivals[-MAX_PENDING:]:
                counts = self._counts[a.slot_s, a.replica_id, a.adapter]
                counts[0] += a.requests
                counts[1] += a.failures
