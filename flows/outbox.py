"""Projects Postgres's record of versions onto the registry people look at: its aliases and tags.

In order, by one process at a time, at least once: a row is done only after the registry has taken it, so a crash
repeats it, which changes nothing. Postgres stays the truth whatever the registry says.
"""

from collections.abc import Callable, Mapping

import structlog

from adapters.ports import AdapterStore
from db import adapters
from db.locks import try_lock
from db.records import AdapterName, OutboxRecord
from db.session import Database
from infra.errors import UnknownVersion

ALIASES = (adapters.ACTIVE, adapters.PREVIOUS, adapters.SHADOW)
Moved = Mapping[tuple[AdapterName, str], int | None]
log = structlog.get_logger()


def project(database: Database, registry: Callable[[], AdapterStore], *, limit: int = 32) -> int:
    """Tell the registry the oldest changes that it does not know yet; return how many. Blocks.

    ``registry`` is called only if there are any. Raises ``RegistryUnavailable`` or ``OperationalError``; what was
    told by then stays done.
    """
    with database.transaction() as s:
        if not adapters.pending_outbox(s, 1):
            return 0
    with try_lock(database.url, "outbox") as mine:
        if not mine:  # two at once would tell an older alias after a newer one
            return 0
        with database.transaction() as s:
            pending = adapters.pending_outbox(s, limit)
        for row in pending:
            _tell(registry(), row)
            with database.transaction() as s:
                adapters.outbox_done(s, row.id)
        return len(pending)


def _tell(registry: AdapterStore, row: OutboxRecord) -> None:
    # A person may have deleted a version there; neither the rest nor later rows must wait for it for ever.
    if row.tagged is not None and row.tags:
        try:
            registry.tag(row.adapter, row.tagged, row.tags)
        except UnknownVersion as e:
            log.warning("tags_skipped", adapter=row.adapter, version=row.tagged, error=e.message)
    try:
        registry.set_alias(row.adapter, row.alias, row.number)
    except UnknownVersion as e:
        log.warning("projection_skipped", adapter=row.adapter, alias=row.alias, version=row.number, error=e.message)
        return
    log.info("alias_projected", adapter=row.adapter, alias=row.alias, version=row.number)


def moved_aliases(database: Database, registry: AdapterStore) -> Moved:
    """Return what each alias names that does not name what it was last told to: a person moved it. Blocks.

    Empty while changes are pending: then a difference means nothing.
    """
    with database.transaction() as s:
        if adapters.pending_outbox(s, 1):
            return {}
        told = {
            (record.name, alias): adapters.last_projected(s, record.name, alias)
            for record in adapters.every(s)
            for alias in ALIASES
        }
    found = {key: registry.alias(*key) for key in told}
    with database.transaction() as s:
        if adapters.pending_outbox(s, 1):
            return {}
    return {key: number for key, number in found.items() if number != told[key]}
