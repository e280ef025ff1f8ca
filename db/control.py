"""What the fast controller reads and writes: leadership, decisions, arrivals."""

from collections.abc import Mapping, Sequence

from sqlalchemy import delete, func, literal, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from db.notify import notify
from db.records import DECISIONS_CHANNEL, Arrivals, FleetDecision, ReplicaId
from db.tables import ArrivalsRow, DecisionRow, LeadershipRow


def latest_decision(s: Session) -> FleetDecision | None:
    """Return the decision in force; None before the first."""
    row = s.scalars(select(DecisionRow).order_by(DecisionRow.id.desc()).limit(1)).first()
    return None if row is None else _decision(row)


def take_leadership(s: Session, leader_id: str) -> int:
    """Begin a new epoch, which fences off every earlier leader, and return it."""
    first = insert(LeadershipRow).values(id=1, epoch=1, leader_id=leader_id)
    again = first.on_conflict_do_update(
        index_elements=[LeadershipRow.id], set_={"epoch": LeadershipRow.epoch + 1, "leader_id": leader_id}
    )
    return s.execute(again.returning(LeadershipRow.epoch)).scalar_one()


def write_decision(
    s: Session,
    *,
    leader_epoch: int,
    at_s: float,
    weights: Mapping[ReplicaId, float],
    train_shares: Mapping[ReplicaId, float],
    reason: str,
) -> FleetDecision | None:
    """Write and announce a decision; None: another leader has taken over and nothing is written."""
    # FOR SHARE: a takeover waits for this transaction, so that no decision of an old epoch follows one of the new.
    leads = s.execute(
        select(LeadershipRow.epoch).where(LeadershipRow.epoch == leader_epoch).with_for_update(read=True)
    ).first()
    if leads is None:
        return None
    row = DecisionRow(
        leader_epoch=leader_epoch, at_s=at_s, weights=dict(weights), train_shares=dict(train_shares), reason=reason
    )
    s.add(row)
    s.flush()
    notify(s, DECISIONS_CHANNEL, str(row.id))
    return _decision(row)


def add_arrivals(s: Session, arrivals: Sequence[Arrivals]) -> None:
    """Add to the counts of their slots."""
    if not arrivals:
        return
    # Sorted, so that all gateways lock rows in one order; summed, for a statement can't touch a row twice.
    counts: dict[tuple[float, str, str, str], tuple[int, int]] = {}
    for a in arrivals:
        key = (a.slot_s, a.gateway_id, a.replica_id or "", a.adapter)
        requests, failures = counts.get(key, (0, 0))
        counts[key] = (requests + a.requests, failures + a.failures)
    rows = [
        {"slot_s": slot_s, "gateway_id": gateway, "replica_id": replica, "adapter": adapter}
        | {"requests": requests, "failures": failures}
        for (slot_s, gateway, replica, adapter), (requests, failures) in sorted(counts.items())
    ]
    upsert = insert(ArrivalsRow).values(rows)
    s.execute(
        upsert.on_conflict_do_update(
            index_elements=[ArrivalsRow.slot_s, ArrivalsRow.gateway_id, ArrivalsRow.replica_id, ArrivalsRow.adapter],
            set_={
                "requests": ArrivalsRow.requests + upsert.excluded.requests,
                "failures": ArrivalsRow.failures + upsert.excluded.failures,
            },
        )
    )


def arrivals_since(s: Session, since_s: float) -> list[Arrivals]:
    """Return the counts of slots that began at ``since_s`` or later, oldest first."""
    query = select(ArrivalsRow).where(ArrivalsRow.slot_s >= since_s)
    ordered = query.order_by(ArrivalsRow.slot_s, ArrivalsRow.gateway_id, ArrivalsRow.replica_id, ArrivalsRow.adapter)
    return [
        Arrivals(
            slot_s=row.slot_s,
            gateway_id=row.gateway_id,
            replica_id=ReplicaId(row.replica_id) if row.replica_id else None,
            adapter=row.adapter,
            requests=row.requests,
            failures=row.failures,
        )
        for row in s.scalars(ordered)
    ]


def forget(s: Session, *, before_s: float) -> int:
    """Delete arrivals and decisions older than ``before_s``, never the decision in force; return how many rows."""
    newest = select(func.coalesce(func.max(DecisionRow.id), literal(0))).scalar_subquery()
    arrivals = s.execute(delete(ArrivalsRow).where(ArrivalsRow.slot_s < before_s).returning(ArrivalsRow.slot_s))
    decisions = s.execute(
        delete(DecisionRow).where(DecisionRow.at_s < before_s, DecisionRow.id < newest).returning(DecisionRow.id)
    )
    return len(arrivals.all()) + len(decisions.all())


def _decision(row: DecisionRow) -> FleetDecision:
    return FleetDecision(
        id=row.id,
        leader_epoch=row.leader_epoch,
        at_s=row.at_s,
        weights={ReplicaId(replica): weight for replica, weight in row.weights.items()},
        train_shares={ReplicaId(replica): share for replica, share in row.train_shares.items()},
        reason=row.reason,
    )
