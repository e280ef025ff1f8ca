"""What people and flows do to a replica, at random: versions staged, promoted, rolled back, refused; rounds run."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy.orm import Session

from db import adapters
from db.records import AdapterName, AdapterRecord, VersionRecord, VersionState, VersionUid
from infra.errors import CollmError
from serving.client import HttpReplicaClient
from serving.wire.control import ActivateBody, RollbackBody, RoundBody, RowBody, ScoreBody, StageBody
from tests.soak.site import Site, new_version

T = TypeVar("T")

ROUND_TOKENS = 400
SETTLED = ("version_conflict", "unknown_version", "no_place")
"""Answers that a well-meant action may get while others act: it was overtaken, or there was nothing to return to."""


@dataclass
class Operator:
    """Acts until told to stop; remembers what it did and every answer that was not as it must be."""

    site: Site
    client: HttpReplicaClient
    names: list[AdapterName]
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    """"action: what came of it" → how often."""
    wrong: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    """uid → key in the store, of every version that may have answered."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._made = 1000
        self._round: str | None = None

    async def run(self, stopping: asyncio.Event, *, pause_s: float) -> None:
        """Act every ``pause_s`` seconds or so."""
        actions: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.promote, 6),
            (self.start_round, 6),
            (self.roll_back, 1),
            (self.roll_back_here, 1),
            (self.stage_only, 1),
            (self.stale_activation, 1),
            (self.broken_stage, 1),
            (self.stop_round, 1),
            (self.score, 1),
        ]
        while not stopping.is_set():
            ((action, _),) = self._random.choices(actions, [weight for _, weight in actions])
            await action()
            await self.watch()
            try:
                async with asyncio.timeout(self._random.uniform(0.2, 1.8) * pause_s):
                    await stopping.wait()
            except TimeoutError:
                continue

    async def watch(self) -> None:
        """Note the keys of local versions."""
        status = await self.client.status()
        self.keys |= {swap.uid: swap.store_key for swap in status.swaps if swap.store_key is not None}

    async def know(self) -> None:
        """Note the keys of all federated versions."""

        def read(s: Session) -> dict[str, str]:
            return {v.uid: v.store_key for name in self.names for v in adapters.versions(s, name)}

        self.keys |= await self._transact(read)

    # Actions.

    async def promote(self) -> None:
        """Bring a new version into force; often the replica has it before the record says so, as in a round."""
        name = self._any()
        uid, key, number = await self._version(name)
        stage_s, activate = self._random.random(), self._random.random() < 0.5
        if stage_s < 0.7:
            await self._try("stage", self.client.stage(StageBody(adapter=name, uid=uid, number=number, store_key=key)))

        def write(s: Session) -> AdapterRecord:
            epoch = adapters.get(s, name).epoch
            return adapters.promote(s, name, uid, expected_epoch=epoch, actor="soak", reason="", now_s=time.time())

        record = await self._transact(write)
        self.done["promote: recorded"] += 1
        if activate:
            body = ActivateBody(adapter=name, uid=uid, epoch=record.epoch)
            await self._try("activate", self.client.activate(body))

    async def roll_back(self) -> None:
        """Put the previous version back in force, on all replicas."""
        name = self._any()

        def write(s: Session) -> AdapterRecord:
            epoch = adapters.get(s, name).epoch
            return adapters.roll_back(s, name, expected_epoch=epoch, actor="soak", reason="", now_s=time.time())

        await self._try("roll back in the records", self._transact(write))

    async def roll_back_here(self) -> None:
        """Return to the previous version on this replica alone."""
        await self._try("roll back", self.client.roll_back(RollbackBody(adapter=self._any())))

    async def stage_only(self) -> None:
        """Stage a candidate that comes to nothing."""
        name = self._any()
        uid, key, number = await self._version(name)
        await self._try("stage", self.client.stage(StageBody(adapter=name, uid=uid, number=number, store_key=key)))

    async def stale_activation(self) -> None:
        """Activate another version at the first epoch, which has passed: it must be refused."""
        record = await self._record(self._any())
        uid, key, number = await self._version(record.name)
        stage = StageBody(adapter=record.name, uid=uid, number=number, store_key=key)
        await self._try("stage", self.client.stage(stage))
        body = ActivateBody(adapter=record.name, uid=uid, epoch=1)
        await self._refused("stale activation", ("version_conflict", "unknown_version"), self.client.activate(body))

    async def broken_stage(self) -> None:
        """Stage what is not there, is not what it says, or belongs to nobody: it must be refused."""
        name = self._any()
        uid, key, number = await self._version(name)
        lie = StageBody(adapter=name, uid=VersionUid("0" * 64), number=number, store_key=key)
        gone = StageBody(adapter=name, uid=uid, number=number, store_key="versions/" + "0" * 64)
        nobody = StageBody(adapter="nobody", uid=uid, number=number, store_key=key)
        rubbish = self.site.store.put("versions", b"rubbish" * self._random.randint(1, 99))
        spoilt = StageBody(adapter=name, uid=uid, number=number, store_key=rubbish)
        body, code = self._random.choice(
            [
                (lie, "incompatible_adapter"),
                (gone, "unknown_version"),
                (nobody, "unknown_adapter"),
                (spoilt, "incompatible_adapter"),
            ]
        )
        # A request error travels as "validation" or by a code of its own; the status says the rest.
        await self._refused("broken stage", (code,), self.client.stage(body))

    async def start_round(self) -> None:
        """Train: local versions come out while it runs."""
        name = self.names[0] if self._random.random() < 0.8 else self._any()
        record = await self._record(name)
        self._made += 1
        body = RoundBody(
            round_id=f"soak-{self._made}",
            adapter=name,
            base_uid=record.desired_uid,
            epoch=record.epoch,
            factor=self._random.choice(["A", "B", "both"]),
            tokens=ROUND_TOKENS,
            rows_per_step=2,
            lr=2e-3,
            swap_every=self._random.choice([1, 1, 2]),
            seed=self._made,
            deadline_s=60.0,
        )
        running = (await self.client.status()).round
        if running is not None and running.state == "running" and self._random.random() < 0.8:
            self.done["round: left to run"] += 1
            return
        if await self._try("start round", self.client.start_round(body)):
            self._round = body.round_id

    async def stop_round(self) -> None:
        """Drop a round's shadow; what it has published gives way to its base."""
        if self._round is not None:
            await self._try("stop round", self.client.stop_round(self._round))

    async def score(self) -> None:
        """Score a version; under load there may be no time for it, and the caller goes."""
        name = self._any()
        await self.know()
        uid = (await self._record(name)).desired_uid
        rows = (RowBody(prompt="List all files.", completion="ls -a"),) * 2
        body = ScoreBody(adapter=name, uid=uid, store_key=self.keys[uid], rows=rows)
        await self._try("score", self.client.score(body, timeout_s=3.0), also=("no_replica",))

    # Helpers.

    def _any(self) -> AdapterName:
        return self._random.choice(self.names)

    async def _version(self, name: AdapterName) -> tuple[VersionUid, str, int]:
        self._made += 1
        uid, key = await asyncio.to_thread(new_version, self.site, seed=self._made)

        def write(s: Session) -> int:
            before = adapters.versions(s, name)
            record = VersionRecord(
                uid=uid,
                adapter=name,
                number=before[-1].number + 1,
                parent_uid=adapters.get(s, name).desired_uid,
                round_id=None,
                state=VersionState.CANDIDATE,
                store_key=key,
                mlflow_model_id=None,
                created_s=time.time(),
            )
            adapters.add_version(s, record)
            return record.number

        return uid, key, await self._transact(write)

    async def _record(self, name: AdapterName) -> AdapterRecord:
        return await self._transact(lambda s: adapters.get(s, name))

    async def _transact(self, call: Callable[[Session], T]) -> T:
        def run() -> T:
            with self.site.database.transaction() as s:
                return call(s)

        return await asyncio.to_thread(run)

    async def _try(self, what: str, call: Awaitable[object], also: tuple[str, ...] = ()) -> bool:
        """Do what should work, or be refused because something else came first."""
        try:
            await call
        except CollmError as error:
            self.done[f"{what}: {error.code}"] += 1
            if error.code not in (*SETTLED, *also):
                self.wrong.append(f"{what}: {error.code}: {error.message}")
            return False
        self.done[f"{what}: done"] += 1
        return True

    async def _refused(self, what: str, codes: tuple[str, ...], call: Awaitable[object]) -> None:
        """Do what must not work."""
        try:
            await call
        except CollmError as error:
            self.done[f"{what}: {error.code}"] += 1
            if error.code not in codes:
                self.wrong.append(f"{what}: {error.code} instead of {codes}: {error.message}")
            return
        self.wrong.append(f"{what}: was accepted")
