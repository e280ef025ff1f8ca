"""Adapters, their versions, and what MLflow has yet to be told of them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from db.notify import notify
from db.records import (
    ADAPTERS_CHANNEL,
    AdapterName,
    AdapterRecord,
    AuditRecord,
    Epoch,
    LoraSpec,
    OutboxRecord,
    Publishing,
    VersionRecord,
    VersionState,
    VersionUid,
)
from db.tables import AdapterRow, AuditRow, OutboxRow, VersionRow
from infra.errors import UnknownAdapter, UnknownVersion, VersionConflict

ACTIVE, PREVIOUS, SHADOW = "active", "previous", "shadow"
"""MLflow's aliases: the version in force, the one that a roll back returns to, the candidate."""


def create(s: Session, adapter: AdapterRecord, first: VersionRecord) -> None:
    """Create an adapter with its first version in force. The same again changes nothing.

    Raises ``VersionConflict`` if the name is taken by another configuration or the version by another adapter.
    """
    values = {
        "name": adapter.name,
        "backbone": adapter.backbone,
        "rank": adapter.spec.rank,
        "alpha": adapter.spec.alpha,
        "targets": list(adapter.spec.targets),
        "initial_uid": adapter.initial_uid,
        "desired_uid": adapter.desired_uid,
        "previous_uid": adapter.previous_uid,
        "epoch": adapter.epoch,
        "training": adapter.training,
        "publishing": adapter.publishing,
    }
    created = s.execute(insert(AdapterRow).values(values).on_conflict_do_nothing().returning(AdapterRow.name)).first()
    if created is None:
        there = get(s, adapter.name)
        if (there.backbone, there.spec, there.initial_uid) != (adapter.backbone, adapter.spec, adapter.initial_uid):
            raise VersionConflict(f"adapter {adapter.name!r} exists with another backbone, shape or first version")
        return
    add_version(s, first)
    _project(s, adapter.name, ACTIVE, first.number, at_s=first.created_s)
    _audit(s, "bootstrap", "create", first.created_s, {"adapter": adapter.name, "uid": first.uid})
    notify(s, ADAPTERS_CHANNEL, adapter.name)


def get(s: Session, name: AdapterName) -> AdapterRecord:
    """Return an adapter. Raises ``UnknownAdapter``."""
    return _adapter(_row(s, name))


def every(s: Session) -> list[AdapterRecord]:
    """Return all adapters by name."""
    return [_adapter(row) for row in s.scalars(select(AdapterRow).order_by(AdapterRow.name))]


def version(s: Session, uid: VersionUid) -> VersionRecord:
    """Return a federated version. Raises ``UnknownVersion``."""
    return _version(_version_row(s, uid))


def versions(s: Session, adapter: AdapterName, *, latest: int | None = None) -> list[VersionRecord]:
    """Return an adapter's federated versions by number; ``latest``: only so many, the newest."""
    query = select(VersionRow).where(VersionRow.adapter == adapter).order_by(VersionRow.number.desc()).limit(latest)
    return [_version(row) for row in s.scalars(query)][::-1]


def rejected_keys(s: Session, *, before_s: float) -> set[str]:
    """Return the store keys that only versions name which were rejected, are older, and are no adapter's way back."""
    kept_uids = [uid for a in every(s) for uid in (a.initial_uid, a.desired_uid, a.previous_uid) if uid is not None]
    gone = (
        (VersionRow.state == VersionState.REJECTED)
        & (VersionRow.created_s < before_s)
        & VersionRow.uid.not_in(kept_uids)
    )
    kept = select(VersionRow.store_key).where(~gone)
    return set(s.scalars(select(VersionRow.store_key).where(gone, VersionRow.store_key.not_in(kept))))


def add_version(s: Session, record: VersionRecord) -> None:
    """Add a version; a candidate gets the alias shadow. The same uid again changes nothing.

    Raises ``VersionConflict`` if the uid or the number belongs to another version.
    """
    values = {name: getattr(record, name) for name in VersionRecord.__dataclass_fields__}
    added = s.execute(insert(VersionRow).values(values).on_conflict_do_nothing().returning(VersionRow.uid)).first()
    if added is None:
        there = s.scalars(select(VersionRow).where(VersionRow.uid == record.uid)).first()
        if there is None or (there.adapter, there.number) != (record.adapter, record.number):
            raise VersionConflict(f"{record.adapter} version {record.number} ({record.uid}) clashes with another one")
    elif record.state is VersionState.CANDIDATE:
        _project(s, record.adapter, SHADOW, record.number, at_s=record.created_s)


