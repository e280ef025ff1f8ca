"""A client's part of one round: training the shadow, probing what it may publish, its result. Engine thread only."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adapters.model import LoraWeights, Version
from adapters.pair import Lineage, Pair
from db.records import Factor, RoundId, VersionUid
from infra.clock import Clock
from serving.ports import ScoreWork, SliceReport, Trainer, TrainTask, TrainWork, Work, WorkState
from serving.replica.checkpoints import RoundNote, SavedRound
from serving.rows import Row
from serving.wire.control import RoundBody, RoundStatus

PROBE_MARGIN = 0.05
"""Nats per token by which a local version may look worse on the probe than the best one before it."""
PROBE_COST = 0.05
"""Ceiling on a probe's part of the training between two swaps."""
FORWARD_PART = 1 / 3
"""Of a training row's cost, what scoring a row costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A copy of the shadow that may become a local version."""

    version: Version
    weights: LoraWeights
    lineage: Lineage
    ready_s: float
    """When the optimizer step that made it ended."""
    copied_s: float
    """Engine-thread time that the copy took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one slice of this round did."""

    report: SliceReport
    training: bool
    """False: it was the probe's."""
    candidate: Candidate | None = None
    """Passed its probe."""
    refused: bool = False
    """A candidate did not pass."""
    result: LoraWeights | None = None
    """The shadow, when its training is done."""
    saved: SavedRound | None = None
    """To be written to disk: it is time, or the training is done."""


