"""The thread that keeps the gateway in touch with Postgres: fleet in, arrivals out. Nothing waits for it."""

import threading

import structlog

from db import control, replicas
from db.records import DECISIONS_CHANNEL
from db.session import Database, OperationalError
from serving.gateway.arrivals import ArrivalCounts
from serving.gateway.fleet import Fleet, snapshot

log = structlog.get_logger()

RETRY_S = 0.5


class Watch:
    """Re-reads the fleet on every decision, and every ``poll_s`` if there is none; fails static."""

    def __init__(self, database: Database, fleet: Fleet, arrivals: ArrivalCounts, *, poll_s: float) -> None:
        self._database = database
        self._fleet = fleet
        self._arrivals = arrivals
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is counted and end."""
        self._stop.set()
        self._thread.join(self._poll_s + RETRY_S + 5)

    def _run(self) -> None:
        reachable = True
        while not self._stop.is_set():
            try:
                for _ in self._database.listen(DECISIONS_CHANNEL, stop=self._stop, poll_s=self._poll_s):
                    self._exchange()
                    if not reachable:
                        log.info("database_reachable")
                    reachable = True
                self._exchange()
            except OperationalError as e:
                if reachable:
                    log.warning("database_unreachable", reason=str(e.orig))
                reachable = False
                self._stop.wait(RETRY_S)
            except Exception:
                # Whatever it is (tables not migrated yet, say), relaying goes on without it.
                log.exception("watch_failed")
                self._stop.wait(RETRY_S)

    def _exchange(self) -> None:
        with self._database.transaction() as s:
            records, decision = replicas.every(s), control.latest_decision(s)
        self._fleet.swap(snapshot(records, decision))
        taken = self._arrivals.take()
        try:
            with self._database.transaction() as s:
                control.add_arrivals(s, taken)
        except OperationalError:
            self._arrivals.put_back(taken)
            raise
