"""The replica and the database: heartbeats, versions in force, modes, shares; and the database away."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from adapters import weights as codec
from adapters.model import LoraWeights
from db import adapters as adapter_rows
from db import control, replicas
from db.records import (
    AdapterName,
    AdapterRecord,
    Epoch,
    Heartbeat,
    Publishing,
    ReplicaId,
    VersionRecord,
    VersionState,
    VersionUid,
)
from db.session import Database
from serving.replica.background import Mode
from serving.replica.directives import Governor

if TYPE_CHECKING:
    from tests.integration.replica.conftest import Site

CODE = AdapterName("code")


def until(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


class Fleet:
    """A governed replica and what the database says."""

    def __init__(self, site: "Site", database: Database) -> None:
        self.site = site
        self.database = database
        self.governor = Governor(site.replica, site.loader, database, url="http://r-7:1", has_shard=True)

    def record(
        self, weights: LoraWeights, number: int, *, key: str | None = None, adapter: AdapterName = CODE
    ) -> VersionRecord:
        uid = codec.version_uid(self.site.engine.shape.backbone, weights)
        return VersionRecord(
            uid=uid,
            adapter=adapter,
            number=number,
            parent_uid=None,
            round_id=None,
            state=VersionState.PROMOTED if number == 1 else VersionState.CANDIDATE,
            store_key=key or self.site.store.put("versions", codec.to_bytes(weights)),
            mlflow_model_id=None,
            created_s=0.0,
        )

    def create(
        self, *, backbone: str | None = None, name: AdapterName = CODE, seed: int = 21, key: str | None = None
    ) -> VersionUid:
        first = self.record(self.site.fresh(seed), 1, key=key, adapter=name)
        adapter = AdapterRecord(
            name=name,
            backbone=backbone or self.site.engine.shape.backbone,
            spec=self.site.spec,
            initial_uid=first.uid,
            desired_uid=first.uid,
            previous_uid=None,
            epoch=Epoch(1),
            training=True,
            publishing=Publishing.GUARDED,
        )
        with self.database.transaction() as s:
            adapter_rows.create(s, adapter, first)
        return first.uid

    def promote(self, record: VersionRecord) -> None:
        with self.database.transaction() as s:
            adapter_rows.add_version(s, record)
            epoch = adapter_rows.get(s, CODE).epoch
            adapter_rows.promote(
                s, CODE, record.uid, expected_epoch=epoch, actor="test", reason="test", now_s=time.time()
            )

    def active(self) -> str | None:
        pair = self.site.replica.residency.pairs.get(CODE)
        return None if pair is None else pair.active.uid


@pytest.fixture
def fleet(make_site: "Callable[..., Site]", database: Database) -> Iterator[Fleet]:
    made = Fleet(make_site(governed=True, bare=True), database)
    yield made
    made.governor.stop(10)


def test_a_replica_loads_what_is_in_force_and_beats(fleet: Fleet) -> None:
    first = fleet.create()
    assert not fleet.site.replica.ready
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)
    assert fleet.active() == first
    until(lambda: _beat(fleet) and _beat(fleet)[0].active_uids == {"code": first})
    beat = _beat(fleet)[0]
    assert (beat.ready, beat.active, beat.resident, beat.running) == (True, {"code": "1"}, ("code:1",), 0)


def test_a_promotion_arrives_by_itself_and_a_roll_back_too(fleet: Fleet) -> None:
    first = fleet.create()
    fleet.governor.start()
    until(lambda: fleet.active() == first)
    second = fleet.record(fleet.site.fresh(22), 2)
    fleet.promote(second)
    until(lambda: fleet.active() == second.uid, 5)
    with fleet.database.transaction() as s:
        adapter_rows.roll_back(s, CODE, expected_epoch=Epoch(2), actor="test", reason="test", now_s=0.0)
    until(lambda: fleet.active() == first, 5)


def test_modes_and_shares_are_obeyed(fleet: Fleet) -> None:
    fleet.create()
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)
    with fleet.database.transaction() as s:
        adapter_rows.set_mode(s, CODE, training=False, publishing=Publishing.OFF, actor="test", now_s=0.0)
        epoch = control.take_leadership(s, "leader")
        control.write_decision(
            s, leader_epoch=epoch, at_s=0.0, weights={}, train_shares={ReplicaId("r-7"): 0.25}, reason="test"
        )
    background = fleet.site.replica.background
    until(lambda: background.directives.train_share == 0.25, 5)
    until(lambda: background.directives.mode(CODE) == Mode(training=False, publishing=Publishing.OFF), 5)


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_active(fleet: Fleet) -> None:
    first = fleet.create()
    fleet.governor.start()
    until(lambda: fleet.active() == first)
    broken = fleet.record(fleet.site.fresh(23), 2, key="versions/" + "0" * 64)
    fleet.promote(broken)
    until(lambda: fleet.governor.troubles)
    assert fleet.active() == first
    assert fleet.site.replica.ready
    fleet.promote(fleet.record(fleet.site.fresh(24), 3))
    until(lambda: fleet.active() not in (None, first), 5)
    until(lambda: not fleet.governor.troubles)


def test_an_adapter_that_cannot_be_loaded_keeps_no_other_from_its_callers(fleet: Fleet) -> None:
    fleet.create(name=AdapterName("broken"), seed=26, key="versions/" + "0" * 64)
    fleet.governor.start()
    until(lambda: fleet.governor.troubles)
    assert not fleet.site.replica.ready, "it has nothing to serve"
    first = fleet.create()
    until(lambda: fleet.site.replica.ready)
    assert fleet.active() == first
    assert fleet.governor.troubles.keys() == {"broken"}


@pytest.mark.parametrize(
    "error", [MemoryError("planted"), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=["ours", "torch"]
)
def test_a_version_for_which_there_is_no_memory_keeps_no_other_from_its_callers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    load, large = fleet.site.loader.version, AdapterName("a-large-one")

    def version(adapter: AdapterName, uid: VersionUid, key: str) -> LoraWeights:
        if adapter == large:
            raise error
        return load(adapter, uid, key)

    monkeypatch.setattr(fleet.site.loader, "version", version)
    fleet.create(name=large, seed=26)
    first = fleet.create()
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)
    assert fleet.active() == first
    assert fleet.governor.troubles.keys() == {large}
    until(lambda: _beat(fleet))
    monkeypatch.undo()
    until(lambda: large in fleet.site.replica.residency.pairs)


def test_more_adapters_than_places_are_all_served(fleet: Fleet) -> None:
    names = [AdapterName(f"adapter-{i}") for i in range(9)]
    first = {name: fleet.create(name=name, seed=30 + i) for i, name in enumerate(names)}
    assert len(names) > 2 * fleet.site.engine.shape.places
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)

    async def ask(name: str) -> str:
        async with fleet.site.http() as http:
            body = {"inputs": "q", "parameters": {"max_new_tokens": 4, "adapter_id": name}}
            answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-adapter-uid"]

    async def ask_all() -> None:
        for name in [*names, *reversed(names)]:
            assert await ask(name) == first[name]

    asyncio.run(ask_all())
    until(lambda: _beat(fleet) and _beat(fleet)[0].active.keys() == set(names))
    assert 0 < len(_beat(fleet)[0].resident) <= fleet.site.engine.shape.places


def test_an_adapter_too_many_keeps_no_other_from_its_callers(
    make_site: "Callable[..., Site]", database: Database
) -> None:
    fleet = Fleet(make_site(governed=True, bare=True, adapters=2), database)
    names = [AdapterName(name) for name in ("a", "b", "c")]
    for seed, name in enumerate(names, start=40):
        fleet.create(name=name, seed=seed)
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)
    assert fleet.site.replica.residency.pairs.keys() == {"a", "b"}
    assert "NoRoom" in fleet.governor.troubles[names[2]]
    until(lambda: not fleet.governor._loads)  # weights that nobody takes would pile up beside the budget
    fleet.governor.stop(10)


def test_a_slow_store_does_not_make_the_replica_look_dead(fleet: Fleet) -> None:
    first, gate = fleet.create(), threading.Event()
    fleet.governor.start()
    until(lambda: fleet.active() == first)
    second = fleet.record(fleet.site.fresh(25), 2)
    fleet.site.loader.submit(lambda: gate.wait(20))
    fleet.promote(second)
    asked_s = time.time()
    until(lambda: _beat(fleet)[0].at_s > asked_s + 3)
    assert fleet.active() == first
    gate.set()
    until(lambda: fleet.active() == second.uid, 5)


def test_adapters_of_another_backbone_are_left_alone(fleet: Fleet) -> None:
    fleet.create(backbone="f" * 64)
    fleet.governor.start()
    until(lambda: fleet.site.replica.ready)
    assert fleet.active() is None


def test_while_the_database_is_away_the_replica_serves_on(make_site: "Callable[..., Site]") -> None:
    site = make_site(governed=True)
    away = Database("postgresql+psycopg://nobody@127.0.0.1:1/none", timeout_s=0.5)
    governor = Governor(site.replica, site.loader, away, url="http://r-7:1", has_shard=False)
    site.replica.inbox.call(lambda: site.replica.direct(site.replica.background.directives)).result(5)
    governor.start()
    time.sleep(1.5)
    assert site.replica.ready
    assert site.replica.residency.pairs.keys() == {CODE}
    governor.stop(5)
    assert not governor.is_alive()


def test_a_replica_that_stops_is_forgotten(fleet: Fleet) -> None:
    fleet.create()
    fleet.governor.start()
    until(lambda: _beat(fleet))
    fleet.governor.stop(10)
    with fleet.database.transaction() as s:
        assert replicas.every(s) == []


def _beat(fleet: Fleet) -> list[Heartbeat]:
    with fleet.database.transaction() as s:
        return [beat for _, beat in replicas.every(s) if beat is not None]
