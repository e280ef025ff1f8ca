"""A lock that its holder cannot outlive: a Postgres advisory lock on a connection of its own."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError


@contextmanager
def try_lock(url: str, name: str, *, timeout_s: float = 5.0) -> Iterator[bool]:
    """Yield whether this process now holds the lock; it is freed at exit, and when the process or its host dies.

    Does not wait for another holder. A dropped connection loses the lock unnoticed, so what it guards must also
    be guarded by its own state. Raises ``OperationalError``.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    conninfo = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        connection = psycopg.connect(
            conninfo,
            autocommit=True,
            connect_timeout=max(2, round(timeout_s)),
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
        )
    except psycopg.OperationalError as e:
        raise OperationalError(None, None, e) from e
    try:
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone()
        yield row is not None and bool(row[0])
    finally:
        connection.close()
