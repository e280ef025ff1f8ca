"""What a round asks of whom: client selection and the round's plan. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from db.records import (
    ClientId,
    Factor,
    Heartbeat,
    ReplicaRecord,
    RoundId,
    RoundPlan,
    VersionUid,
)
from infra.errors import NotEnoughClients
from infra.settings import RoundSettings

Fleet = Sequence[tuple[ReplicaRecord, Heartbeat]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSize:
    """How much a client trains in a round."""

    tokens: int
    """Supervised tokens."""
    rows_per_step: int
    """Rows per optimizer step."""


class Sizer(Protocol):
    """Chooses a round's size from the fleet; where a forecast of the load and an optimiser belong."""

    def __call__(self, settings: RoundSettings, fleet: Fleet) -> RoundSize:
        """Return the size that every client of the round is asked for."""
        ...


def fixed_size(settings: RoundSettings, fleet: Fleet) -> RoundSize:
    """Return the size in the settings, whatever the load: the scheduler's slack rule alone then sets the pace."""
    return RoundSize(tokens=settings.tokens, rows_per_step=settings.rows_per_step)


def size_of(tokens: int) -> Sizer:
    """Return a sizer that asks for that many tokens, whatever the settings say."""
    return lambda settings, fleet: RoundSize(tokens=tokens, rows_per_step=settings.rows_per_step)


def ready(fleet: Fleet, backbone: str) -> list[ReplicaRecord]:
    """Return the replicas that an adapter of this backbone concerns: ready and on it."""
    return [record for record, beat in fleet if beat.ready and record.backbone == backbone]


def select_clients(fleet: Fleet, *, backbone: str, min_clients: int) -> tuple[ClientId, ...]:
    """Return every replica that could train now, sorted: ready, with a shard, on the adapter's backbone.

    Raises ``NotEnoughClients`` that says what the fleet lacks.
    """
    able = [record for record in ready(fleet, backbone) if record.has_shard]
    if len(able) >= min_clients:
        return tuple(sorted(ClientId(record.id) for record in able))
    foreign = sum(record.backbone != backbone for record, _ in fleet)
    raise NotEnoughClients(
        f"{len(able)} of {len(fleet)} live replicas can train, {min_clients} are needed"
        + (f"; {foreign} have another backbone" if foreign else "")
    )


def factor_turn(decided: int, *, initial_uid: VersionUid, base_uid: VersionUid) -> int:
    """Return whose turn it is in a strategy's alternation, from 1.

    ``decided``: rounds promoted or rejected since the adapter left its initial version, with the one that left it. The
    earlier ones do not count: as long as B is zero, as it is in the initial version, a round that trains A learns
    nothing.
    """
    return 1 if base_uid == initial_uid else 1 + decided


def round_seed(round_id: RoundId) -> int:
    """Return a round's seed: the same round asks for the same draws, however often it is resumed."""
    return int.from_bytes(hashlib.sha256(round_id.encode()).digest()[:4], "big") >> 1


def plan_round(settings: RoundSettings, *, round_id: RoundId, factor: Factor, size: RoundSize) -> RoundPlan:
    """Return what each client is asked for; the plan never changes afterwards."""
    return RoundPlan(
        factor=factor,
        tokens=size.tokens,
        rows_per_step=size.rows_per_step,
        lr=settings.lr,
        lr_ratio=settings.lr_ratio,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        swap_every=settings.swap_every,
        deadline_s=settings.deadline_s,
        min_clients=settings.min_clients,
        seed=round_seed(round_id),
    )
