"""Flow runs inside the worker: taken when due, one at a time, cancelled when asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, FlowRun, State, StateType
from prefect.states import Cancelling, Completed

from flows.host import FlowHost, HostedFlow

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@flow(name="hosted")
async def hosted(adapter: str, round_id: str | None = None, tokens: int | None = None) -> State[dict[str, str]]:
    """Do what the parameter says."""
    if adapter == "sleep":
        await asyncio.sleep(60)
    if adapter == "fail":
        raise ValueError("no good")
    return Completed(message=adapter, data={})


@asynccontextmanager
async def serving(what: HostedFlow) -> AsyncIterator[tuple[PrefectClient, UUID, FlowHost]]:
    deployment = await what.ato_deployment(
        name="test",
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW),
    )
    deployment_id = await deployment.aapply()
    host, stopping = FlowHost(what, deployment_id), asyncio.Event()
    async with get_client() as client:
        loop = asyncio.create_task(host.run(stopping))
        try:
            yield client, deployment_id, host
        finally:
            stopping.set()
            await loop
            assert await host.end(within_s=10)


async def start(client: PrefectClient, deployment_id: UUID, adapter: str) -> UUID:
    return (await client.create_flow_run_from_deployment(deployment_id, parameters={"adapter": adapter})).id


async def reached(client: PrefectClient, run_id: UUID, wanted: Callable[[State[object]], bool]) -> State[object]:
    async with asyncio.timeout(60):
        while True:
            state = (await client.read_flow_run(run_id)).state
            if state is not None and wanted(state):
                return state
            await asyncio.sleep(0.1)


def ended(state: State[object]) -> bool:
    return state.is_final()


def running(state: State[object]) -> bool:
    return state.is_running()


async def test_a_due_run_is_carried_out_and_a_failed_one_harms_nobody() -> None:
    async with serving(hosted) as (client, deployment_id, _):
        failed = await reached(client, await start(client, deployment_id, "fail"), ended)
        assert failed.type is StateType.FAILED
        assert "no good" in (failed.message or "")
        done = await reached(client, await start(client, deployment_id, "hello"), ended)
        assert (done.type, done.message) == (StateType.COMPLETED, "hello")


async def test_a_run_that_is_due_while_another_goes_on_is_left_out_and_a_cancelled_one_ends() -> None:
    async with serving(hosted) as (client, deployment_id, _):
        first = await start(client, deployment_id, "sleep")
        await reached(client, first, running)
        second = await reached(client, await start(client, deployment_id, "hello"), ended)
        assert second.type is StateType.CANCELLED

        cancelling: State[None] = Cancelling()
        await client.set_flow_run_state(first, cancelling)
        assert (await reached(client, first, ended)).type in (StateType.CANCELLED, StateType.CRASHED)
        third = await reached(client, await start(client, deployment_id, "again"), ended)
        assert third.message == "again", "the slot is free"


async def test_stopping_ends_what_runs() -> None:
    async with serving(hosted) as (client, deployment_id, host):
        run_id = await start(client, deployment_id, "sleep")
        await reached(client, run_id, running)
        assert await host.end(within_s=10)
        assert (await reached(client, run_id, ended)).type in (StateType.CANCELLED, StateType.CRASHED)


class Away(PrefectClient):
    """Prefect's client, whose server goes when a run is read."""

    away = True

    async def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        if self.away:
            raise httpx.ConnectError("gone")
        return await super().read_flow_run(flow_run_id)


async def test_a_run_taken_just_before_the_server_goes_is_carried_out_later() -> None:
    deployment = await hosted.ato_deployment(name="away")
    host = FlowHost(hosted, await deployment.aapply())
    async with get_client() as client:
        run_id = await start(client, host._deployment_id, "hello")
        async with Away(str(client.api_url)) as broken:
            with pytest.raises(httpx.ConnectError):
                await host.take(broken)
        await host.take(client)
        done = await reached(client, run_id, ended)
    assert (done.type, done.message) == (StateType.COMPLETED, "hello")
    assert await host.end(within_s=10)
