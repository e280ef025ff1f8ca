"""What the gateway knows of the replicas: a snapshot swapped whole, and whether each one answers.

The snapshot comes from Postgres by ``watch``; when Postgres is away the last one stays in force. Whether a
replica is up the gateway finds out itself, by its requests and by probes, so that it notices within a moment and
without Postgres.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from db.records import FleetDecision, Heartbeat, ReplicaId, ReplicaRecord
from serving.gateway.dispatch import Dispatcher

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A replica that has announced itself."""

    id: ReplicaId
    url: str
    weight: float
    ready: bool
    """By its last heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The fleet at one moment."""

    members: Mapping[ReplicaId, Member] = field(default_factory=dict)


def snapshot(records: Iterable[tuple[ReplicaRecord, Heartbeat | None]], decision: FleetDecision | None) -> Snapshot:
    """Return the fleet under the latest decision.

    A replica that the decision does not know yet gets the mean weight: it has just come, and waiting for the next
    decision would leave it idle, or the fleet without anybody if it is the first.
    """
    records = list(records)
    weights = {} if decision is None else decision.weights
    known = [weights[r.id] for r, _ in records if r.id in weights]
    mean = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    return Snapshot(
        members={
            r.id: Member(
                id=r.id,
                url=r.url.rstrip("/"),
                weight=weights.get(r.id, mean),
                ready=beat is not None and beat.ready,
            )
            for r, beat in records
        }
    )


@dataclass(slots=True)
class Attempt:
    """A request that is at a replica; ``guard`` ends the wait for it."""

    guard: asyncio.Timeout
    begun: bool = False
    """The caller has had a byte of it."""
    sending: bool = False
    """It is the caller that keeps it waiting, not the replica."""


@dataclass(slots=True)
class Health:
    """What the gateway itself has seen of one replica."""

    up: bool
    slow_probes: int = 0
    attempts: list[Attempt] = field(default_factory=list)


class Fleet:
    """The replicas, as the gateway's event loop sees them. Only ``swap`` may be called from another thread."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._health: dict[ReplicaId, Health] = {}
        self._dispatcher = Dispatcher()

    def swap(self, new: Snapshot) -> None:
        """Put a new snapshot in force."""
        self._snapshot = new

    @property
    def members(self) -> Mapping[ReplicaId, Member]:
        """All members, up or not."""
        return self._snapshot.members

    def health(self, member: Member) -> Health:
        """Return what is known of a member; at first its heartbeat is believed."""
        return self._health.setdefault(member.id, Health(up=member.ready))

    def up(self) -> dict[ReplicaId, Member]:
        """Return the members that answer."""
        return {m.id: m for m in self.members.values() if self.health(m).up}

    def choose(self, *, exclude: Set[ReplicaId]) -> Member | None:
        """Return who gets the next request; None if nobody is left."""
        up = self.up()
        chosen = self._dispatcher.choose({r: m.weight for r, m in up.items()}, self.inflight(), exclude=exclude)
        return None if chosen is None else up[chosen]

    def inflight(self) -> dict[ReplicaId, int]:
        """Return this gateway's requests by replica."""
        return {r: len(h.attempts) for r, h in self._health.items()}

    @contextmanager
    def sent(self, member: Member, attempt: Attempt) -> Iterator[None]:
        """Count a request as being at a member."""
        attempts = self.health(member).attempts
        attempts.append(attempt)
        try:
            yield
        finally:
            attempts.remove(attempt)

    def suspend(self, member: Member, reason: str) -> None:
        """Send no more requests until a probe succeeds; what is there already will be answered there."""
        health = self.health(member)
        if health.up:
            log.warning("replica_ejected", replica_id=member.id, reason=reason)
        health.up, health.slow_probes = False, 0

    def eject(self, member: Member, reason: str) -> None:
        """The same for one that is lost: what waits there for a first byte goes elsewhere."""
        self.suspend(member, reason)
        now = asyncio.get_running_loop().time()
        for attempt in self.health(member).attempts:
            if not attempt.begun and not attempt.guard.expired():
                attempt.guard.reschedule(now)

    def readmit(self, member: Member) -> None:
        """It answers (again)."""
        health = self.health(member)
        if not health.up:
            log.info("replica_admitted", replica_id=member.id)
        health.up, health.slow_probes = True, 0

    def forget_absent(self) -> list[ReplicaId]:
        """Drop what is known of replicas that have retired, and return them."""
        members = self.members
        gone = [r for r, h in self._health.items() if r not in members and not h.attempts]
        for replica in gone:
            del self._health[replica]
        return gone
