"""What the replica's loop needs of an engine and a trainer, and the flows of a replica. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from adapters.model import Array, LoraWeights
from db.records import Factor
from serving.model import EngineShape, StepPlan, StepResult
from serving.rows import Row

if TYPE_CHECKING:  # engines run where there is no pydantic, see tests/gpu
    from serving.wire.control import (
        ActivateBody,
        RollbackBody,
        RoundBody,
        RoundStatus,
        ScoreBody,
        ScoreReply,
        StageBody,
        Status,
        VersionBody,
    )


class Engine(Protocol):
    """Carries out plans on one backbone. Used by one thread only.

    Implementations: ``replica.engine`` (torch) and ``replica.fake_engine``; one contract suite runs on both.
    """

    @property
    def shape(self) -> EngineShape:
        """Constant sizes."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Carry out one iteration. Raises ``StepFailed`` (the plan's rows are lost) or ``EngineDead``."""
        ...

    def write(self, place: int, weights: LoraWeights) -> None:
        """Copy a version's factors into a place that no row of any later plan uses until it is published.

        May be called in another thread while this one steps.

        Raises ``IncompatibleAdapter``, the place unchanged, for shapes that do not fit; an engine that computes also
        for values that are not finite.
        """
        ...

    def check(self, weights: LoraWeights) -> None:
        """Raise what ``write`` would, and copy nothing. May be called in another thread, as ``write``."""
        ...

    def trainer(self) -> Trainer:
        """The trainer that shares this backbone and thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """A client's part of a round."""

    factor: Factor
    tokens: int
    """Stop after at least this many supervised tokens (at the end of an optimizer step)."""
    rows_per_step: int
    """Rows whose gradients an optimizer step adds up, in as many micro-batches as they need."""
    lr: float
    """Of A; B's is ``lr_ratio`` times that."""
    lr_ratio: float = 1.0
    """LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B wants a larger rate than A, theirs 16 times."""
    warmup_steps: int = 4
    """Steps over which the rates grow linearly to their full size."""
    max_grad_norm: float = 1.0
    """Gradients of a step are scaled down to this norm, over both factors."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where training stands after an optimizer step. Which rows come next follows from ``steps`` and the task."""

    steps: int
    tokens: int
    arrays: Mapping[str, Array]
    """Factors and moments, in the trainer's own form; they never change."""


class WorkState(StrEnum):
    """Where a piece of background work stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReport:
    """What one slice did."""

    seconds: float
    state: WorkState
    step_ended: bool = False
    """An optimizer step has just been applied to the shadow."""
    tokens: int = 0
    """Supervised tokens of the step that ended (0 otherwise)."""
    loss: float | None = None
    """Mean nats per supervised token of the step that ended."""
    reason: str = ""
    """Why it failed: for example a non-finite loss; the shadow is then worthless."""


class Work(Protocol):
    """Background work in the engine's thread, cut into slices; between two slices the model serves as if
    there were none. ``close`` may be called at any time and frees everything."""

    def next_slice_s(self) -> float:
        """Predicted seconds of the next slice, from measured ones of its kind."""
        ...

    def slice(self) -> SliceReport:
        """Run one."""
        ...

    def close(self) -> None:
        """Give up and free; idempotent."""
        ...


class TrainWork(Work, Protocol):
    """Fine-tuning of one shadow."""

    steps: int
    """Optimizer steps so far."""
    tokens: int
    """Supervised tokens so far."""

    def shadow(self) -> LoraWeights:
        """The shadow's factors (both, trained or not) as of the last step; what is returned never changes.

        From the first slice on, also of work that goes on from another process's state.
        """
        ...

    def state(self) -> TrainState:
        """What ``Trainer.train`` goes on from; right after a step only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Cross-entropy by row, in the order given."""

    nll_by_row: tuple[float, ...]
    tokens_by_row: tuple[int, ...]


class ScoreWork(Work, Protocol):
    """Teacher-forced scoring of rows under one version."""

    def result(self) -> ScoreResult:
        """When done."""
        ...


class Trainer(Protocol):
    """Makes background work on the engine's backbone."""

    def train(
        self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
    ) -> TrainWork:
        """Start a shadow from ``base``; deterministic given the task and the rows' order.

        With the ``state`` of another process's work on the same task, base and rows it goes on from there, and ends
        with the same bits. Raises ``ValueError`` for a state that does not fit.
        """
        ...

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> ScoreWork:
        """Score under ``weights``, or under the backbone alone."""
        ...


class ReplicaClient(Protocol):
    """The control API of one replica, for flows; see ``wire.control``. Implementations: ``serving.client`` (HTTP).

    Raises ``NoReplica`` if it cannot be reached, else the typed error that the replica answered.
    """

    async def status(self) -> Status:
        """Where it stands."""
        ...

    async def stage(self, body: StageBody) -> VersionBody:
        """Load and validate a version; it serves nothing yet."""
        ...

    async def activate(self, body: ActivateBody) -> VersionBody:
        """Flip."""
        ...

    async def roll_back(self, body: RollbackBody) -> VersionBody:
        """Return to the previous version."""
        ...

    async def start_round(self, body: RoundBody) -> RoundStatus:
        """Idempotent by round id."""
        ...

    async def round(self, round_id: str) -> RoundStatus:
        """Progress."""
        ...

    async def stop_round(self, round_id: str) -> RoundStatus:
        """Drop the shadow."""
        ...

    async def score(self, body: ScoreBody, *, timeout_s: float) -> ScoreReply:
        """Score; takes seconds to minutes."""
        ...