def promote(
    s: Session,
    name: AdapterName,
    uid: VersionUid,
    *,
    expected_epoch: Epoch,
    actor: str,
    reason: str,
    now_s: float,
    tags: Mapping[str, str] | None = None,
) -> AdapterRecord:
    """Make ``uid`` the version in force. If it already is, change nothing. ``tags`` go to the version, too.

    Raises ``VersionConflict`` if the adapter's epoch is not ``expected_epoch`` or the version was rejected,
    ``UnknownVersion`` if the adapter has no such version.
    """
    row = _row(s, name, lock=True)
    chosen = _version_row(s, uid)
    if chosen.adapter != name:
        raise UnknownVersion(f"version {uid} belongs to adapter {chosen.adapter!r}, not {name!r}")
    if row.desired_uid == uid:
        return _adapter(row)
    _fence(row, expected_epoch)
    if chosen.state is VersionState.REJECTED:
        raise VersionConflict(f"version {chosen.number} of adapter {name!r} was rejected")
    replaced = _version_row(s, row.desired_uid)
    chosen.state = VersionState.PROMOTED
    _force(row, uid, previous=replaced.uid)
    _project(s, name, PREVIOUS, replaced.number, at_s=now_s)
    tags = {**(tags or {}), "decision": "promoted", "reason": reason, "epoch": str(row.epoch)}
    _project(s, name, ACTIVE, chosen.number, tags=tags, tagged=chosen.number, at_s=now_s)
    _project(s, name, SHADOW, None, at_s=now_s)
    _audit(s, actor, "promote", now_s, {"adapter": name, "uid": uid, "from": replaced.uid, "reason": reason})
    notify(s, ADAPTERS_CHANNEL, name)
    return _adapter(row)


def roll_back(
    s: Session, name: AdapterName, *, expected_epoch: Epoch, actor: str, reason: str, now_s: float
) -> AdapterRecord:
    """Make the previous version the one in force; the one that was counts as rejected.

    Raises ``VersionConflict`` if the epoch is not ``expected_epoch``, ``UnknownVersion`` if there is nothing to return
    to.
    """
    row = _row(s, name, lock=True)
    _fence(row, expected_epoch)
    if row.previous_uid is None:
        raise UnknownVersion(f"adapter {name!r} has no previous version to return to")
    dropped, chosen = _version_row(s, row.desired_uid), _version_row(s, row.previous_uid)
    dropped.state = VersionState.REJECTED
    parent = None if chosen.parent_uid is None else _version_row(s, chosen.parent_uid)
    earlier = parent if parent is not None and parent.state is VersionState.PROMOTED else None
    _force(row, chosen.uid, previous=None if earlier is None else earlier.uid)
    tags = {"decision": "rolled back", "reason": reason, "epoch": str(row.epoch)}
    _project(s, name, ACTIVE, chosen.number, tags=tags, tagged=dropped.number, at_s=now_s)
    _project(s, name, PREVIOUS, None if earlier is None else earlier.number, at_s=now_s)
    _audit(s, actor, "roll_back", now_s, {"adapter": name, "uid": chosen.uid, "from": dropped.uid, "reason": reason})
    notify(s, ADAPTERS_CHANNEL, name)
    return _adapter(row)


def reject(
    s: Session, uid: VersionUid, *, reason: str, actor: str, now_s: float, tags: Mapping[str, str] | None = None
) -> None:
    """Give up a candidate; the alias shadow goes. A rejected one changes nothing. ``tags`` go to the version, too.

    Raises ``VersionConflict`` if the version has been promoted, ``UnknownVersion``.
    """
    chosen = _version_row(s, uid, lock=True)
    if chosen.state is VersionState.REJECTED:
        return
    if chosen.state is VersionState.PROMOTED:
        raise VersionConflict(f"version {uid} has been promoted: roll back instead")
    chosen.state = VersionState.REJECTED
    tags = {**(tags or {}), "decision": "rejected", "reason": reason}
    _project(s, chosen.adapter, SHADOW, None, tags=tags, tagged=chosen.number, at_s=now_s)
    _audit(s, actor, "reject", now_s, {"adapter": chosen.adapter, "uid": uid, "reason": reason})


def set_mode(
    s: Session, name: AdapterName, *, training: bool, publishing: Publishing, actor: str, now_s: float
) -> None:
    """Switch training and local publishing for every replica. Raises ``UnknownAdapter``."""
    row = _row(s, name, lock=True)
    row.training, row.publishing = training, publishing
    _audit(s, actor, "set_mode", now_s, {"adapter": name, "training": training, "publishing": publishing.value})
    notify(s, ADAPTERS_CHANNEL, name)


def paused_s(s: Session, name: AdapterName, *, from_s: float, to_s: float) -> float:
    """Return for how much of a span of time the adapter's training was switched off."""
    query = select(AuditRow).where(AuditRow.action == "set_mode", AuditRow.at_s < to_s).order_by(AuditRow.id)
    paused, since_s, off = 0.0, from_s, False
    for row in s.scalars(query):
        if row.detail["adapter"] != name:
            continue
        at_s = max(from_s, row.at_s)
        paused, since_s, off = paused + (at_s - since_s if off else 0.0), at_s, not row.detail["training"]
    return paused + (to_s - since_s if off else 0.0)


