"""``collm round``: start a round now, pause or resume training and its schedule, roll a version back."""

import argparse
import asyncio
import sys
from dataclasses import dataclass

import httpx
from prefect.client.orchestration import get_client
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from db import adapters
from db.records import AdapterName
from db.session import Database, OperationalError
from infra import log as logging
from infra.clock import Clock, SystemClock
from infra.errors import ConfigError
from infra.settings import Settings, load_settings
from infra.state import with_local_cluster

FLOW = "federated-round"
ACTOR = "collm round"
UNREACHABLE = (httpx.HTTPError, OSError, RuntimeError)
"""What Prefect's client raises when its server is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Turns an adapter's training on and off, everywhere at once."""

    settings: Settings
    database: Database
    clock: Clock

    async def set(self, adapter: AdapterName, *, training: bool, actor: str) -> None:
        """Tell the replicas first: what is in Postgres holds, the schedule only saves starts for nothing.

        A round under way waits while training is paused. Raises ``UnknownAdapter``.
        """
        await self.set_mode(adapter, training=training, actor=actor)
        await set_schedule(self.settings, adapter, active=training)

    async def set_mode(self, adapter: AdapterName, *, training: bool, actor: str) -> None:
        """Tell the replicas alone."""
        await asyncio.to_thread(self._set_mode, adapter, training, actor)

    def _set_mode(self, adapter: AdapterName, training: bool, actor: str) -> None:
        with self.database.transaction() as s:
            record = adapters.get(s, adapter)
            adapters.set_mode(
                s, adapter, training=training, publishing=record.publishing, actor=actor, now_s=self.clock.wall()
            )


async def set_schedule(settings: Settings, adapter: AdapterName, *, active: bool) -> None:
    """Pause or resume the deployment in Prefect; nothing happens while no worker has made it."""
    with temporary_settings({PREFECT_API_URL: settings.prefect_api_url}):
        async with get_client() as client:
            try:
                deployment = await client.read_deployment_by_name(f"{FLOW}/{adapter}")
            except ObjectNotFound:
                return
            if active:
                await client.resume_deployment(deployment.id)
            else:
                await client.pause_deployment(deployment.id)


async def start_round(settings: Settings, adapter: AdapterName) -> str:
    """Ask for a round now; return the flow run's id. Left out like a scheduled one if a round is under way."""
    with temporary_settings({PREFECT_API_URL: settings.prefect_api_url}):
        run = await arun_deployment(f"{FLOW}/{adapter}", parameters={"adapter": adapter}, timeout=0)
    return str(run.id)


def main(argv: list[str]) -> int:
    """``collm round``."""
    parser = argparse.ArgumentParser(prog="collm round", description="Federated rounds of an adapter.")
    parser.add_argument(
        "action",
        choices=("run", "pause", "resume", "rollback"),
        help="start one now; pause or resume training; return to the previous version",
    )
    parser.add_argument("adapter", nargs="?", help="by default COLLM_ROUNDS__ADAPTER")
    parser.add_argument("--reason", default="by hand", help="why it is rolled back, for the records")
    arguments = parser.parse_args(argv)
    settings = with_local_cluster(load_settings())
    logging.configure(settings)
    adapter = AdapterName(arguments.adapter or settings.rounds.adapter)
    try:
        if arguments.action == "run":
            print(asyncio.run(start_round(settings, adapter)))
        elif arguments.action == "rollback":
            print(roll_back(settings, adapter, reason=arguments.reason))
        else:
            asyncio.run(switch(settings, adapter, training=arguments.action == "resume"))
    except ObjectNotFound:
        raise ConfigError(f"COLLM_ROUNDS__ADAPTER: no worker serves rounds of {adapter!r}") from None
    except OperationalError as e:
        print(f"the database does not answer: {str(e).splitlines()[0]}", file=sys.stderr)
        return 1
    except UNREACHABLE as e:
        print(f"Prefect does not answer at {settings.prefect_api_url}: {e!r}", file=sys.stderr)
        return 1
    return 0


async def switch(settings: Settings, adapter: AdapterName, *, training: bool) -> None:
    """Turn training on or off, and say so before the schedule is asked for: it may be out of reach."""
    database = Database(settings.required_database_url(), pool_size=1)
    try:
        both = Switch(settings=settings, database=database, clock=SystemClock())
        await both.set_mode(adapter, training=training, actor=ACTOR)
        print(f"training of {adapter} is {'on' if training else 'paused'}", file=sys.stderr)
        await set_schedule(settings, adapter, active=training)
    finally:
        database.close()


def roll_back(settings: Settings, adapter: AdapterName, *, reason: str) -> str:
    """Return to the previous version and say which is in force. Raises what ``adapters.roll_back`` raises."""
    database = Database(settings.required_database_url(), pool_size=1)
    try:
        with database.transaction() as s:
            before = adapters.get(s, adapter)
            now = adapters.roll_back(
                s, adapter, expected_epoch=before.epoch, actor=ACTOR, reason=reason, now_s=SystemClock().wall()
            )
            dropped, chosen = adapters.version(s, before.desired_uid), adapters.version(s, now.desired_uid)
    finally:
        database.close()
    return f"{adapter}: version {chosen.number} is in force again (epoch {now.epoch}), {dropped.number} is rejected"
