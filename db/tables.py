"""The tables. Seconds are wall clock, double precision; what is a mapping in a record is JSONB here."""

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Double,
    Enum,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.records import (
    AdapterName,
    ClientId,
    Epoch,
    Factor,
    Publishing,
    ReplicaId,
    RoundId,
    RoundState,
    Split,
    VersionState,
    VersionUid,
)

UNFINISHED = (RoundState.PLANNED, RoundState.TRAINING, RoundState.AGGREGATING, RoundState.EVALUATING)
"""States of a round that keep a second one of the same adapter from opening."""


def _enum(kind: type[StrEnum]) -> Enum:
    """Text with a check, not a type of Postgres: a new member is then an ordinary migration."""
    values = [member.value for member in kind]
    name = kind.__name__.lower()
    return Enum(kind, native_enum=False, create_constraint=True, length=16, name=name, values_callable=lambda _: values)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        float: Double,
        int: BigInteger,
        bool: Boolean,
        AdapterName: Text,
        VersionUid: Text,
        ReplicaId: Text,
        ClientId: Text,
        RoundId: Text,
        Epoch: BigInteger,
        Factor: _enum(Factor),
        Publishing: _enum(Publishing),
        VersionState: _enum(VersionState),
        RoundState: _enum(RoundState),
        Split: _enum(Split),
        dict[str, Any]: JSONB,
        list[str]: ARRAY(Text),
        list[float]: ARRAY(Double),
        list[int]: ARRAY(Integer),
    }


class ReplicaRow(Base):
    """See ``ReplicaRecord``."""

    __tablename__ = "replicas"

    id: Mapped[ReplicaId] = mapped_column(primary_key=True)
    url: Mapped[str]
    backbone: Mapped[str]
    has_shard: Mapped[bool]
    started_s: Mapped[float]


class HeartbeatRow(Base):
    """See ``Heartbeat``. Unlogged: rewritten every slot and worthless after a crash; half-full pages keep it HOT."""

    __tablename__ = "heartbeats"
    __table_args__ = ({"prefixes": ["UNLOGGED"], "postgresql_with": {"fillfactor": 50}},)

    replica_id: Mapped[ReplicaId] = mapped_column(primary_key=True)
    at_s: Mapped[float]
    ready: Mapped[bool]
    queued: Mapped[int]
    running: Mapped[int]
    queue_age_s: Mapped[float]
    ttft_p95_s: Mapped[float]
    tpot_p95_s: Mapped[float]
    finished: Mapped[int]
    violations: Mapped[int]
    requests_total: Mapped[int]
    tokens_per_s: Mapped[float]
    train_tokens_total: Mapped[int]
    train_tokens_decoding_total: Mapped[int]
    train_share: Mapped[float]
    round_id: Mapped[RoundId | None]
    active: Mapped[dict[str, Any]]
    active_uids: Mapped[dict[str, Any]]
    resident: Mapped[list[str]]
    swaps_total: Mapped[int]
    kv_used: Mapped[float]


class ArrivalsRow(Base):
    """See ``Arrivals``; ``replica_id`` is empty for None, which a primary key can't hold."""

    __tablename__ = "arrivals"

    slot_s: Mapped[float] = mapped_column(primary_key=True)
    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    replica_id: Mapped[str] = mapped_column(primary_key=True)
    adapter: Mapped[AdapterName] = mapped_column(primary_key=True)
    requests: Mapped[int]
    failures: Mapped[int]


class LeadershipRow(Base):
    """One row: who leads, under which epoch."""

    __tablename__ = "leadership"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    leader_id: Mapped[str]


class DecisionRow(Base):
    """See ``FleetDecision``."""

    __tablename__ = "decisions"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    leader_epoch: Mapped[int]
    at_s: Mapped[float] = mapped_column(index=True)
    weights: Mapped[dict[str, Any]]
    train_shares: Mapped[dict[str, Any]]
    reason: Mapped[str]


def _version_key() -> ForeignKey:
    """Adapters and versions point at each other: checked at commit."""
    return ForeignKey("adapter_versions.uid", deferrable=True, initially="DEFERRED", use_alter=True)


