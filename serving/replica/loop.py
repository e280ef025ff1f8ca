"""The replica's main loop: one thread owns the engine, the scheduler, the versions and the shadow.

Other threads reach it through ``inbox`` only, and hear of requests through ``deliver``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future

import structlog

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import AdapterName, Epoch, Split, VersionUid
from infra.clock import Clock
from infra.errors import (
    CollmError,
    EngineDead,
    Overloaded,
    StepFailed,
    Stopping,
)
from infra.metrics import ReplicaMetrics
from infra.settings import Settings
from serving.model import BASE, Event, Failed, Finished, Priority, Request, RequestId, Slo, Started, StepPlan
from serving.ports import Engine
from serving.replica.background import Background, Directives
from serving.replica.copying import Done, at_once, checked_at_once
from serving.replica.gauges import show_versions
from serving.replica.history import History, Stepped
from serving.replica.inbox import Inbox, promise
from serving.replica.loader import Loader
from serving.replica.residency import Residency
from serving.replica.scheduler import Scheduler
from serving.replica.stats import Stats
from serving.replica.text import Tokenizer
from serving.rows import Row
from serving.wire.control import Swap, VersionBody

log = structlog.get_logger()

NAP_S = 0.5
"""Longest wait for a call when there is nothing to do."""
SHORT_NAP_S = 0.01
"""The same when background work waits for its share of the time."""
CONTROL_STALE_S = 5.0
"""Without word from the database for this long, no local version is published."""
GRACE_S = 8.0
"""After a stop, running answers get this long to end."""
GAUGE_EVERY_S = 0.5
MAX_BROKEN_STEPS = 3
"""Steps that fail in a row, for reasons unknown, before the engine counts as dead."""

Deliver = Callable[[Sequence[tuple[RequestId, Event]]], None]


class Replica:
    """See the module. All methods but ``run`` and ``stop`` are for the engine's thread, by ``inbox``."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        loader: Loader,
        settings: Settings,
        clock: Clock,
        *,
        splits: Mapping[Split, Sequence[Row]],
        deliver: Deliver,
        inbox: Inbox | None = None,
        metrics: ReplicaMetrics | None = None,
        history: History | None = None,
        copier: Executor | None = None,
        governed: bool = False,
    ) -> None:
        """``copier`` copies versions into their places beside the engine's thread; without one they are copied in it.

        ``governed``: a database directs this replica, so that its silence means something.
        """
        self.settings = settings
        self.engine = engine
        self.clock = clock
        self.inbox = inbox or Inbox()
        self._copier = copier
        self.metrics = metrics or ReplicaMetrics()
        self.history = history or History()
        self.residency = Residency(
            at_once(engine.write) if copier is None else self._copy_beside,
            Places(engine.shape.places, per_adapter=settings.replica.versions_per_adapter),
            clock,
            history=self.history,
            check=checked_at_once(engine.check) if copier is None else self._check_beside,
            max_adapters=settings.replica.adapters,
            max_versions=engine.shape.versions,
            on_swap=self._swapped,
            on_arrival=self._arrived,
        )
        self.scheduler = Scheduler(
            engine.shape,
            self.residency,
            tokenizer,
            token_budget=settings.replica.token_budget,
            max_queue=settings.replica.max_queue,
            least_prefix=settings.replica.prefix_min_tokens if settings.replica.prefix_cache else None,
        )
        self.stats = Stats(window_s=5 * settings.controller.slot_s)
        self.background = Background(
            settings.replica.id,
            engine.trainer(),
            self.residency,
            loader,
            self.inbox,
            clock,
            self.metrics,
            splits=splits,
            checkpoint_s=settings.replica.checkpoint_s,
        )
        self.ready = not governed
        """Whether it has the versions that the database wants."""
        self.turned_s = clock.monotonic()
        """When the latest turn began; read from any thread, to tell a thread that hangs."""
        self._deliver = deliver
        self._slos: dict[RequestId, Slo] = {}
        self._governed = governed
        self._heard_s = -math.inf
        self._stop_by_s: float | None = None
        self._broken_steps = 0
        self._gauged_s = -math.inf

    # The loop.

    def run(self) -> None:
        """Turn until stopped: admit, plan, step, train, publish. Raises ``EngineDead``."""
        try:
            while not self._stopped():
                self.turn(self._patience_s())
        except EngineDead as error:
            self.scheduler.fail_all(error)
            raise
        finally:
            self._close()

    def turn(self, wait_s: float = 0.0) -> None:
        """Go once around the loop, waiting up to ``wait_s`` for calls if none has come."""
        self.turned_s = self.clock.monotonic()
        self._admit(wait_s)
        self._step()
        self._train()
        self.residency.settle()
        self._tell()
        self._gauge()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """From any thread: refuse new requests, let running ones end within ``grace_s``, then return from ``run``."""

        def begin() -> None:
            if self._stop_by_s is None:
                self._stop_by_s = self.clock.monotonic() + grace_s
                self.ready = False
                self.scheduler.fail_waiting(Stopping())

        self.inbox.post(begin)

    @property
    def stopping(self) -> bool:
        """Whether a stop has been asked for."""
        return self._stop_by_s is not None

    def _stopped(self) -> bool:
        if self._stop_by_s is None:
            return False
        if self.scheduler.running and self.clock.monotonic() < self._stop_by_s:
            return False
        self.scheduler.fail_all(Stopping())
        return True

    def _patience_s(self) -> float:
        """How long to wait for calls: not at all while there is work."""
        if self.scheduler.running:
            return 0.0
        if self.scheduler.queued:
            # Nothing runs and some wait: their versions are being copied, and that needs the processor too.
            return SHORT_NAP_S if self.residency.awaited() else 0.0
        if self.background.next_work() is not None:
            return 0.0 if self.background.granted(self.clock.monotonic()) else SHORT_NAP_S
        return NAP_S

    def _admit(self, wait_s: float) -> None:
        for call in self.inbox.drain(wait_s):
            call()

    def _step(self) -> None:
        plan = self.scheduler.plan(self.clock.monotonic())
        if plan.tokens == 0:
            return
        self._record(plan)
        method = "prefill" if plan.prefills else "decode"
        self.metrics.batch_inference_count.labels(method).inc()
        try:
            result = self.engine.step(plan)
        except EngineDead:
            self.metrics.batch_inference_failure.labels(method).inc()
            raise
        except Exception as error:
            self.metrics.batch_inference_failure.labels(method).inc()
            self._broke(plan, error)
            return
        self._broken_steps = 0
        now_s = self.clock.monotonic()
        self.scheduler.apply(plan, result, now_s)
        self.stats.stepped(sum(row.token is not None for row in result.rows), now_s)
        self.metrics.batch_inference_success.labels(method).inc()
        self.metrics.batch_inference_duration.labels(method).observe(result.seconds)
        self._tell()

    def _broke(self, plan: StepPlan, error: Exception) -> None:
        log.error("step_failed", tokens=plan.tokens, error=repr(error), exc_info=not isinstance(error, StepFailed))
        if not isinstance(error, StepFailed):
            self._broken_steps += 1
            if self._broken_steps >= MAX_BROKEN_STEPS:
                raise EngineDead(f"{self._broken_steps} steps in a row failed: {error!r}") from error
            error = StepFailed()
        self.scheduler.fail(plan, error)

    def _train(self) -> None:
        """Slices of background work while nobody would be late; calls are looked at between them."""
        begin_s = self.clock.monotonic()
        self.background.controlled = not self._governed or begin_s - self._heard_s <= CONTROL_STALE_S
        slack_s = self.scheduler.slack_s(begin_s)
        while (work := self.background.next_work()) is not None:
            now_s = self.clock.monotonic()
            if work.next_slice_s() > slack_s - (now_s - begin_s):
                self.background.preempted()
                return
            if not self.background.granted(now_s):
                return
            trains = not self.background.scoring
            seconds = self.background.slice(work, decoding=self.scheduler.decoding > 0)
            if trains:
                self.stats.sliced(seconds, self.clock.monotonic())
            if math.isinf(slack_s) or self._called() or self._stop_by_s is not None:
                return  # whoever called may be in a hurry

    def _called(self) -> bool:
        calls = self.inbox.drain(0)
        for call in calls:
            call()
        return bool(calls)

    def _tell(self) -> None:
        events = self.scheduler.take_events()
        if not events:
            return
        now_s = self.clock.monotonic()
        for request_id, event in events:
            if isinstance(event, Started):
                adapter = "" if event.version is None else event.version.adapter
                self.metrics.prefix_looked_up_tokens.labels(adapter).inc(event.prompt_tokens)
                self.metrics.prefix_hit_tokens.labels(adapter).inc(event.reused_tokens)
            elif isinstance(event, Finished | Failed):
                slo = self._slos.pop(request_id)
                if isinstance(event, Finished):
                    self.stats.finished(event, slo, now_s)
                elif not isinstance(event.error, Stopping):
                    self.stats.failed(now_s)
        self._deliver(events)

    # Requests.

    def submit(self, request: Request) -> None:
        """Queue a request; what becomes of it is delivered."""
        try:
            if self._stop_by_s is not None:
                raise Stopping
            if request.adapter is not None:
                self.residency.pair(request.adapter)
            self.scheduler.submit(request)
        except CollmError as error:
            if isinstance(error, Overloaded):
                self.stats.failed(self.clock.monotonic())
            self._deliver([(request.id, Failed(error=error))])
            return
        self._slos[request.id] = request.slo

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request; nothing more is delivered."""
        if self.scheduler.cancel(request_id):
            self._slos.pop(request_id, None)
            self.metrics.cancelled.inc()

    # Versions and rounds, for the control API and the directives.

    def direct(self, directives: Directives, *, ready: bool = True) -> None:
        """Take in the latest word from the database."""
        self.background.directives = directives
        self._heard_s = self.clock.monotonic()
        if ready and self._stop_by_s is None:
            self.ready = True

    def stage(self, version: Version, weights: LoraWeights) -> "Future[VersionBody]":
        """Take a validated version in; the future is done when it lies ready."""
        done: Future[VersionBody] = promise()
        self.residency.stage(version, weights, done)
        return done

    def activate(self, adapter: AdapterName, uid: VersionUid, epoch: Epoch) -> "Future[VersionBody]":
        """Make a staged version active; the future is done when it serves."""
        done: Future[VersionBody] = promise()
        self.residency.activate(adapter, uid, epoch, done)
        return done

    def roll_back(self, adapter: AdapterName) -> "Future[VersionBody]":
        """Return to the previous active version."""
        done: Future[VersionBody] = promise()
        self.residency.roll_back(adapter, done)
        return done

    def _copy_beside(self, place: int, weights: LoraWeights, done: Done) -> None:
        """See ``copying.Copy``. No row uses the place before its version is published."""
        assert self._copier is not None
        copied = self._copier.submit(self.engine.write, place, weights)
        copied.add_done_callback(lambda end: self.inbox.post(lambda: done(failure(end))))

    def _check_beside(self, weights: LoraWeights, done: Done) -> None:
        """See ``copying.Check``."""
        assert self._copier is not None
        checked = self._copier.submit(self.engine.check, weights)
        checked.add_done_callback(lambda end: self.inbox.post(lambda: done(failure(end))))

    def _arrived(self, version: Version, waited_s: float) -> None:
        self.metrics.place_waits.labels(version.adapter).inc()
        self.metrics.place_wait_seconds.observe(waited_s)

    def _swapped(self, swap: Swap) -> None:
        self.metrics.swaps.labels(swap.adapter, swap.kind).inc()
        self.metrics.swap_pause_seconds.labels(swap.adapter).observe(swap.pause_ms / 1000)
        log.info("version_published", adapter=swap.adapter, version=swap.label, kind=swap.kind, pause_ms=swap.pause_ms)

    def _gauge(self) -> None:
        """Gauges change too often to be set each time."""
        now_s = self.clock.monotonic()
        if now_s - self._gauged_s < GAUGE_EVERY_S:
            return
        self._gauged_s = now_s
        m, scheduler = self.metrics, self.scheduler
        m.queue_size.set(scheduler.queued)
        m.batch_current_size.set(scheduler.running)
        m.kv_used_ratio.set(scheduler.kv_used)
        m.prefix_kept_tokens.set(scheduler.kept_tokens)
        for priority in Priority:
            m.queue_by_class.labels(priority.value).set(scheduler.waiting(priority))
            m.queue_age_seconds.labels(priority.value).set(scheduler.queue_age_s(now_s, priority))
        show_versions(m, self.residency, scheduler.kv_tokens())
        shadow, share = self.background.shadow, self.stats.window(now_s).train_share
        m.train_share.show({} if shadow is None else {(shadow.base.adapter,): share})
        m.train_share_ceiling.set(self.background.directives.train_share)

    def _record(self, plan: StepPlan) -> None:
        placed = [(p.row, p.place) for p in plan.prefills] + [(d.row, d.place) for d in plan.decodes]
        worn = tuple((self.scheduler.owner(row), place) for row, place in placed if place != BASE)
        self.history.add(Stepped(worn))

    def _close(self) -> None:
        """Nobody may be left waiting."""
        error = EngineDead("the engine has stopped")
        for call in self.inbox.close():
            call()
        self.scheduler.fail_all(Stopping())
        self._tell()
        self.residency.close(error)
        self.background.close(error)


def failure(end: "Future[None]") -> Exception | None:
    """Return what a call in another thread failed with."""
    if end.cancelled():
        return EngineDead("the replica is stopping")
    error = end.exception()
    return error if error is None or isinstance(error, Exception) else EngineDead(repr(error))