def pending_outbox(s: Session, limit: int) -> list[OutboxRecord]:
    """Return the oldest changes that MLflow has yet to be told, in order; one projector at a time keeps that order."""
    query = select(OutboxRow).where(~OutboxRow.done).order_by(OutboxRow.id).limit(limit)
    return [
        OutboxRecord(
            id=row.id,
            adapter=row.adapter,
            alias=row.alias,
            number=row.number,
            tagged=row.tagged,
            tags=row.tags,
            created_s=row.created_s,
        )
        for row in s.scalars(query)
    ]


def outbox_done(s: Session, outbox_id: int) -> None:
    """Say that MLflow knows."""
    s.execute(update(OutboxRow).where(OutboxRow.id == outbox_id).values(done=True))


def trim_outbox(s: Session, *, before_s: float) -> int:
    """Forget what the registry was told before; of each alias the last stays. Return how many."""
    newest = select(func.max(OutboxRow.id)).where(OutboxRow.done).group_by(OutboxRow.adapter, OutboxRow.alias)
    old = delete(OutboxRow).where(OutboxRow.done, OutboxRow.created_s < before_s, OutboxRow.id.not_in(newest))
    return len(s.execute(old.returning(OutboxRow.id)).all())


def last_projected(s: Session, adapter: AdapterName, alias: str) -> int | None:
    """Return the version that MLflow was last told an alias names; None if none, or removed.

    An alias that names another one now was moved by a person.
    """
    query = select(OutboxRow.number).where(OutboxRow.done, OutboxRow.adapter == adapter, OutboxRow.alias == alias)
    return s.execute(query.order_by(OutboxRow.id.desc()).limit(1)).scalar()


def audit(s: Session, limit: int) -> list[AuditRecord]:
    """Return the latest changes, newest first."""
    rows = s.scalars(select(AuditRow).order_by(AuditRow.id.desc()).limit(limit))
    return [
        AuditRecord(id=row.id, at_s=row.at_s, actor=row.actor, action=row.action, detail=row.detail) for row in rows
    ]


def _row(s: Session, name: AdapterName, *, lock: bool = False) -> AdapterRow:
    query = select(AdapterRow).where(AdapterRow.name == name)
    row = s.scalars(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownAdapter(f"no adapter {name!r} is registered")
    return row


def _version_row(s: Session, uid: VersionUid, *, lock: bool = False) -> VersionRow:
    query = select(VersionRow).where(VersionRow.uid == uid)
    row = s.scalars(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownVersion(f"no version {uid} is registered")
    return row


def _fence(row: AdapterRow, expected_epoch: Epoch) -> None:
    """Refuse a change that was decided on an older state; ``row`` is locked."""
    if row.epoch != expected_epoch:
        raise VersionConflict(f"adapter {row.name!r} is at epoch {row.epoch}, not {expected_epoch}")


def _force(row: AdapterRow, uid: VersionUid, *, previous: VersionUid | None) -> None:
    row.desired_uid, row.previous_uid, row.epoch = uid, previous, Epoch(row.epoch + 1)


def _project(
    s: Session,
    adapter: AdapterName,
    alias: str,
    number: int | None,
    *,
    at_s: float,
    tags: Mapping[str, str] | None = None,
    tagged: int | None = None,
) -> None:
    """Ask for an alias in MLflow, in the transaction that makes it true. Flushed at once: ids give the order."""
    s.add(
        OutboxRow(
            adapter=adapter,
            alias=alias,
            number=number,
            tagged=tagged,
            tags=dict(tags or {}),
            created_s=at_s,
            done=False,
        )
    )
    s.flush()


def _audit(s: Session, actor: str, action: str, at_s: float, detail: dict[str, Any]) -> None:
    s.add(AuditRow(at_s=at_s, actor=actor, action=action, detail=detail))


def _adapter(row: AdapterRow) -> AdapterRecord:
    return AdapterRecord(
        name=row.name,
        backbone=row.backbone,
        spec=LoraSpec(rank=row.rank, alpha=row.alpha, targets=tuple(row.targets)),
        initial_uid=row.initial_uid,
        desired_uid=row.desired_uid,
        previous_uid=row.previous_uid,
        epoch=row.epoch,
        training=row.training,
        publishing=row.publishing,
    )


def _version(row: VersionRow) -> VersionRecord:
    return VersionRecord(
        uid=row.uid,
        adapter=row.adapter,
        number=row.number,
        parent_uid=row.parent_uid,
        round_id=row.round_id,
        state=row.state,
        store_key=row.store_key,
        mlflow_model_id=row.mlflow_model_id,
        created_s=row.created_s,
    )
