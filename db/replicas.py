"""Replicas and their heartbeats."""

from dataclasses import asdict

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from db.records import Heartbeat, ReplicaId, ReplicaRecord
from db.tables import HeartbeatRow, ReplicaRow


def announce(s: Session, replica: ReplicaRecord) -> None:
    """Say that a replica exists; a restart under the same id replaces what it said before."""
    values = asdict(replica)
    s.execute(insert(ReplicaRow).values(values).on_conflict_do_update(index_elements=[ReplicaRow.id], set_=values))


def heartbeat(s: Session, beat: Heartbeat) -> None:
    """Replace the replica's heartbeat."""
    values = {
        **{name: getattr(beat, name) for name in Heartbeat.__dataclass_fields__},
        "active": dict(beat.active),
        "active_uids": dict(beat.active_uids),
        "resident": list(beat.resident),
    }
    upsert = insert(HeartbeatRow).values(values)
    s.execute(upsert.on_conflict_do_update(index_elements=[HeartbeatRow.replica_id], set_=values))


def live(s: Session, *, now_s: float, dead_after_s: float) -> list[tuple[ReplicaRecord, Heartbeat]]:
    """Return the replicas whose last heartbeat is younger than ``dead_after_s``, ready or not, by id."""
    query = (
        select(ReplicaRow, HeartbeatRow)
        .join(HeartbeatRow, HeartbeatRow.replica_id == ReplicaRow.id)
        .where(HeartbeatRow.at_s > now_s - dead_after_s)
        .order_by(ReplicaRow.id)
    )
    return [(_replica(replica), _heartbeat(beat)) for replica, beat in s.execute(query)]


def every(s: Session) -> list[tuple[ReplicaRecord, Heartbeat | None]]:
    """Return all that ever announced themselves and did not retire, by id; None: no heartbeat since a crash."""
    query = (
        select(ReplicaRow, HeartbeatRow)
        .outerjoin(HeartbeatRow, HeartbeatRow.replica_id == ReplicaRow.id)
        .order_by(ReplicaRow.id)
    )
    return [(_replica(replica), None if beat is None else _heartbeat(beat)) for replica, beat in s.execute(query)]


def retire(s: Session, replica_id: ReplicaId, *, started_s: float | None = None) -> None:
    """Forget a replica that stopped in good order; ``started_s``: only that start of it, not one that replaced it."""
    row = s.scalars(select(ReplicaRow).where(ReplicaRow.id == replica_id).with_for_update()).first()
    if row is None or started_s not in (None, row.started_s):
        return
    s.execute(delete(HeartbeatRow).where(HeartbeatRow.replica_id == replica_id))
    s.execute(delete(ReplicaRow).where(ReplicaRow.id == replica_id))


def _replica(row: ReplicaRow) -> ReplicaRecord:
    return ReplicaRecord(
        id=row.id, url=row.url, backbone=row.backbone, has_shard=row.has_shard, started_s=row.started_s
    )


def _heartbeat(row: HeartbeatRow) -> Heartbeat:
    return Heartbeat(
        replica_id=row.replica_id,
        at_s=row.at_s,
        ready=row.ready,
        queued=row.queued,
        running=row.running,
        queue_age_s=row.queue_age_s,
        ttft_p95_s=row.ttft_p95_s,
        tpot_p95_s=row.tpot_p95_s,
        finished=row.finished,
        violations=row.violations,
        requests_total=row.requests_total,
        tokens_per_s=row.tokens_per_s,
        train_tokens_total=row.train_tokens_total,
        train_tokens_decoding_total=row.train_tokens_decoding_total,
        train_share=row.train_share,
        round_id=row.round_id,
        active=row.active,
        active_uids=row.active_uids,
        resident=tuple(row.resident),
        swaps_total=row.swaps_total,
        kv_used=row.kv_used,
    )
