"""Who leads: a Postgres advisory lock on a connection of its own.

A leader that dies loses its connection and so the lock. One that hangs would keep it for ever, so the leader's
loop uses that connection several times per second, and a standby that finds it unused for longer ends it
(``pg_terminate_backend``). All times are the server's, so clocks need not agree. A leader that wakes up again
finds its connection closed; what it may still write under its old epoch, the epoch fence refuses.
"""

import contextlib
import hashlib

import psycopg
import structlog
from sqlalchemy import make_url

log = structlog.get_logger()

BEAT_S = 0.15
"""The leader uses its connection this often."""
HUNG_S = 0.6
"""A leader that has not done so for this long is taken to hang."""
SEEK_S = 0.1
"""A standby looks this often."""
TERMINATE_MS = 300

_HOLDER = """
SELECT a.pid, extract(epoch FROM clock_timestamp() - greatest(a.state_change, a.query_start))::float8
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = %s
"""


class Leadership:
    """One candidate. Not thread-safe: the thread that leads also beats, or a hung loop would look alive."""

    def __init__(self, url: str, name: str = "controller") -> None:
        self._conninfo = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def seek(self) -> bool:
        """Try once to get the lock, ending a hung holder; return whether it is held now.

        Raises ``psycopg.OperationalError`` when the server cannot be reached.
        """
        connection = self._connect()
        if self._try(connection):
            return True
        holder = connection.execute(_HOLDER, (self._key,)).fetchone()
        if holder is None:  # it has just gone
            return self._try(connection)
        pid, idle_s = int(str(holder[0])), float(str(holder[1]))
        if idle_s < HUNG_S:
            return False
        log.warning("hung_leader_ended", idle_s=round(idle_s, 2))
        connection.execute("SELECT pg_terminate_backend(%s, %s)", (pid, TERMINATE_MS))
        return self._try(connection)

    def beat(self) -> bool:
        """Show that the leader is alive; return whether it still leads."""
        if self._connection is None:
            return False
        try:
            self._connection.execute("SELECT 1")
        except psycopg.OperationalError:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Give up the lock, if it is held, and the connection."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.OperationalError):
                self._connection.close()
            self._connection = None

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._conninfo,
                autocommit=True,
                connect_timeout=2,
                options="-c statement_timeout=2000",
                tcp_user_timeout=2000,
                application_name="collm-controller",
            )
        return self._connection

    def _try(self, connection: "psycopg.Connection[tuple[object, ...]]") -> bool:
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,)).fetchone()
        return row is not None and bool(row[0])
