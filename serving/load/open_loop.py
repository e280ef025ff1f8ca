"""Open loop: every request leaves when the trace says, whatever became of the earlier ones.

Its latency counts from that moment. A generator that waits for answers would hide the server's worst seconds.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from serving.load.model import Call, Outcome
from serving.load.sender import Target, send

Progress = Callable[[Outcome], None]


async def replay(target: Target, calls: Sequence[Call], *, progress: Progress | None = None) -> list[Outcome]:
    """Send ``calls`` at their offsets and wait for all; outcomes in the calls' order.

    Bounded: the last answer is waited for ``target.total_timeout_s`` at most.
    """
    start = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - start

    async def one(client: httpx.AsyncClient, call: Call) -> Outcome:
        await asyncio.sleep(max(0.0, call.offset_s - now_s()))
        outcome = await send(client, target, call, scheduled_s=call.offset_s, now_s=now_s)
        if progress is not None:
            progress(outcome)
        return outcome

    async with target.client() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(client, call)) for call in calls]
    return [task.result() for task in tasks]
