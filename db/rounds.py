"""Rounds, the clients' updates, and measured quality."""

from dataclasses import asdict
from typing import TypedDict, Unpack

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from db.records import (
    AdapterName,
    ClientId,
    Factor,
    QualityRecord,
    RoundId,
    RoundPlan,
    RoundRecord,
    RoundState,
    Split,
    UpdateRecord,
    VersionUid,
)
from db.tables import QualityRow, RoundRow, UpdateRow
from infra.errors import RoundError, VersionConflict


class RoundFields(TypedDict, total=False):
    """What changes in the life of a round."""

    candidate_uid: VersionUid | None
    aggregation_error: float | None
    ce_before: float | None
    ce_after: float | None
    reason: str
    decided_s: float | None
    served_s: float | None
    flow_run_id: str | None


def open_round(s: Session, record: RoundRecord) -> RoundRecord:
    """Open a round, or return the one of that id as it now stands.

    Raises ``VersionConflict`` if the adapter has an unfinished round already, or one of that number.
    """
    values = {name: getattr(record, name) for name in RoundRecord.__dataclass_fields__}
    values |= {"plan": asdict(record.plan), "clients": list(record.clients)}
    # On a conflict this waits for the other transaction to end, so what is read next is settled.
    opened = s.execute(insert(RoundRow).values(values).on_conflict_do_nothing().returning(RoundRow.id)).first()
    there = s.scalars(select(RoundRow).where(RoundRow.id == record.id)).first()
    if there is None:
        assert opened is None
        raise VersionConflict(f"adapter {record.adapter!r} has an unfinished round, or one of number {record.number}")
    return _round(there)


def get(s: Session, round_id: RoundId) -> RoundRecord:
    """Return a round. Raises ``RoundError`` if there is none of that id."""
    found = find(s, round_id)
    if found is None:
        raise RoundError(f"no round {round_id}")
    return found


def find(s: Session, round_id: RoundId) -> RoundRecord | None:
    """Return a round, if there is one of that id."""
    row = s.scalars(select(RoundRow).where(RoundRow.id == round_id)).first()
    return None if row is None else _round(row)


def latest(s: Session, adapter: AdapterName) -> RoundRecord | None:
    """Return the adapter's latest round, finished or not."""
    query = select(RoundRow).where(RoundRow.adapter == adapter).order_by(RoundRow.number.desc()).limit(1)
    row = s.scalars(query).first()
    return None if row is None else _round(row)


def of_adapter(s: Session, adapter: AdapterName, *, latest: int | None = None) -> list[RoundRecord]:
    """Return the adapter's rounds by number; ``latest``: only so many, the newest."""
    query = select(RoundRow).where(RoundRow.adapter == adapter).order_by(RoundRow.number.desc()).limit(latest)
    return [_round(row) for row in s.scalars(query)][::-1]


def decided_since_left(s: Session, adapter: AdapterName, initial_uid: VersionUid) -> int:
    """Return how many rounds were promoted or rejected since the last one that promoted away from ``initial_uid``.

    That one counts; so do all if there was none.
    """
    mine = RoundRow.adapter == adapter
    left = select(func.max(RoundRow.number)).where(
        mine, RoundRow.base_uid == initial_uid, RoundRow.state == RoundState.PROMOTED
    )
    decided = RoundRow.state.in_((RoundState.PROMOTED, RoundState.REJECTED))
    query = select(func.count()).where(mine, decided, RoundRow.number >= func.coalesce(left.scalar_subquery(), 0))
    return s.scalars(query).one()


def advance(
    s: Session, round_id: RoundId, *, expected: RoundState, to: RoundState, **fields: Unpack[RoundFields]
) -> bool:
    """Move a round on and set ``fields``; False: it is not in ``expected``, and nothing is changed."""
    guarded = update(RoundRow).where(RoundRow.id == round_id, RoundRow.state == expected)
    return s.execute(guarded.values(state=to, **fields).returning(RoundRow.id)).first() is not None


