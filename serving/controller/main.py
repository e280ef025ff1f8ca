"""The fast controller: every time slot it observes the fleet, decides, and writes the decision. Leader-elected."""

import argparse
import os
import signal
import socket
import threading

import psycopg
import structlog

from db import control, replicas
from db.records import FleetDecision, Heartbeat, ReplicaId
from db.session import Database, OperationalError
from infra.clock import Clock, SystemClock
from infra.log import configure
from infra.settings import Settings, load_settings
from serving.controller import policy
from serving.controller.leader import BEAT_S, SEEK_S, Leadership
from serving.model import Slo

log = structlog.get_logger()

RETRY_S = 0.5
RETAIN_S = 3600.0
"""Arrivals and decisions are deleted after this."""
FORGET_EVERY_S = 60.0


class Controller:
    """One candidate for leadership, and the loop that it runs while it leads."""

    def __init__(
        self, settings: Settings, database: Database, leadership: Leadership, clock: Clock, *, leader_id: str
    ) -> None:
        self._slot_s = settings.controller.slot_s
        self._dead_after_s = settings.controller.dead_after_s
        self._slo = Slo(ttft_s=settings.slo.ttft_s, tpot_s=settings.slo.tpot_s)
        self._database = database
        self._leadership = leadership
        self._clock = clock
        self._leader_id = leader_id
        self._told: tuple[str, frozenset[ReplicaId]] | None = None
        self._forgotten_s = -FORGET_EVERY_S

    def run(self, stop: threading.Event) -> None:
        """Stand by until it is this one's turn, then lead, until ``stop``."""
        reachable = True
        while not stop.is_set():
            try:
                if self._leadership.seek():
                    self._lead(stop)
                else:
                    stop.wait(SEEK_S)
                if not reachable:
                    log.info("database_reachable")
                reachable = True
            except (OperationalError, psycopg.OperationalError) as e:
                if reachable:
                    log.warning("database_unreachable", reason=str(e))
                reachable = False
                self._leadership.release()
                stop.wait(RETRY_S)
        self._leadership.release()

    def _lead(self, stop: threading.Event) -> None:
        """Decide every slot, and beat in between, until leadership is lost."""
        with self._database.transaction() as s:
            epoch = control.take_leadership(s, self._leader_id)
        log.info("leads", leader_id=self._leader_id, epoch=epoch)
        due = self._clock.monotonic()
        while not stop.is_set() and self._leadership.beat():
            if self._clock.monotonic() >= due:
                if self.slot(epoch) is None:
                    break
                due = max(due + self._slot_s, self._clock.monotonic())
            stop.wait(min(BEAT_S, max(0.0, due - self._clock.monotonic())))
        self._leadership.release()
        log.info("leads_no_more", leader_id=self._leader_id, epoch=epoch)

    def slot(self, epoch: int) -> FleetDecision | None:
        """Observe, decide, apply; None if another leader has taken over."""
        now_s = self._clock.wall()
        with self._database.transaction() as s:
            records = replicas.every(s)
            arrivals = control.arrivals_since(s, now_s - (policy.FORECAST_SLOTS + 1) * self._slot_s)
            previous = control.latest_decision(s)
        ready = [beat for _, beat in records if beat is not None and self._alive(beat, now_s)]
        known: list[ReplicaId] = [record.id for record, _ in records]
        load = policy.observe_load(arrivals, now_s=now_s, slot_s=self._slot_s)
        choice = policy.decide(ready, known, previous, slo=self._slo, load=load)
        with self._database.transaction() as s:
            decision = control.write_decision(
                s,
                leader_epoch=epoch,
                at_s=now_s,
                weights=choice.weights,
                train_shares=choice.train_shares,
                reason=choice.reason,
            )
        if decision is not None:
            self._tell(decision)
            self._forget(now_s)
        return decision

    def _alive(self, beat: Heartbeat, now_s: float) -> bool:
        return beat.ready and beat.at_s > now_s - self._dead_after_s

    def _tell(self, decision: FleetDecision) -> None:
        """One line when the reason or the live replicas change, not one per slot."""
        told = (decision.reason, frozenset(r for r, w in decision.weights.items() if w > 0))
        if told != self._told:
            weights = {r: round(w, 3) for r, w in decision.weights.items()}
            shares = {r: round(x, 3) for r, x in decision.train_shares.items()}
            log.info("decided", reason=decision.reason, weights=weights, train_shares=shares)
        self._told = told

    def _forget(self, now_s: float) -> None:
        if self._clock.monotonic() - self._forgotten_s < FORGET_EVERY_S:
            return
        self._forgotten_s = self._clock.monotonic()
        with self._database.transaction() as s:
            control.forget(s, before_s=now_s - RETAIN_S)


def main(argv: list[str]) -> int:
    """``collm controller``: stand by and lead until told to stop."""
    parser = argparse.ArgumentParser(prog="collm controller", description=__doc__)
    parser.parse_args(argv)
    settings = load_settings()
    configure(settings)
    url, stop = settings.required_database_url(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    database = Database(url, pool_size=1, timeout_s=1.0)
    leader_id = f"{socket.gethostname()}:{os.getpid()}"
    Controller(settings, database, Leadership(url), SystemClock(), leader_id=leader_id).run(stop)
    database.close()
    return 0
