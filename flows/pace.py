"""How long a round may go on: its clock stands still while training is paused, and ends when its base is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from db import adapters
from db.records import AdapterRecord, RoundRecord
from flows.site import Site
from infra.errors import RoundError, StaleUpdate

LOOK_EVERY_S = 1.0


class Paused(Exception):
    """Training has been paused for long; the round is kept as it is, for a later run."""


class Pace:
    """One round's clock; the round's work asks ``check`` and ``running`` as it goes. Pure but for its event."""

    def __init__(self, current: RoundRecord, *, now_s: float) -> None:
        self._round = current
        self._last_s = now_s
        self._used_s = 0.0
        self._paused_s = 0.0
        self._stale = ""
        self._broken: BaseException | None = None
        self._training = asyncio.Event()
        self._training.set()

    def see(self, record: AdapterRecord, *, now_s: float) -> None:
        """Take in the adapter's record as it is now."""
        passed_s, self._last_s = now_s - self._last_s, now_s
        if record.epoch != self._round.base_epoch:
            self._stale = f"version {record.desired_uid[:12]} came into force (epoch {record.epoch})"
        if record.training:
            self._used_s, self._paused_s = self._used_s + passed_s, 0.0
            self._training.set()
        else:
            self._paused_s += passed_s
            self._training.clear()

    @property
    def training(self) -> bool:
        """Whether training was on at the last look."""
        return self._training.is_set()

    def fail(self, error: BaseException) -> None:
        """Let whoever asks next know that nobody watches any more."""
        self._broken = error

    def check(self) -> None:
        """Raise ``StaleUpdate`` if the base was replaced, ``Paused`` after a long pause, ``RoundError`` when late."""
        self._check_base()
        if self._used_s > self._round.plan.deadline_s:
            raise RoundError(f"not done within {self._round.plan.deadline_s:g} s")

    async def running(self) -> None:
        """Return at once, or when a pause ends. Raises as ``check``, but never for the deadline of training."""
        self._check_base()
        while not self._training.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._training.wait(), LOOK_EVERY_S)
            self._check_base()

    def _check_base(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._stale:
            raise StaleUpdate(self._stale)
        if self._paused_s > self._round.plan.deadline_s:
            raise Paused


@asynccontextmanager
async def watched(site: Site, current: RoundRecord) -> AsyncIterator[Pace]:
    """Yield a pace that follows the adapter's record until exit."""
    pace = Pace(current, now_s=site.clock.monotonic())

    async def watch() -> None:
        try:
            while True:
                record = await site.transact(lambda s: adapters.get(s, current.adapter))
                pace.see(record, now_s=site.clock.monotonic())
                await asyncio.sleep(LOOK_EVERY_S)
        except Exception as e:
            pace.fail(e)

    task = asyncio.create_task(watch())
    try:
        yield pace
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
