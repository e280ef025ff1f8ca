"""``collm worker``: runs federated rounds on their schedule, and keeps the registry and the store in step.

Rounds run in this process (``flows.host`` says why). Beside them, one loop projects the outbox onto MLflow, and one
sweeps the update store. Nothing here is needed to serve: while it is away, replicas go on.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID

import structlog
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.states import Crashed
from prefect.types.entrypoint import EntrypointType

from adapters.updates import LOCAL, UPDATES, VERSIONS
from db import adapters
from db.records import AdapterName
from flows.host import FlowHost
from flows.outbox import Moved, moved_aliases, project
from flows.rounds import federated_round
from flows.site import Site, open_site
from infra import log as logging
from infra.settings import Settings, load_settings

PROJECT_EVERY_S = 1.0
COMPARE_EVERY_S = 30.0
SWEEP_EVERY_S = 600.0
RETRY_S = 5.0
"""After an error of a loop: its server is away."""
STOP_S = 10.0
"""For rounds to end when the worker stops; what is left of one is resumed by the next worker."""
log = structlog.get_logger()


async def work(settings: Settings) -> bool:
    """Run until SIGTERM or SIGINT; return whether everything ended in good order."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with open_site(settings) as site:
        loops = [
            asyncio.create_task(for_ever("outbox", Projection(site).run)),
            asyncio.create_task(for_ever("sweep", lambda: sweep(site))),
        ]
        ended = await serve_rounds(site, stopping)
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops, timeout=1.0)
        return ended


async def for_ever(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and again after an error: its server is away."""
    while True:
        try:
            await loop()
        except Exception as e:
            log.warning("loop_failed", loop=name, error=describe(e), retry_in_s=RETRY_S)
        await asyncio.sleep(RETRY_S)


def describe(error: BaseException) -> str:
    """Return one line."""
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]


async def serve_rounds(site: Site, stopping: asyncio.Event) -> bool:
    """Deploy the flow on its schedule and run what becomes due until ``stopping``; return whether all of it ended."""
    host: FlowHost | None = None
    while not stopping.is_set():
        try:
            if host is None:
                host = FlowHost(federated_round, await deploy(site))
            await host.run(stopping)
        except Exception as e:
            log.warning("loop_failed", loop="rounds", error=describe(e), retry_in_s=RETRY_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), RETRY_S)
    log.info("worker_stopping")
    return host is None or await host.end(within_s=STOP_S)


async def deploy(site: Site) -> UUID:
    """Create or update the deployment ``federated-round/<adapter>``; return its id."""
    settings = site.settings.rounds
    adapter = AdapterName(settings.adapter)
    deployment = await federated_round.ato_deployment(
        name=adapter,
        interval=settings.interval_s,
        parameters={"adapter": adapter},
        description=f"A federated round of adapter {adapter}",
        entrypoint_type=EntrypointType.MODULE_PATH,
        # A round that is due while another runs is left out, not queued.
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW),
    )
    deployment_id = await deployment.aapply()
    await clear_dead_runs(site, adapter, deployment_id)
    log.info("rounds_scheduled", deployment=f"{federated_round.name}/{adapter}", interval_s=settings.interval_s)
    return deployment_id


async def clear_dead_runs(site: Site, adapter: AdapterName, deployment_id: UUID) -> None:
    """Mark runs as crashed whose process is gone: they would hold the deployment's only slot.

    A process that works on a round holds the adapter's lock; if nobody does, whatever Prefect believes to be running
    is dead.
    """
    async with site.exclusive(adapter) as nobody_works, get_client() as client:
        if not nobody_works:
            return
        states = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
        runs = await client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=states)),
        )
        for run in runs:
            await client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            log.info("dead_run_cleared", flow_run_id=str(run.id))


class Projection:
    """Keeps MLflow's aliases as Postgres says."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._compared_s = 0.0
        self._moved: Moved = {}

    async def run(self) -> None:
        """Project for ever. Raises when MLflow or Postgres is away."""
        site = self._site
        # Importing MLflow takes seconds: now, rather than while the first round waits for its version's number.
        await asyncio.to_thread(lambda: site.registry)
        while True:
            told = await asyncio.to_thread(project, site.database, lambda: site.registry)
            now_s = site.clock.monotonic()
            if not told and now_s - self._compared_s > COMPARE_EVERY_S:
                self._compared_s = now_s
                self.compare(await asyncio.to_thread(moved_aliases, site.database, site.registry))
            await asyncio.sleep(PROJECT_EVERY_S)

    def compare(self, moved: Moved) -> None:
        """Say once of each alias that a person moved it; what is in force does not follow."""
        for key, number in moved.items():
            if key not in self._moved or self._moved[key] != number:
                log.warning("alias_moved_by_hand", adapter=key[0], alias=key[1], version=number)
        self._moved = moved


async def sweep(site: Site) -> None:
    """Delete what is old for ever."""
    while True:
        await sweep_once(site)
        await asyncio.sleep(SWEEP_EVERY_S)


async def sweep_once(site: Site) -> None:
    """Delete old updates, local versions, rejected versions, and what the registry was told long ago."""
    retain_s = site.settings.rounds.retain_s
    before_s = site.clock.wall() - retain_s
    rejected = await site.transact(lambda s: adapters.rejected_keys(s, before_s=before_s))
    for prefix, only in ((UPDATES, None), (LOCAL, None), (VERSIONS, rejected)):
        count = await asyncio.to_thread(site.store.sweep, prefix, older_than_s=retain_s, only=only)
        if count:
            log.info("store_swept", prefix=prefix, deleted=count)
    await site.transact(lambda s: adapters.trim_outbox(s, before_s=before_s))


def main(argv: list[str]) -> int:
    """``collm worker``."""
    argparse.ArgumentParser(
        prog="collm worker", description="Run federated rounds on their schedule, until SIGTERM."
    ).parse_args(argv)
    settings = load_settings()
    logging.configure(settings)
    if not asyncio.run(work(settings)):
        # A call into a server that hangs cannot be ended; the round is resumed by the next worker.
        log.warning("worker_left_a_round_behind")
        sys.stderr.flush()
        os._exit(0)
    return 0
