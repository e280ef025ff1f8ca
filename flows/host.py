"""Runs what Prefect schedules of one deployment, inside this process.

Prefect's own ``Runner`` starts a process per run. That costs 3.3 s of a core in imports alone for a round that needs
0.4 s itself (measured; MLflow's client is half of it), taken from serving, and at low priority beside busy replicas
the start takes ten times as long. A round keeps nothing in memory that matters, so a process of its own buys nothing:
if this one dies, the next one resumes the round from its record.
"""

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import structlog
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.flow_engine import run_flow_async
from prefect.states import Cancelled, Pending

POLL_S = 1.0
BUSY_POLL_S = 5.0
"""While a run goes on: then what is due is only left out, and a person's wish to cancel can wait a little."""
AT_ONCE = 10
"""Runs that one poll takes up at most; after a long absence many are due, and the server cancels all but one."""
HostedFlow = Flow[[str, str | None, int | None], Coroutine[object, object, State[dict[str, str]]]]
log = structlog.get_logger()


@dataclass(slots=True)
class HostedRun:
    """One flow run in a thread with an event loop of its own: Prefect installs signal handlers in the main thread."""

    flow: HostedFlow
    record: FlowRun
    ended: "Future[None]" = field(default_factory=Future)
    started: bool = False
    cancelled: bool = False
    _loop: asyncio.AbstractEventLoop | None = None
    _task: "asyncio.Task[object] | None" = None

    def start(self) -> None:
        """Begin; ``ended`` is set when it is over, however it ended."""
        self.started = True
        # Prefect's settings live in the context.
        run = partial(contextvars.copy_context().run, self._run)
        threading.Thread(target=run, name=f"flow-run-{self.record.name}", daemon=True).start()

    def cancel(self) -> None:
        """Ask it to end; idempotent."""
        self.cancelled = True
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as e:  # Prefect's engine has reported it to the server
            log.warning("flow_run_broke_off", flow_run_id=str(self.record.id), error=f"{type(e).__name__}: {e}")
        finally:
            self.ended.set_result(None)

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if not self.cancelled:
            await run_flow_async(
                self.flow, flow_run=self.record, parameters=self.record.parameters, return_type="state"
            )


class FlowHost:
    """Polls for due runs of a deployment, and carries them out."""

    def __init__(self, flow: HostedFlow, deployment_id: UUID) -> None:
        self._flow = flow
        self._deployment_id = deployment_id
        self._runs: dict[UUID, HostedRun] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``. Raises what Prefect's client raises; what runs goes on, so call it again."""
        async with get_client() as client:
            asked_s = -BUSY_POLL_S
            while not stopping.is_set():
                await self._forget_ended(client)
                await self._start_taken(client)
                now_s = asyncio.get_running_loop().time()
                if now_s - asked_s >= (BUSY_POLL_S if self._runs else POLL_S):
                    asked_s = now_s
                    await self._heed_cancellations(client)
                    await self.take(client)
                try:
                    await asyncio.wait_for(stopping.wait(), POLL_S)
                except TimeoutError:
                    continue

    async def take(self, client: PrefectClient) -> None:
        """Take up what is due; what is taken and could not be started before, too."""
        await self._take_due(client)
        await self._start_taken(client)

    async def end(self, *, within_s: float) -> bool:
        """Cancel what runs; return whether all of it ended in time."""
        for hosted in self._runs.values():
            hosted.cancel()
        ends = [asyncio.wrap_future(hosted.ended) for hosted in self._runs.values() if hosted.started]
        _, left = await asyncio.wait(ends, timeout=within_s) if ends else ((), ())
        return not left

    async def _take_due(self, client: PrefectClient) -> None:
        due = await client.get_scheduled_flow_runs_for_deployments(
            [self._deployment_id], scheduled_before=datetime.now(UTC), limit=AT_ONCE
        )
        for run in sorted(due, key=lambda run: run.next_scheduled_start_time or datetime.now(UTC)):
            pending: State[None] = Pending()
            answer: OrchestrationResult[None] = await client.set_flow_run_state(run.id, pending)
            if answer.status is not SetStateStatus.ACCEPT:
                continue  # another run holds the deployment's slot
            # Noted at once: if the server goes now, a run that nobody knows of would hold the slot.
            self._runs[run.id] = HostedRun(self._flow, run)

    async def _start_taken(self, client: PrefectClient) -> None:
        for run_id, hosted in self._runs.items():
            if not hosted.started:
                # Read again: the state now names the slot's lease, which the engine keeps alive.
                hosted.record = await client.read_flow_run(run_id)
                hosted.start()

    async def _forget_ended(self, client: PrefectClient) -> None:
        for run_id, hosted in list(self._runs.items()):
            if not hosted.ended.done():
                continue
            state = (await client.read_flow_run(run_id)).state
            if state is not None and not state.is_final():
                message = "cancelled" if hosted.cancelled else "it broke off"
                cancelled: State[None] = Cancelled(message=message)
                await client.set_flow_run_state(run_id, cancelled, force=True)
            del self._runs[run_id]

    async def _heed_cancellations(self, client: PrefectClient) -> None:
        """Cancel what a person cancelled in Prefect's UI."""
        for run_id, hosted in self._runs.items():
            state = (await client.read_flow_run(run_id)).state
            if state is not None and state.type is StateType.CANCELLING:
                hosted.cancel()
