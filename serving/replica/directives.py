"""The replica's word to the database and the database's to the replica, once per time slot, in a thread of its own.

While the database is away nothing here changes anything: the replica serves what it has.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import structlog

from adapters.model import LoraWeights, Version
from adapters.pair import Pair
from db import adapters as adapter_rows
from db import control, replicas
from db.records import (
    ADAPTERS_CHANNEL,
    DECISIONS_CHANNEL,
    AdapterName,
    AdapterRecord,
    FleetDecision,
    ReplicaId,
    ReplicaRecord,
    VersionUid,
)
from db.session import Database, OperationalError
from infra.errors import CollmError, NoRoom
from serving.replica import view
from serving.replica.background import Directives, Mode
from serving.replica.loader import Loader
from serving.replica.loop import Replica
from serving.wire.control import VersionBody

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
"""For the engine's thread to answer; a replica that hangs must look dead."""
LOAD_WAIT_S = 1.0
"""A turn waits this long for versions' weights, or their places, of all adapters together; heartbeats must go on."""
RETRY_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """How an adapter stands on this replica."""

    pair: Pair | None
    waiting: VersionUid | None
    """The version that is about to take over."""
    no_room: NoRoom | None
    """Why the version in force cannot be taken in."""


class Brought(Enum):
    """How far an adapter's version in force has come on this replica."""

    ACTIVE = auto()
    WAITS = auto()
    """For its weights or its place."""
    FAILED = auto()
    """It cannot be loaded; tried again at the next turn."""


