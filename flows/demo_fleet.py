"""The fleet in the two states that the demo compares, and what it says of itself."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from db import adapters, replicas, rounds
from db.records import (
    AdapterName,
    AdapterRecord,
    Heartbeat,
    Publishing,
    ReplicaId,
    RoundRecord,
    VersionRecord,
    VersionState,
    VersionUid,
)
from flows.demo_schedule import RoundSchedule
from flows.moves import abort, release
from flows.round_state import is_final
from flows.site import Site
from infra.errors import CollmError
from serving.wire.control import Status, Swap

ACTOR = "demo"
LOOK_EVERY_S = 0.3
IN_FORCE_S = 60.0
"""How long the fleet may take to serve a version that it has been told to."""
QUIET_S = 2.0


class NotInForce(CollmError):
    """The fleet did not get into the state that a window needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Tokens trained since the replicas started, all replicas together."""

    train_tokens: int
    train_tokens_while_decoding: int


@dataclass(frozen=True, slots=True)
class SetUp:
    """A span in which the demo itself changed versions; wall clock."""

    begin_s: float
    end_s: float


class DemoFleet:
    """Brings the fleet into S or C. Everything goes the way a person's orders would: by the records and Prefect."""

    def __init__(self, site: Site, schedule: RoundSchedule, adapter: AdapterName, *, quiet_s: float = QUIET_S) -> None:
        """``quiet_s``: without a round for this long, none is about to begin either."""
        self.site = site
        self.schedule = schedule
        self.adapter = adapter
        self.quiet_s = quiet_s
        self.set_ups: list[SetUp] = []
        self.swaps: dict[tuple[str, float, str], Swap] = {}
        """By (replica, time, uid)."""

    async def static(self, *, settle_s: float) -> None:
        """The initial version everywhere, nothing trained, no round. Returns when that is in force.

        A round that does not finish within ``settle_s`` is aborted. A change of version would end it as stale, too, but
        there is none if the initial version is in force; then the replicas would keep its local versions.
        """
        if not await self.settle(settle_s):
            await self.abort_round()
        await self.set_mode(training=False, publishing=Publishing.OFF)
        await self.force((await self.record()).initial_uid, "static window: initial version")

    async def collm(self) -> None:
        """The newest promoted version everywhere, training and guarded local publishing on, rounds scheduled."""
        newest = (await self.promoted())[-1]
        if newest.uid != (await self.record()).desired_uid:
            await self.force(newest.uid, "CoLLM window: newest promoted version")
        await self.set_mode(training=True, publishing=Publishing.GUARDED)
        await self.schedule.resume()

    async def settle(self, limit_s: float) -> bool:
        """Schedule no more rounds and let a running one finish; return whether none runs."""
        await self.schedule.pause()
        clock = self.site.clock
        begun = quiet_since = clock.monotonic()
        while True:
            if await self.round_runs():
                quiet_since = clock.monotonic()
            elif clock.monotonic() - quiet_since >= self.quiet_s:
                return True
            if clock.monotonic() - begun > limit_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)

    async def abort_round(self) -> None:
        """End the round that runs, if one does, and have its clients drop what they trained."""
        latest = await self.site.transact(lambda s: rounds.latest(s, self.adapter))
        if latest is not None and not is_final(latest.state):
            await release(self.site, await abort(self.site, latest, "the demo needs a fleet that does not train"))

    async def force(self, uid: VersionUid, reason: str) -> None:
        """Make a version the desired one and wait until every replica serves exactly it."""
        begin_s = self.site.clock.wall()

        def promote(s: Session) -> AdapterRecord:
            epoch = adapters.get(s, self.adapter).epoch
            return adapters.promote(
                s, self.adapter, uid, expected_epoch=epoch, actor=ACTOR, reason=reason, now_s=self.site.clock.wall()
            )

        await self.site.transact(promote)
        await self.in_force(uid)
        self.set_ups.append(SetUp(begin_s, self.site.clock.wall()))

    async def in_force(self, uid: VersionUid) -> None:
        """Wait until every replica serves ``uid``. Raises ``NotInForce`` that says which one does not."""
        begun = self.site.clock.monotonic()
        while True:
            serving = {
                record.id: None if beat is None else beat.active_uids.get(self.adapter)
                for record, beat in await self.site.transact(replicas.every)
            }
            if serving and all(active == uid for active in serving.values()):
                return
            if self.site.clock.monotonic() - begun > IN_FORCE_S:
                raise NotInForce(f"version {uid[:12]} is not in force after {IN_FORCE_S:g} s: {serving}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def set_mode(self, *, training: bool, publishing: Publishing) -> None:
        """Switch training and local publishing."""
        now_s = self.site.clock.wall()
        await self.site.transact(
            lambda s: adapters.set_mode(
                s, self.adapter, training=training, publishing=publishing, actor=ACTOR, now_s=now_s
            )
        )

    async def record(self) -> AdapterRecord:
        """Return the adapter."""
        return await self.site.transact(lambda s: adapters.get(s, self.adapter))

    async def versions(self) -> list[VersionRecord]:
        """Return the federated versions by number."""
        return await self.site.transact(lambda s: adapters.versions(s, self.adapter))

    async def promoted(self) -> list[VersionRecord]:
        """Return those that passed the gate, and the initial one, by number."""
        initial = (await self.record()).initial_uid
        return [v for v in await self.versions() if v.uid == initial or v.state is VersionState.PROMOTED]

    async def rounds(self) -> list[RoundRecord]:
        """Return all rounds by number."""
        found = await self.site.transact(lambda s: rounds.of_adapter(s, self.adapter))
        return sorted(found, key=lambda record: record.number)

    async def round_runs(self) -> bool:
        """Return whether a round is unfinished."""
        latest = await self.site.transact(lambda s: rounds.latest(s, self.adapter))
        return latest is not None and not is_final(latest.state)

    async def statuses(self) -> Mapping[str, Status]:
        """Return each replica's own account, and remember its swaps."""
        records = await self.site.transact(replicas.every)
        found: dict[str, Status] = {}
        for record, _ in records:
            status = await (await self.site.replica(ReplicaId(record.id))).status()
            found[record.id] = status
            for swap in status.swaps:
                if swap.adapter == self.adapter:
                    self.swaps[(record.id, swap.at_s, swap.uid)] = swap
        return found

    async def counters(self) -> Counters:
        """Return what has been trained so far."""
        found = (await self.statuses()).values()
        return Counters(
            train_tokens=sum(status.train_tokens_total for status in found),
            train_tokens_while_decoding=sum(status.train_tokens_decoding_total for status in found),
        )

    async def beats(self) -> list[Heartbeat]:
        """Return the live replicas' heartbeats."""
        return [beat for _, beat in await self.site.fleet()]

    def by_demo(self, at_s: float) -> bool:
        """Return whether a swap at this moment was one that the demo asked for."""
        return any(span.begin_s <= at_s <= span.end_s for span in self.set_ups)