class Shadow:
    """The replica's copy in training."""

    def __init__(
        self,
        body: RoundBody,
        *,
        pair: Pair,
        base: LoraWeights,
        trainer: Trainer,
        rows: Sequence[Row],
        gate: Sequence[Row],
        replica_id: str,
        clock: Clock,
        rows_sha256: str = "",
        checkpoint_s: float = math.inf,
        saved: SavedRound | None = None,
    ) -> None:
        """``saved``: go on from there, with the same task, base and rows. Raises ``ValueError`` if it does not fit."""
        self.body = body
        self.base = pair.base
        self.lineage = pair.lineage
        self.state: Literal["running", "done", "failed", "stopped"] = "running"
        self._trainer = trainer
        self._replica_id = replica_id
        self._clock = clock
        self._rows_sha256 = rows_sha256
        self._checkpoint_s = checkpoint_s
        note = None if saved is None else saved.note
        self._started_wall_s = clock.wall() if note is None else min(note.started_s, clock.wall())
        self._started_s = clock.monotonic() - (clock.wall() - self._started_wall_s)
        self._saved_s = clock.monotonic()
        self._ended_s: float | None = None
        task = TrainTask(
            factor=Factor(body.factor),
            tokens=body.tokens,
            rows_per_step=body.rows_per_step,
            lr=body.lr,
            lr_ratio=body.lr_ratio,
            warmup_steps=body.warmup_steps,
            max_grad_norm=body.max_grad_norm,
            seed=body.seed,
        )
        self._train: TrainWork | None = trainer.train(task, base, rows, None if saved is None else saved.state)
        self._base_weights = base
        self._probe_rows = tuple(gate[: self._probe_size(body)])
        self._probe: ScoreWork | None = None
        self._probed: Candidate | None = None
        """None while the probe scores the base."""
        self._best_ce = None if note is None else note.best_ce
        self._queued: Candidate | None = None
        self._candidate_steps = 0 if note is None else note.candidate_steps
        self._untried = note is not None and note.untried
        """What is gone on from is a candidate; its copy can be taken once the trainer has it, after one slice."""
        self._steps, self._tokens = (0, 0) if note is None else (note.steps, note.tokens)
        self._loss_first, self._loss_last = (None, None) if note is None else (note.loss_first, note.loss_last)
        self._store_key: str | None = None
        self._reason = ""

    @property
    def round_id(self) -> RoundId:
        """Whose part this is."""
        return RoundId(self.body.round_id)

    def work(self, *, training: bool, publishing: bool) -> Work | None:
        """Return what the next slice would run; None if there is nothing, or nothing that is allowed."""
        if not publishing:
            self._drop_probe()
        if self._queued is not None and self._probe is None:
            self._begin_probe(self._queued)
        if self._probe is not None:
            return self._probe
        return self._train if training else None

    def slice(self, work: Work, *, publishing: bool) -> Progress:
        """Run one slice of what ``work`` returned."""
        report = work.slice()
        if work is self._probe:
            return self._after_probe(report)
        assert self._train is not None
        saved: SavedRound | None = None
        if report.step_ended:
            self._steps, self._tokens = self._train.steps, self._train.tokens
            if report.loss is None or not math.isfinite(report.loss):
                self.fail("the training loss is not finite")
                return Progress(report=report, training=True)
            self._loss_first = report.loss if self._loss_first is None else self._loss_first
            self._loss_last = report.loss
            if publishing and self._due(report.state):
                self._queued = self._candidate()
            saved = self._save(report.state)
        elif self._untried and publishing and report.state is not WorkState.FAILED:
            self._queued = self._candidate()
        self._untried = False
        if report.state is WorkState.FAILED:
            self.fail(report.reason or "training failed")
        result: LoraWeights | None = None
        if report.state is WorkState.DONE:
            result = self._train.shadow()
            self._train.close()
            self._train = None
        return Progress(report=report, training=True, result=result, saved=saved)

    @property
    def overdue(self) -> bool:
        """Whether the round's time is over and the training is not."""
        return self._train is not None and self._clock.monotonic() > self._started_s + self.body.deadline_s

    def stored(self, key: str) -> None:
        """The update lies in the store."""
        if self.state == "running":
            self._store_key = key
            self._end("done")

    def fail(self, reason: str) -> None:
        """Discard the shadow."""
        if self.state == "running":
            self._reason = reason
            self._end("failed")
        self.close()

    def stop(self, reason: str) -> None:
        """Somebody else wants it gone."""
        if self.state == "running":
            self._reason = reason
            self._end("stopped")
        self.close()

    def close(self) -> None:
        """Free what it holds; idempotent."""
        self._drop_probe()
        if self._train is not None:
            self._train.close()
            self._train = None

    def status(self) -> RoundStatus:
        """As the control API shows it."""
        ended_s = self._clock.monotonic() if self._ended_s is None else self._ended_s
        return RoundStatus(
            round_id=self.body.round_id,
            state=self.state,
            tokens=self._tokens,
            steps=self._steps,
            loss_first=self._loss_first,
            loss_last=self._loss_last,
            seconds=ended_s - self._started_s,
            store_key=self._store_key,
            sha256=None if self._store_key is None else self._store_key.rpartition("/")[2],
            base_uid=self.base.uid,
            reason=self._reason,
        )

    def _end(self, state: Literal["done", "failed", "stopped"]) -> None:
        self.state = state
        self._ended_s = self._clock.monotonic()

    def _due(self, state: WorkState) -> bool:
        every = self.body.swap_every
        if every == 0 or self._steps == self._candidate_steps:
            return False
        return self._steps % every == 0 or state is WorkState.DONE

    def _save(self, state: WorkState) -> SavedRound | None:
        assert self._train is not None
        now_s = self._clock.monotonic()
        due = now_s - self._saved_s >= self._checkpoint_s or state is WorkState.DONE
        if not due or state is WorkState.FAILED or math.isinf(self._checkpoint_s):
            return None
        self._saved_s = now_s
        note = RoundNote(
            body=self.body,
            rows_sha256=self._rows_sha256,
            steps=self._steps,
            tokens=self._tokens,
            candidate_steps=self._candidate_steps,
            loss_first=self._loss_first,
            loss_last=self._loss_last,
            best_ce=self._best_ce,
            started_s=self._started_wall_s,
        )
        return SavedRound(note=note, arrays=self._train.state().arrays)

    def _candidate(self) -> Candidate:
        assert self._train is not None
        begin_s = self._clock.monotonic()
        weights = self._train.shadow()
        self._candidate_steps = self._steps
        version = Version(
            adapter=self.base.adapter,
            uid=local_uid(self._replica_id, self.lineage, self.round_id, self._steps),
            number=self.base.number,
            local_steps=self._steps,
        )
        return Candidate(
            version=version,
            weights=weights,
            lineage=self.lineage,
            ready_s=begin_s,
            copied_s=self._clock.monotonic() - begin_s,
        )

    @staticmethod
    def _probe_size(body: RoundBody) -> int:
        return max(1, int(PROBE_COST * body.swap_every * body.rows_per_step / FORWARD_PART))

    def _begin_probe(self, candidate: Candidate) -> None:
        if self._best_ce is None:
            self._probe, self._probed = self._trainer.score(self._probe_rows, self._base_weights), None
            return
        self._probe, self._probed, self._queued = (
            self._trainer.score(self._probe_rows, candidate.weights),
            candidate,
            None,
        )

    def _after_probe(self, report: SliceReport) -> Progress:
        assert self._probe is not None
        if report.state is WorkState.RUNNING:
            return Progress(report=report, training=False)
        ce = math.inf
        if report.state is WorkState.DONE:
            result = self._probe.result()
            ce = sum(result.nll_by_row) / max(1, sum(result.tokens_by_row))
        probed, self._probed = self._probed, None
        self._probe.close()
        self._probe = None
        if probed is None:
            if not math.isfinite(ce):
                self._queued = None
                return Progress(report=report, training=False, refused=True)
            self._best_ce = ce
            return Progress(report=report, training=False)
        assert self._best_ce is not None
        if not ce <= self._best_ce + PROBE_MARGIN:
            return Progress(report=report, training=False, refused=True)
        self._best_ce = min(self._best_ce, ce)
        return Progress(report=report, training=False, candidate=probed)

    def _drop_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._probe = self._probed = self._queued = None


def local_uid(replica_id: str, lineage: Lineage, round_id: RoundId, steps: int) -> VersionUid:
    """Return what names a local version: its lineage, not its content, which nobody else could make."""
    parts = [replica_id, lineage.base_uid, lineage.epoch, round_id, steps]
    return VersionUid(hashlib.sha256(json.dumps(parts).encode()).hexdigest())