def add_update(s: Session, record: UpdateRecord) -> None:
    """Add a client's update; the same bytes again change nothing. Raises ``VersionConflict`` for others."""
    values = {name: getattr(record, name) for name in UpdateRecord.__dataclass_fields__}
    s.execute(insert(UpdateRow).values(values).on_conflict_do_nothing())
    there = s.scalars(select(UpdateRow).where(*_key(record.round_id, record.client_id))).one()
    if there.sha256 != record.sha256:
        raise VersionConflict(f"{record.client_id} has already returned another update for round {record.round_id}")


def update_of(s: Session, round_id: RoundId, client_id: ClientId) -> UpdateRecord | None:
    """Return a client's update for a round, if it has returned one."""
    return next((u for u in updates(s, round_id) if u.client_id == client_id), None)


def updates(s: Session, round_id: RoundId) -> list[UpdateRecord]:
    """Return a round's updates by client."""
    query = select(UpdateRow).where(UpdateRow.round_id == round_id).order_by(UpdateRow.client_id)
    return [
        UpdateRecord(
            round_id=row.round_id,
            client_id=row.client_id,
            base_uid=row.base_uid,
            factor=row.factor,
            sha256=row.sha256,
            store_key=row.store_key,
            tokens=row.tokens,
            steps=row.steps,
            loss_first=row.loss_first,
            loss_last=row.loss_last,
            seconds=row.seconds,
            accepted=row.accepted,
            reason=row.reason,
        )
        for row in s.scalars(query)
    ]


def judge_update(s: Session, round_id: RoundId, client_id: ClientId, accepted: bool, reason: str) -> None:
    """Say whether an update passed its checks."""
    s.execute(update(UpdateRow).where(*_key(round_id, client_id)).values(accepted=accepted, reason=reason))


def add_quality(s: Session, record: QualityRecord) -> None:
    """Add a measurement; the first one of a version on the same rows stands."""
    values = {name: getattr(record, name) for name in QualityRecord.__dataclass_fields__}
    values |= {"nll_by_row": list(record.nll_by_row), "tokens_by_row": list(record.tokens_by_row)}
    s.execute(insert(QualityRow).values(values).on_conflict_do_nothing())


def quality(s: Session, uid: VersionUid, client_id: ClientId, split: Split, set_sha256: str) -> QualityRecord | None:
    """Return a measurement, if it was made."""
    query = select(QualityRow).where(
        QualityRow.uid == uid,
        QualityRow.client_id == client_id,
        QualityRow.split == split,
        QualityRow.set_sha256 == set_sha256,
    )
    row = s.scalars(query).first()
    return None if row is None else _quality(row)


def qualities(s: Session, uid: VersionUid) -> list[QualityRecord]:
    """Return all measurements of a version, by client and split."""
    query = select(QualityRow).where(QualityRow.uid == uid)
    ordered = query.order_by(QualityRow.client_id, QualityRow.split, QualityRow.set_sha256)
    return [_quality(row) for row in s.scalars(ordered)]


def _key(round_id: RoundId, client_id: ClientId) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return UpdateRow.round_id == round_id, UpdateRow.client_id == client_id


def _round(row: RoundRow) -> RoundRecord:
    return RoundRecord(
        id=row.id,
        adapter=row.adapter,
        number=row.number,
        state=row.state,
        base_uid=row.base_uid,
        base_epoch=row.base_epoch,
        plan=RoundPlan(**{**row.plan, "factor": Factor(row.plan["factor"])}),
        clients=tuple(ClientId(client) for client in row.clients),
        candidate_uid=row.candidate_uid,
        aggregation_error=row.aggregation_error,
        ce_before=row.ce_before,
        ce_after=row.ce_after,
        reason=row.reason,
        started_s=row.started_s,
        decided_s=row.decided_s,
        served_s=row.served_s,
        flow_run_id=row.flow_run_id,
    )


def _quality(row: QualityRow) -> QualityRecord:
    return QualityRecord(
        uid=row.uid,
        client_id=row.client_id,
        split=row.split,
        set_sha256=row.set_sha256,
        nll_by_row=tuple(row.nll_by_row),
        tokens_by_row=tuple(row.tokens_by_row),
        at_s=row.at_s,
    )
