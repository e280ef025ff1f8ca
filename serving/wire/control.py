"""The replica's control API, for flows and the demo: bodies of its routes. Pure.

Every route is under ``/control`` and needs ``Authorization: Bearer <cluster token>``; errors are rendered as on
TGI's routes (``{error, error_type}``).

    GET    /control/status                     → Status
    POST   /control/stage      StageBody       → VersionBody      load and validate; serves nothing yet
    POST   /control/activate   ActivateBody    → VersionBody      flip; 409 if the epoch has moved on
    POST   /control/rollback   RollbackBody    → VersionBody      back to the previous active version
    POST   /control/rounds     RoundBody       → RoundStatus      idempotent by round_id
    GET    /control/rounds/ID                  → RoundStatus
    DELETE /control/rounds/ID                  → RoundStatus      stop; the shadow is dropped
    POST   /control/score      ScoreBody       → ScoreReply       answers when done; a disconnect cancels
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of all bodies: unknown fields are refused."""

    # A score that is not finite must arrive as what it is: as null it would make the whole answer unreadable.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class StageBody(Body):
    """Load a version from the update store."""

    adapter: str
    uid: str
    number: int
    store_key: str
    """Its weights lie there; hash, manifest and uid are checked before use."""


class ActivateBody(Body):
    """Make a staged version the active one and the base of the shadow."""

    adapter: str
    uid: str
    epoch: int


class RollbackBody(Body):
    """Return to the previous active version; local publishing stays off until the next round."""

    adapter: str


class VersionBody(Body):
    """A version on this replica."""

    adapter: str
    uid: str
    number: int
    label: str
    state: Literal["staged", "active", "previous"]


class RoundBody(Body):
    """Train the shadow for a round."""

    round_id: str
    adapter: str
    base_uid: str
    epoch: int
    factor: Literal["A", "B", "both"]
    tokens: int = Field(gt=0)
    rows_per_step: int = Field(gt=0)
    lr: float = Field(gt=0)
    lr_ratio: float = Field(1.0, gt=0)
    """B's learning rate over A's."""
    warmup_steps: int = Field(4, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    swap_every: int = Field(ge=0)
    seed: int
    deadline_s: float = Field(gt=0)


class RoundStatus(Body):
    """Where the client's part of a round stands."""

    round_id: str
    state: Literal["running", "done", "failed", "stopped"]
    tokens: int
    steps: int
    loss_first: float | None
    loss_last: float | None
    seconds: float
    store_key: str | None
    """Of the update, when done."""
    sha256: str | None
    base_uid: str
    """What the shadow descends from: an update that descends from another version is refused."""
    reason: str = ""


class RowBody(Body):
    """A row given by the caller."""

    prompt: str
    completion: str


class ScoreBody(Body):
    """Score one version on a split of the replica's own shard, or on the rows given."""

    adapter: str
    uid: str | None
    """None: the backbone alone."""
    store_key: str | None = None
    """Where the weights lie; None if the version is resident."""
    split: Literal["gate", "report"] | None = None
    rows: tuple[RowBody, ...] = ()


class ScoreReply(Body):
    """By row, in order."""

    set_sha256: str
    nll_by_row: tuple[float, ...]
    tokens_by_row: tuple[int, ...]


class Swap(Body):
    """One change of an adapter's active version on this replica."""

    at_s: float
    """Wall clock."""
    adapter: str
    uid: str
    label: str
    kind: Literal["local", "federated", "rollback"]
    pause_ms: float
    """Engine-thread time that the swap took from serving, copies included."""
    delay_ms: float
    """From when the version was ready (its step ended, or its activation was asked for) to when it served."""
    store_key: str | None
    """Where its weights are kept, if they are."""


class Status(Body):
    """A replica, for people and for flows."""

    replica_id: str
    ready: bool
    model_id: str
    backbone: str
    dtype: str
    row_tokens: int
    """Training and scoring rows are cut to this."""
    queued: int
    running: int
    active: tuple[VersionBody, ...]
    """Of each adapter: what its next request gets. All of them are served, also those that are not resident now."""
    resident: tuple[VersionBody, ...]
    """In places of the engine."""
    places: int = 0
    waiting: tuple[str, ...] = ()
    """Adapters whose requests wait until their version is in a place, first come first."""
    pins: dict[str, int]
    """uid → requests that are pinned to it."""
    round: RoundStatus | None
    train_tokens_total: int
    train_tokens_decoding_total: int
    train_share: float
    training: bool
    publishing: Literal["off", "guarded"]
    swaps_total: int
    swaps: tuple[Swap, ...]
    """The latest, at most 256, oldest first."""
    splits: dict[str, int]
    """Rows of the shard by split."""
    set_sha256: dict[str, str]
    """By split: name of the rows."""
