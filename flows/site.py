"""What a round acts on: records, store, registry, replicas and clock, in one object."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TypeVar

import structlog
from sqlalchemy.orm import Session

from adapters.ports import AdapterStore, UpdateStore
from adapters.updates import FsUpdateStore
from db import replicas
from db.locks import try_lock
from db.records import AdapterName, ReplicaId, ReplicaRecord
from db.session import Database, OperationalError
from flows.plan import Fleet
from infra.clock import Clock, SystemClock
from infra.errors import NoReplica
from infra.settings import Settings
from serving.client import HttpReplicaClient
from serving.ports import ReplicaClient

T = TypeVar("T")
RETRY_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Waits between tries of a transaction: enough for a restart of Postgres."""
log = structlog.get_logger()


class Site:
    """Everything outside a flow process. Not a dataclass: Prefect looks inside those when they are task arguments."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        store: UpdateStore,
        registry: Callable[[], AdapterStore],
        connect: Callable[[ReplicaRecord], ReplicaClient],
        clock: Clock,
    ) -> None:
        """``registry`` is called when the registry is first needed: importing MLflow costs seconds of a core."""
        self.settings = settings
        self.store = store
        self.clock = clock
        self.database = database
        self._open_registry = registry
        self._connect = connect

    @cached_property
    def registry(self) -> AdapterStore:
        """Where people look for versions. Blocks: use it in a thread."""
        return self._open_registry()

    async def transact(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in one transaction, off the event loop; tried again while Postgres is away for seconds.

        ``work`` must be safe to repeat: the answer to a commit can get lost.
        """
        for wait_s in RETRY_S:
            try:
                return await asyncio.to_thread(self._transact, work)
            except OperationalError as e:
                log.warning("transaction_failed", error=str(e).splitlines()[0], retry_in_s=wait_s)
                await asyncio.sleep(wait_s)
        return await asyncio.to_thread(self._transact, work)

    def _transact(self, work: Callable[[Session], T]) -> T:
        with self.database.transaction() as s:
            return work(s)

    async def fleet(self) -> Fleet:
        """Return the replicas with a fresh heartbeat."""
        now_s, dead_after_s = self.clock.wall(), self.settings.controller.dead_after_s
        return await self.transact(lambda s: replicas.live(s, now_s=now_s, dead_after_s=dead_after_s))

    async def replica(self, replica_id: ReplicaId) -> ReplicaClient:
        """Return the way to a replica, wherever it last announced itself. Raises ``NoReplica``."""
        for record, _ in await self.transact(replicas.every):
            if record.id == replica_id:
                return self._connect(record)
        raise NoReplica(f"{replica_id} has not announced itself")

    @asynccontextmanager
    async def exclusive(self, adapter: AdapterName) -> AsyncIterator[bool]:
        """Yield whether this process alone works on the adapter's rounds now; see ``db.locks``."""
        lock = try_lock(self.settings.required_database_url(), f"rounds/{adapter}")
        mine = await asyncio.to_thread(lock.__enter__)
        try:
            yield mine
        finally:
            await asyncio.to_thread(lock.__exit__, None, None, None)


@asynccontextmanager
async def open_site(settings: Settings, registry: Callable[[], AdapterStore] | None = None) -> AsyncIterator[Site]:
    """Open what the settings name; close it at exit. ``registry``: another one than MLflow's."""
    database = Database(settings.required_database_url(), pool_size=2)
    token, clients = settings.required_token(), dict[str, HttpReplicaClient]()

    def connect(record: ReplicaRecord) -> ReplicaClient:
        if record.url not in clients:
            clients[record.url] = HttpReplicaClient(record.url, token)
        return clients[record.url]

    try:
        yield Site(
            settings=settings,
            database=database,
            store=FsUpdateStore(settings.resolved_store_url()),
            registry=registry or (lambda: open_registry(settings)),
            connect=connect,
            clock=SystemClock(),
        )
    finally:
        for client in clients.values():
            await client.aclose()
        database.close()


def open_registry(settings: Settings) -> AdapterStore:
    """Return the MLflow registry; imported here, because MLflow costs two seconds of a core."""
    from adapters.registry import MlflowRegistry

    return MlflowRegistry(settings.mlflow_url)