class AdapterRow(Base):
    """See ``AdapterRecord``."""

    __tablename__ = "adapters"

    name: Mapped[AdapterName] = mapped_column(primary_key=True)
    backbone: Mapped[str]
    rank: Mapped[int]
    alpha: Mapped[float]
    targets: Mapped[list[str]]
    initial_uid: Mapped[VersionUid] = mapped_column(_version_key())
    desired_uid: Mapped[VersionUid] = mapped_column(_version_key())
    previous_uid: Mapped[VersionUid | None] = mapped_column(_version_key())
    epoch: Mapped[Epoch]
    training: Mapped[bool]
    publishing: Mapped[Publishing]


class VersionRow(Base):
    """See ``VersionRecord``. A version and the round it came from may be written in either order: no key between."""

    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter", "number"),)

    uid: Mapped[VersionUid] = mapped_column(primary_key=True)
    adapter: Mapped[AdapterName] = mapped_column(ForeignKey("adapters.name"))
    number: Mapped[int]
    parent_uid: Mapped[VersionUid | None] = mapped_column(ForeignKey("adapter_versions.uid"))
    round_id: Mapped[RoundId | None]
    state: Mapped[VersionState]
    store_key: Mapped[str]
    mlflow_model_id: Mapped[str | None]
    created_s: Mapped[float]


class RoundRow(Base):
    """See ``RoundRecord``."""

    __tablename__ = "rounds"

    id: Mapped[RoundId] = mapped_column(primary_key=True)
    adapter: Mapped[AdapterName] = mapped_column(ForeignKey("adapters.name"))
    number: Mapped[int]
    state: Mapped[RoundState]
    base_uid: Mapped[VersionUid] = mapped_column(ForeignKey("adapter_versions.uid"))
    base_epoch: Mapped[Epoch]
    plan: Mapped[dict[str, Any]]
    clients: Mapped[list[str]]
    candidate_uid: Mapped[VersionUid | None]
    aggregation_error: Mapped[float | None]
    ce_before: Mapped[float | None]
    ce_after: Mapped[float | None]
    reason: Mapped[str]
    started_s: Mapped[float]
    decided_s: Mapped[float | None]
    served_s: Mapped[float | None]
    flow_run_id: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("adapter", "number"),
        Index(
            "uq_rounds_unfinished",
            "adapter",
            unique=True,
            postgresql_where=text("state IN ({})".format(", ".join(f"'{state}'" for state in UNFINISHED))),
        ),
    )


class UpdateRow(Base):
    """See ``UpdateRecord``."""

    __tablename__ = "updates"

    round_id: Mapped[RoundId] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    client_id: Mapped[ClientId] = mapped_column(primary_key=True)
    base_uid: Mapped[VersionUid]
    factor: Mapped[Factor]
    sha256: Mapped[str]
    store_key: Mapped[str]
    tokens: Mapped[int]
    steps: Mapped[int]
    loss_first: Mapped[float]
    loss_last: Mapped[float]
    seconds: Mapped[float]
    accepted: Mapped[bool | None]
    reason: Mapped[str]


class QualityRow(Base):
    """See ``QualityRecord``. Local versions have figures too and are no rows elsewhere: no key to versions."""

    __tablename__ = "quality"

    uid: Mapped[VersionUid] = mapped_column(primary_key=True)
    client_id: Mapped[ClientId] = mapped_column(primary_key=True)
    split: Mapped[Split] = mapped_column(primary_key=True)
    set_sha256: Mapped[str] = mapped_column(primary_key=True)
    nll_by_row: Mapped[list[float]]
    tokens_by_row: Mapped[list[int]]
    at_s: Mapped[float]


class OutboxRow(Base):
    """See ``OutboxRecord``."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    adapter: Mapped[AdapterName] = mapped_column(ForeignKey("adapters.name"))
    alias: Mapped[str]
    number: Mapped[int | None]
    tagged: Mapped[int | None]
    tags: Mapped[dict[str, Any]]
    created_s: Mapped[float]
    done: Mapped[bool]

    __table_args__ = (
        Index("ix_outbox_pending", "id", postgresql_where=text("NOT done")),
        Index("ix_outbox_projected", "adapter", "alias", "id", postgresql_where=text("done")),
    )


class AuditRow(Base):
    """See ``AuditRecord``."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at_s: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    detail: Mapped[dict[str, Any]]
