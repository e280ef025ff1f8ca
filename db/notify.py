"""NOTIFY from within a transaction: heard only if, and when, it commits."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session


def notify(s: Session, channel: str, payload: str) -> None:
    """Tell the listeners of ``channel``. Equal payloads of one transaction arrive once; at most 8,000 bytes."""
    s.execute(select(func.pg_notify(channel, payload)))
