"""Background work in the engine's thread: scoring first, then a local version's probe, then training."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from adapters.model import LoraWeights, Version
from adapters.pair import Pair
from db.records import AdapterName, Epoch, Factor, Publishing, RoundId, Split, VersionUid
from infra.clock import Clock
from infra.errors import EngineDead, InvalidRequest, StepFailed, UnknownVersion, VersionConflict
from infra.metrics import ReplicaMetrics
from serving.ports import ScoreResult, ScoreWork, SliceReport, Trainer, Work, WorkState
from serving.replica.checkpoints import SavedRound
from serving.replica.inbox import Inbox, promise
from serving.replica.loader import Loader
from serving.replica.residency import Residency
from serving.replica.shadow import Candidate, Progress, Shadow
from serving.replica.slack import ShareMeter
from serving.rows import Row, set_sha256
from serving.wire.control import RoundBody, RoundStatus

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What an adapter's record says about training it."""

    training: bool = True
    publishing: Publishing = Publishing.GUARDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Directives:
    """The latest word from the database."""

    modes: Mapping[AdapterName, Mode] = field(default_factory=dict)
    train_share: float = 1.0

    def mode(self, adapter: AdapterName) -> Mode:
        """Return an adapter's mode."""
        return self.modes.get(adapter, Mode())


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Somebody waits for this."""

    work: ScoreWork
    done: "Future[ScoreResult]"


class Background:
    """All work that is no request's."""

    def __init__(
        self,
        replica_id: str,
        trainer: Trainer,
        residency: Residency,
        loader: Loader,
        inbox: Inbox,
        clock: Clock,
        metrics: ReplicaMetrics,
        *,
        splits: Mapping[Split, Sequence[Row]],
        checkpoint_s: float = math.inf,
    ) -> None:
        """``checkpoint_s``: a round's training is saved this often."""
        self.directives = Directives()
        self.controlled = True
        """Whether the database has been heard lately: without it no local version is published."""
        self.shadow: Shadow | None = None
        self.splits = splits
        self.set_names = {split: set_sha256(rows) for split, rows in splits.items() if rows}
        self.train_tokens = 0
        self.train_tokens_decoding = 0
        self.archived: dict[str, str] = {}
        """Local version → key in the update store, as long as the swap to it is listed."""
        self._replica_id = replica_id
        self._trainer = trainer
        self._residency = residency
        self._loader = loader
        self._inbox = inbox
        self._clock = clock
        self._metrics = metrics
        self._checkpoint_s = checkpoint_s
        self._saving: Future[None] | None = None
        self._share = ShareMeter()
        self._scores: deque[Scoring] = deque()
        self._trains = False
        """Whether training has run since it last had to stop for requests."""
        self._step_s = [0.0, 0.0]
        """Seconds of the training step under way: all, and while a request was decoding."""

    # What the loop asks.

    def next_work(self) -> Work | None:
        """Return what the next slice would run; None if there is nothing to do."""
        if self._scores:
            return self._scores[0].work
        shadow = self.shadow
        if shadow is None:
            return None
        if shadow.state == "running" and not self._in_force(shadow):
            self._fail(shadow, "another version has come into force")
        elif shadow.overdue:
            self._fail(shadow, "the round's deadline has passed")
        if shadow.state in ("failed", "stopped"):
            return None
        training = self.directives.mode(shadow.base.adapter).training
        try:
            return shadow.work(training=training, publishing=self._may_publish(shadow))
        except Exception as error:
            # A probe that cannot even begin must harm no request.
            self._fail(shadow, repr(error))
            return None

    @property
    def scoring(self) -> bool:
        """Whether somebody waits for a score: that goes before training."""
        return bool(self._scores)

    def granted(self, now_s: float) -> bool:
        """Return whether the ceiling on training allows a slice now; scoring has none."""
        allowed = self._share.allowed(self.directives.train_share, now_s)
        return bool(self._scores) or allowed

    def slice(self, work: Work, *, decoding: bool) -> float:
        """Run one slice of ``next_work`` and return its seconds."""
        begin_s = self._clock.monotonic()
        if self._scores and work is self._scores[0].work:
            labels = "", "score"
            self._score(self._scores[0])
        else:
            assert self.shadow is not None
            labels = self.shadow.base.adapter, "train"
            self._trains = True
            self._train(self.shadow, work, decoding=decoding)
        seconds = self._clock.monotonic() - begin_s
        self._metrics.slices.labels(*labels).inc()
        self._metrics.slice_seconds.observe(seconds)
        return seconds

    def preempted(self) -> None:
        """Requests need the time: what has run in slices until now stops; told each time that it may not go on."""
        if self.shadow is not None and self._trains:
            self._metrics.train_preemptions.labels(self.shadow.base.adapter).inc()
        self._trains = False

    # Rounds.

    def start_round(self, body: RoundBody, saved: SavedRound | None = None) -> RoundStatus:
        """Begin this client's part of a round, or go on from what was ``saved`` of it.

        A round that is known here already is left as it is.
        """
        before, adapter = self.shadow, AdapterName(body.adapter)
        if before is not None and before.round_id == body.round_id:
            return before.status()
        if not self.splits.get(Split.TRAIN) or not self.splits.get(Split.GATE):
            raise InvalidRequest("this replica has no shard to train on")
        if before is not None and before.state == "running" and before.base.adapter != adapter:
            raise VersionConflict(f"round {before.round_id} of adapter {before.base.adapter} is under way")
        base_uid = VersionUid(body.base_uid)
        pair = self._residency.pair(adapter).start_round(RoundId(body.round_id), base_uid, Epoch(body.epoch))
        shadow = self._shadow(body, pair, self._residency.weights(base_uid), saved)
        if before is not None:
            before.stop(f"round {body.round_id} has started")
        self._residency.start_round(adapter, RoundId(body.round_id), base_uid, Epoch(body.epoch))
        self.shadow, self._step_s = shadow, [0.0, 0.0]
        begun = shadow.status()
        log.info(
            "round_started",
            adapter=adapter,
            round_id=body.round_id,
            factor=body.factor,
            tokens=body.tokens,
            from_step=begun.steps,
        )
        return begun

    def round_status(self, round_id: str) -> RoundStatus:
        """Return where a round stands. Raises ``UnknownVersion``."""
        return self._shadow_of(round_id).status()

    def stop_round(self, round_id: str) -> RoundStatus:
        """Drop the shadow of a round that was aborted or rejected; its base is active again."""
        shadow = self._shadow_of(round_id)
        shadow.stop("stopped")
        if self._in_force(shadow):
            self._residency.end_round(shadow.base.adapter)
        self._loader.submit(self._loader.forget_round)
        log.info("round_stopped", round_id=round_id)
        return shadow.status()

    # Scores.

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> Scoring:
        """Begin to score; ``Scoring.done`` will have the result."""
        scoring = Scoring(self._trainer.score(rows, weights), promise())
        self._scores.append(scoring)
        return scoring

    def drop_score(self, scoring: Scoring) -> None:
        """Nobody waits for it any more."""
        if scoring in self._scores:
            self._scores.remove(scoring)
            scoring.work.close()

    def close(self, error: Exception) -> None:
        """Give up on everything."""
        for scoring in self._scores:
            scoring.work.close()
            scoring.done.set_exception(error)
        self._scores.clear()
        if self.shadow is not None:
            self.shadow.stop("the replica has stopped")

    # How slices end.

    def _score(self, scoring: Scoring) -> None:
        try:
            report = scoring.work.slice()
        except EngineDead:
            raise
        except Exception as error:
            report = SliceReport(seconds=0.0, state=WorkState.FAILED, reason=repr(error))
        if report.state is WorkState.RUNNING:
            return
        self._scores.popleft()
        if report.state is WorkState.DONE:
            scoring.done.set_result(scoring.work.result())
        else:
            scoring.done.set_exception(StepFailed(f"scoring failed: {report.reason}"))
        scoring.work.close()

    def _train(self, shadow: Shadow, work: Work, *, decoding: bool) -> None:
        try:
            progress = shadow.slice(work, publishing=self._may_publish(shadow))
        except EngineDead:
            raise
        except Exception as error:
            self._fail(shadow, repr(error))
            return
        seconds = progress.report.seconds
        self._share.spend(seconds)
        if progress.training:
            self._count(shadow.base, progress, seconds, decoding=decoding)
        if progress.refused:
            self._metrics.swaps_refused.labels(shadow.base.adapter).inc()
            log.info("local_version_refused", adapter=shadow.base.adapter, round_id=shadow.round_id)
        if progress.candidate is not None:
            self._publish(progress.candidate)
        if progress.saved is not None:
            self._keep(progress.saved, whole=progress.result is not None)
        if shadow.state == "failed":
            self._fail(shadow, shadow.status().reason)
        elif progress.result is not None:
            self._hand_in(shadow, progress.result)

    def _keep(self, saved: SavedRound, *, whole: bool) -> None:
        """Save a round, unless a slow disk is still at the one before; the ``whole`` training always."""
        if not whole and self._saving is not None and not self._saving.done():
            return
        self._saving = self._loader.submit(lambda: self._loader.keep_round(saved))
        self._saving.add_done_callback(kept)

    def _count(self, base: Version, progress: Progress, seconds: float, *, decoding: bool) -> None:
        self._step_s[0] += seconds
        self._step_s[1] += seconds if decoding else 0.0
        if not progress.report.step_ended:
            return
        tokens, (whole_s, beside_s) = progress.report.tokens, self._step_s
        beside = round(tokens * beside_s / whole_s) if whole_s > 0 else tokens * decoding
        self._step_s = [0.0, 0.0]
        self.train_tokens += tokens
        self.train_tokens_decoding += beside
        self._metrics.train_tokens.labels(base.adapter).inc(tokens)
        self._metrics.train_tokens_decoding.labels(base.adapter).inc(beside)
        if progress.report.loss is not None:
            self._metrics.train_loss.show({(base.adapter, base.label): progress.report.loss})

    def _publish(self, candidate: Candidate) -> None:
        version = candidate.version
        try:
            self._residency.publish(
                version,
                candidate.weights,
                candidate.lineage,
                ready_s=candidate.ready_s,
                copied_s=candidate.copied_s,
            )
        except VersionConflict as error:
            self._metrics.swaps_refused.labels(version.adapter).inc()
            log.info("local_version_stale", adapter=version.adapter, version=version.label, reason=error.message)
            return
        if self._residency.lacks_place(version.adapter):
            self._metrics.swaps_deferred.labels(version.adapter).inc()
        archive = self._loader.submit(lambda: self._loader.archive(candidate.weights))
        archive.add_done_callback(lambda done: self._archived(version.uid, done))

    def _archived(self, uid: VersionUid, done: "Future[str]") -> None:
        """In the loader's thread."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("archive_failed", uid=uid, error=repr(error))
            return
        key = done.result()
        self._inbox.post(lambda: self._keep_archived(uid, key))

    def _keep_archived(self, uid: VersionUid, key: str) -> None:
        """Note a key, and forget those of versions that nobody is told of any more."""
        residency = self._residency
        told = {swap.uid for swap in residency.swaps} | {residency.waiting_for(adapter) for adapter in residency.pairs}
        self.archived = {u: k for u, k in self.archived.items() if u in told} | {uid: key}

    def _hand_in(self, shadow: Shadow, result: LoraWeights) -> None:
        factor = Factor(shadow.body.factor)
        stored = self._loader.submit(lambda: self._loader.put_update(result, factor))
        stored.add_done_callback(lambda done: self._inbox.post(lambda: self._stored(shadow, done)))

    def _stored(self, shadow: Shadow, done: "Future[str]") -> None:
        error = done.exception() if not done.cancelled() else InterruptedError("the replica is stopping")
        if error is not None:
            self._fail(shadow, f"the update could not be stored: {error!r}")
            return
        shadow.stored(done.result())
        log.info("round_done", round_id=shadow.round_id, **shadow.status().model_dump(include={"tokens", "steps"}))

    def _fail(self, shadow: Shadow, reason: str) -> None:
        """The shadow is worthless: what it has published gives way to the base."""
        shadow.fail(reason)
        if shadow is self.shadow:  # else what is saved is another round's
            self._loader.submit(self._loader.forget_round)
        log.warning("round_failed", round_id=shadow.round_id, reason=reason)
        if self._in_force(shadow):
            self._residency.end_round(shadow.base.adapter)

    def _shadow(self, body: RoundBody, pair: Pair, base: LoraWeights, saved: SavedRound | None) -> Shadow:
        rows = self.splits[Split.TRAIN]
        make = partial(
            Shadow,
            body,
            pair=pair,
            base=base,
            trainer=self._trainer,
            rows=rows,
            gate=self.splits[Split.GATE],
            replica_id=self._replica_id,
            clock=self._clock,
            rows_sha256=self.set_names[Split.TRAIN],
            checkpoint_s=self._checkpoint_s,
        )
        if saved is not None and saved.note.body == body and saved.note.rows_sha256 == self.set_names[Split.TRAIN]:
            try:
                return make(saved=saved)
            except ValueError as error:
                log.warning("checkpoint_unfit", round_id=body.round_id, error=str(error))
        return make()

    # What is in force.

    def _shadow_of(self, round_id: str) -> Shadow:
        if self.shadow is None or self.shadow.round_id != round_id:
            raise UnknownVersion(f"no round {round_id} here")
        return self.shadow

    def _may_publish(self, shadow: Shadow) -> bool:
        guarded = self.directives.mode(shadow.base.adapter).publishing is Publishing.GUARDED
        return self.controlled and guarded and self._in_force(shadow)

    def _in_force(self, shadow: Shadow) -> bool:
        return self._residency.pair(shadow.base.adapter).lineage == shadow.lineage


def kept(done: "Future[None]") -> None:
    """Say so if a round could not be saved; it goes on."""
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.warning("checkpoint_failed", error=repr(error))
