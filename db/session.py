"""One process's way to Postgres: short transactions from a pool, and a connection of its own for LISTEN.

Only synchronous: async callers go through ``asyncio.to_thread``. Whatever makes the server unreachable or a statement
too slow is raised as one exception, ``OperationalError``, so that callers can fail static by catching one thing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event

import psycopg
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

__all__ = ["Database", "Notification", "OperationalError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A NOTIFY that arrived."""

    channel: str
    payload: str


class Database:
    """A pool of connections to one database; threads may share it. Connects lazily."""

    def __init__(self, url: str, *, pool_size: int = 4, timeout_s: float = 5.0) -> None:
        """``url``: ``postgresql+psycopg://…``; ``timeout_s`` bounds connecting, the wait for the pool, a statement."""
        self.url = url
        timeout_ms = int(timeout_s * 1000)
        self._engine = create_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=timeout_s,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": max(2, round(timeout_s)),
                "tcp_user_timeout": timeout_ms,
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                # A client that hangs inside a transaction must not hold its locks for ever.
                "options": f"-c statement_timeout={timeout_ms} -c idle_in_transaction_session_timeout={4 * timeout_ms}",
            },
        )

    def transaction(self) -> AbstractContextManager[Session]:
        """Return a context that commits on exit and rolls back on an error. Raises ``OperationalError``."""
        return self._transaction()

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        # Rows are always read afresh: queries mix ORM reads with plain upserts, which the identity map does not see.
        session = Session(self._engine, expire_on_commit=False, execution_options={"populate_existing": True})
        try:
            with session.begin():
                yield session
        except PoolTimeout as e:
            raise OperationalError(None, None, e) from e
        finally:
            session.close()

    def listen(self, *channels: str, stop: Event, poll_s: float) -> Iterator[Notification | None]:
        """Yield notifications until ``stop``; None once LISTEN is in force, and after each ``poll_s`` of silence.

        Whoever re-reads the state at every None misses nothing, also what changed while nobody listened. Raises
        ``OperationalError`` when the server goes; call again, then.
        """
        try:
            with self._dedicated() as connection:
                for channel in channels:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                yield None
                while not stop.is_set():
                    silent = True
                    for notify in connection.notifies(timeout=poll_s, stop_after=1):
                        silent = False
                        yield Notification(channel=notify.channel, payload=notify.payload)
                    if silent and not stop.is_set():
                        yield None
        except psycopg.OperationalError as e:
            raise OperationalError(None, None, e) from e

    def _dedicated(self) -> "psycopg.Connection[tuple[object, ...]]":
        """Open a connection outside the pool, in autocommit."""
        args, kwargs = self._engine.dialect.create_connect_args(self._engine.url)
        return psycopg.connect(
            *args,
            **{**kwargs, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "connect_timeout": 5},
            autocommit=True,
        )

    def close(self) -> None:
        """Close the pool; a later use opens it again."""
        self._engine.dispose()
