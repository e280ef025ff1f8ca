"""What queries return: frozen, free of SQLAlchemy, shared by every layer above. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

AdapterName = NewType("AdapterName", str)
VersionUid = NewType("VersionUid", str)
"""Content hash of backbone, configuration and factors (federated), or of its lineage (local)."""
ReplicaId = NewType("ReplicaId", str)
ClientId = NewType("ClientId", str)
"""A training party. Each replica with a shard is the client of the same name."""
RoundId = NewType("RoundId", str)
Epoch = NewType("Epoch", int)
"""Counts the changes of an adapter's desired version; fences stale publishes."""

DECISIONS_CHANNEL = "collm_decisions"
"""NOTIFY channel: the controller wrote a new decision (payload: its id)."""
ADAPTERS_CHANNEL = "collm_adapters"
"""NOTIFY channel: an adapter's desired version or mode changed (payload: its name)."""


class Factor(StrEnum):
    """Which LoRA factor a round trains."""

    A = "A"
    B = "B"
    BOTH = "both"


class Publishing(StrEnum):
    """Whether replicas publish local versions between federated ones."""

    OFF = "off"
    GUARDED = "guarded"


class VersionState(StrEnum):
    """Life of a federated version."""

    CANDIDATE = "candidate"
    PROMOTED = "promoted"
    REJECTED = "rejected"


class RoundState(StrEnum):
    """Where a round stands; ``flows.round_state`` holds the legal moves."""

    PLANNED = "planned"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    EVALUATING = "evaluating"
    PROMOTED = "promoted"
    REJECTED = "rejected"
    ABORTED = "aborted"


class Split(StrEnum):
    """Which rows of a client: to train on, to gate with, to report on."""

    TRAIN = "train"
    GATE = "gate"
    REPORT = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The shape of an adapter, fixed for its life."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last parts of the names of the adapted linears, sorted, for example ``q_proj``."""

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """A named adapter and which of its versions is in force."""

    name: AdapterName
    backbone: str
    """sha256 of the frozen weights that every version belongs to."""
    spec: LoraSpec
    initial_uid: VersionUid
    desired_uid: VersionUid
    """The version in force: what every replica makes its base and serves."""
    previous_uid: VersionUid | None
    """What a roll back returns to."""
    epoch: Epoch
    training: bool
    """Off: replicas pause training, however much slack they have, and keep its state."""
    publishing: Publishing


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One federated version."""

    uid: VersionUid
    adapter: AdapterName
    number: int
    """MLflow's version; what people say."""
    parent_uid: VersionUid | None
    round_id: RoundId | None
    state: VersionState
    store_key: str
    """Where its weights lie in the update store."""
    mlflow_model_id: str | None
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """A replica that has announced itself."""

    id: ReplicaId
    url: str
    backbone: str
    has_shard: bool
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a replica says of itself, once per time slot. Rates and percentiles over the last few slots."""

    replica_id: ReplicaId
    at_s: float
    ready: bool
    queued: int
    running: int
    queue_age_s: float
    """Age of the oldest request that waits for its first prefill; 0 if none."""
    ttft_p95_s: float
    tpot_p95_s: float
    finished: int
    """Requests that ended within the window of these figures."""
    violations: int
    """Of those, how many missed their SLO."""
    requests_total: int
    tokens_per_s: float
    """Decoded."""
    train_tokens_total: int
    train_tokens_decoding_total: int
    """Of those, tokens trained while at least one request was decoding."""
    train_share: float
    """Part of the window's time that training took."""
    round_id: RoundId | None
    active: Mapping[str, str]
    """adapter → label of its active version, for example ``12+40``."""
    active_uids: Mapping[str, str]
    resident: tuple[str, ...]
    """Labels ``adapter:12+40`` of every resident version."""
    swaps_total: int
    kv_used: float
    """Share of KV rows in use, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests that a gateway sent to a replica within one time slot."""

    slot_s: float
    gateway_id: str
    replica_id: ReplicaId | None
    """None: refused at the gateway."""
    adapter: AdapterName
    requests: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """What the controller decided for one time slot."""

    id: int
    leader_epoch: int
    at_s: float
    weights: Mapping[ReplicaId, float]
    """Dispatch weights; sum to 1 over the live replicas."""
    train_shares: Mapping[ReplicaId, float]
    """Ceiling on the part of time given to training, 0 to 1."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What a round asks of each client; made by ``flows.plan``, never changed afterwards."""

    factor: Factor
    tokens: int
    """Supervised tokens that each client trains."""
    rows_per_step: int
    """Rows per optimizer step."""
    lr: float
    lr_ratio: float = 1.0
    """B's learning rate over A's."""
    warmup_steps: int = 4
    max_grad_norm: float = 1.0
    swap_every: int
    """Optimizer steps between local publishes; 0 for none."""
    deadline_s: float
    min_clients: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One federated round."""

    id: RoundId
    adapter: AdapterName
    number: int
    """Counts the adapter's rounds from 1."""
    state: RoundState
    base_uid: VersionUid
    base_epoch: Epoch
    plan: RoundPlan
    clients: tuple[ClientId, ...]
    candidate_uid: VersionUid | None
    aggregation_error: float | None
    ce_before: float | None
    ce_after: float | None
    reason: str
    started_s: float
    decided_s: float | None
    """When it was promoted, rejected or aborted."""
    served_s: float | None
    """When every live replica served the promoted version."""
    flow_run_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one client returned for a round; the weights lie in the update store."""

    round_id: RoundId
    client_id: ClientId
    base_uid: VersionUid
    factor: Factor
    sha256: str
    store_key: str
    tokens: int
    steps: int
    loss_first: float
    loss_last: float
    seconds: float
    accepted: bool | None
    """None until checked."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRecord:
    """Cross-entropy of one version on one client's rows of one split."""

    uid: VersionUid
    client_id: ClientId
    split: Split
    set_sha256: str
    """Names the rows, so that figures over different rows are never compared."""
    nll_by_row: tuple[float, ...]
    """Summed negative log-likelihood (nats) of each row's completion."""
    tokens_by_row: tuple[int, ...]
    at_s: float

    @property
    def ce(self) -> float:
        """Nats per completion token over all rows."""
        return sum(self.nll_by_row) / max(1, sum(self.tokens_by_row))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRecord:
    """A change that MLflow has yet to be told; written in the transaction that made it true."""

    id: int
    adapter: AdapterName
    alias: str
    number: int | None
    """Version to point the alias at; None removes it."""
    tagged: int | None = None
    """Version that ``tags`` go to, which the row of a removed alias can't name otherwise."""
    tags: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Who changed what, for people."""

    id: int
    at_s: float
    actor: str
    action: str
    detail: Mapping[str, Any]