class Governor(threading.Thread):
    """Beats, reads, obeys."""

    def __init__(self, replica: Replica, loader: Loader, database: Database, *, url: str, has_shard: bool) -> None:
        super().__init__(name="governor", daemon=True)
        self._replica = replica
        self._loader = loader
        self._database = database
        self._slot_s = replica.settings.controller.slot_s
        self._stopping = threading.Event()
        self._record = ReplicaRecord(
            id=ReplicaId(replica.settings.replica.id),
            url=url,
            backbone=replica.engine.shape.backbone,
            has_shard=has_shard,
            started_s=replica.clock.wall(),
        )
        self._beat_s = float("-inf")
        self._loads: dict[AdapterName, tuple[VersionUid, Future[tuple[LoraWeights, Version]]]] = {}
        self.troubles: dict[AdapterName, str] = {}
        """Why an adapter's version in force is not active here."""

    def run(self) -> None:
        """Listen and act until stopped; an unreachable database is tried again."""
        away = False
        while not self._stopping.is_set():
            try:
                for _ in self._database.listen(
                    DECISIONS_CHANNEL, ADAPTERS_CHANNEL, stop=self._stopping, poll_s=self._slot_s / 2
                ):
                    self._turn()
                    if away:
                        log.info("database_back")
                    away = False
            except OperationalError as error:
                if not away:
                    log.warning("database_away", error=str(error.orig))
                away = True
            except Exception:
                log.exception("directives_failed")
            self._beat_s = float("-inf")  # announce again, wherever the next connection leads
            self._stopping.wait(RETRY_S)

    def stop(self, timeout_s: float) -> None:
        """End the thread and forget the replica in the database."""
        self._stopping.set()
        self.join(timeout_s)
        try:
            with self._database.transaction() as s:
                replicas.retire(s, self._record.id, started_s=self._record.started_s)
        except OperationalError as error:
            log.warning("not_retired", error=str(error.orig))

    def _turn(self) -> None:
        with self._database.transaction() as s:
            if self._beat_s == float("-inf"):
                replicas.announce(s, self._record)
            records = adapter_rows.every(s)
            decision = control.latest_decision(s)
        self._obey([r for r in records if r.backbone == self._record.backbone], decision)
        now_s = self._replica.clock.monotonic()
        if now_s - self._beat_s >= 0.9 * self._slot_s:
            beat = self._call(lambda: view.heartbeat(self._replica))
            if beat is None:
                return
            with self._database.transaction() as s:
                replicas.heartbeat(s, beat)
            self._beat_s = now_s

    def _obey(self, records: list[AdapterRecord], decision: FleetDecision | None) -> None:
        state = self._call(lambda: self._state(records))
        if state is None:
            return
        by_s = self._replica.clock.monotonic() + LOAD_WAIT_S
        brought = [self._bring(record, state[record.name], by_s) for record in records]
        shares = {} if decision is None else decision.train_shares
        modes = {r.name: Mode(training=r.training, publishing=r.publishing) for r in records}
        directives = Directives(modes=modes, train_share=shares.get(self._record.id, 1.0))
        # One version that cannot be loaded must not keep the other adapters from their callers.
        ready = Brought.WAITS not in brought and set(brought) != {Brought.FAILED}
        self._call(lambda: self._replica.direct(directives, ready=ready))

    def _state(self, records: list[AdapterRecord]) -> dict[AdapterName, State]:
        """In the engine's thread, once for all: a turn of it may take long."""
        residency = self._replica.residency

        def no_room(record: AdapterRecord) -> NoRoom | None:
            try:
                residency.make_room(record.name, record.desired_uid)
            except NoRoom as error:
                return error
            return None

        return {r.name: State(residency.pairs.get(r.name), residency.waiting_for(r.name), no_room(r)) for r in records}

    def _bring(self, record: AdapterRecord, state: State, by_s: float) -> Brought:
        """Make the version in force active, or go on with it until ``by_s``."""
        self._loader.know(record.name, record.spec)
        pair = state.pair
        if pair is not None and (pair.base.uid, pair.epoch) == (record.desired_uid, record.epoch):
            self.troubles.pop(record.name, None)
            self._loads.pop(record.name, None)
            return Brought.ACTIVE
        if state.waiting == record.desired_uid:
            return Brought.WAITS
        try:
            if state.no_room is not None:
                self._loads.pop(record.name, None)  # else its weights would take the room that there is not
                raise state.no_room
            return Brought.ACTIVE if self._advance(record, by_s) else Brought.WAITS
        except (CollmError, OSError, MemoryError, RuntimeError) as error:  # the last: how torch lacks memory
            if self.troubles.get(record.name) != repr(error):
                log.warning("version_not_loaded", adapter=record.name, uid=record.desired_uid, error=repr(error))
                self.troubles[record.name] = repr(error)
            return Brought.FAILED

    def _advance(self, record: AdapterRecord, by_s: float) -> bool:
        """Load, stage, activate; return whether it serves. Goes on at the next turn where it has to wait."""
        uid, load = self._loads.get(record.name, (None, None))
        if load is None or uid != record.desired_uid:
            load = self._load(record)
        try:
            weights, version = load.result(self._left_s(by_s))
        except FutureTimeout:
            return False
        except BaseException:
            del self._loads[record.name]
            raise
        replica = self._replica

        def take() -> Future[VersionBody]:
            staged = replica.stage(version, weights)
            if staged.done():
                staged.result()  # the engine has refused it
            return replica.activate(record.name, version.uid, record.epoch)

        try:
            swap = replica.inbox.call(take).result(CALL_TIMEOUT_S)
            swap.result(self._left_s(by_s))
        except FutureTimeout:
            return False
        del self._loads[record.name]
        return True

    def _left_s(self, by_s: float) -> float:
        return max(0.0, by_s - self._replica.clock.monotonic())

    def _load(self, record: AdapterRecord) -> "Future[tuple[LoraWeights, Version]]":
        with self._database.transaction() as s:
            chosen = adapter_rows.version(s, record.desired_uid)
        version = Version(adapter=record.name, uid=chosen.uid, number=chosen.number)
        load = self._loader.submit(lambda: (self._loader.version(record.name, chosen.uid, chosen.store_key), version))
        self._loads[record.name] = (chosen.uid, load)
        return load

    def _call(self, function: Callable[[], T]) -> T | None:
        future: Future[T] = self._replica.inbox.call(function)
        try:
            return future.result(CALL_TIMEOUT_S)
        except FutureTimeout:
            log.warning("engine_thread_hangs")
            return None
