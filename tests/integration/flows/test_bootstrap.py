"""The adapter's first version, the registry's aliases, and the commands that people use."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

from adapters.memory import MemoryStore, MemoryUpdateStore
from adapters.model import LoraWeights
from adapters.ports import Registered
from adapters.weights import from_bytes, manifest, version_uid
from db import adapters
from db.locks import try_lock
from db.records import AdapterName, AdapterRecord, Epoch, Publishing, VersionState, VersionUid
from db.session import Database
from db.tables import OutboxRow
from flows import control, status
from flows.bootstrap import Backbone, bootstrap
from flows.bootstrap import main as first_version
from flows.demo_schedule import RoundSchedule
from flows.outbox import moved_aliases, project
from infra.clock import ManualClock
from infra.errors import ConfigError, RegistryUnavailable, UnknownVersion
from infra.settings import RoundSettings, Settings

if TYPE_CHECKING:
    from tests.integration.flows.conftest import World

CODE = AdapterName("code")
BACKBONE = Backbone(name="tiny", sha256="b" * 64, shapes={"model.layers.0.self_attn.q_proj": (4, 6)})
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


class Failing(MemoryStore):
    """A registry that is away for its next calls of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""

    def register(
        self,
        adapter: AdapterName,
        uid: VersionUid,
        weights: LoraWeights,
        *,
        base_model: str,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> Registered:
        made = super().register(adapter, uid, weights, base_model=base_model, tags=tags, metrics=metrics)
        if self.broken == "after register":
            raise RegistryUnavailable
        return made

    def set_alias(self, adapter: AdapterName, alias: str, number: int | None) -> None:
        if self.broken == "alias":
            raise RegistryUnavailable
        super().set_alias(adapter, alias, number)


def run(database: Database, store: MemoryUpdateStore, registry: MemoryStore, **changes: object) -> AdapterRecord:
    settings = Settings(rounds=RoundSettings.model_validate({"rank": 2, "alpha": 4.0, **changes}))
    return bootstrap(settings, BACKBONE, database=database, store=store, registry=lambda: registry, clock=ManualClock())


def test_the_first_version_changes_nothing_and_is_registered_and_in_force(database: Database) -> None:
    store, registry = MemoryUpdateStore(), MemoryStore()
    record = run(database, store, registry)

    assert (record.spec.rank, record.spec.alpha, record.spec.targets) == (2, 4.0, ("q_proj",))
    assert record.initial_uid == record.desired_uid
    assert (record.training, record.publishing, record.epoch) == (True, Publishing.GUARDED, 1)
    with database.transaction() as s:
        first = adapters.version(s, record.initial_uid)
    assert first.number == 1
    weights = from_bytes(
        store.get(first.store_key, max_bytes=1 << 20), record.spec, manifest(BACKBONE.shapes, record.spec)
    )
    assert version_uid(BACKBONE.sha256, weights) == record.initial_uid
    assert all((t == 0).all() for name, t in weights.tensors.items() if "lora_B" in name)
    assert all((t != 0).any() for name, t in weights.tensors.items() if "lora_A" in name)
    assert registry.aliases == {(CODE, "active"): 1}


@pytest.mark.parametrize("broken", ["after register", "alias"])
def test_a_bootstrap_that_broke_off_is_finished_by_the_next(database: Database, broken: str) -> None:
    store, registry = MemoryUpdateStore(), Failing()
    registry.broken = broken
    with pytest.raises(RegistryUnavailable):
        run(database, store, registry)
    registry.broken = ""
    first = run(database, store, registry)
    assert run(database, store, registry) == first
    assert len(registry.versions[CODE]) == 1
    assert registry.aliases == {(CODE, "active"): 1}


def test_a_store_that_lost_the_first_version_gets_it_back(database: Database) -> None:
    registry = MemoryStore()
    record = run(database, MemoryUpdateStore(), registry)
    store = MemoryUpdateStore()
    run(database, store, registry)
    with database.transaction() as s:
        assert store.get(adapters.version(s, record.initial_uid).store_key, max_bytes=1 << 20)


def test_an_adapter_of_another_backbone_or_shape_is_refused_and_the_setting_named(database: Database) -> None:
    store, registry = MemoryUpdateStore(), MemoryStore()
    run(database, store, registry)
    with pytest.raises(ConfigError, match=r"COLLM_ROUNDS__RANK.*has rank 2"):
        run(database, store, registry, rank=3)
    other = Backbone(name="other", sha256="c" * 64, shapes=BACKBONE.shapes)
    with pytest.raises(ConfigError, match="COLLM_MODEL__NAME"):
        bootstrap(
            Settings(rounds=RoundSettings(rank=2, alpha=4.0)),
            other,
            database=database,
            store=store,
            registry=lambda: registry,
            clock=ManualClock(),
        )


def test_the_outbox_goes_on_where_the_registry_was_away_and_past_what_a_person_deleted(database: Database) -> None:
    store, registry = MemoryUpdateStore(), Failing()
    registry.broken = "alias"
    with pytest.raises(RegistryUnavailable):
        run(database, store, registry)
    with database.transaction() as s:
        assert len(adapters.pending_outbox(s, 10)) == 1
    registry.versions[CODE].clear()
    registry.broken = ""
    assert project(database, lambda: registry) == 1
    assert project(database, lambda: registry) == 0
    assert registry.aliases == {}


def test_an_alias_that_a_person_moved_is_noticed(database: Database) -> None:
    store, registry = MemoryUpdateStore(), MemoryStore()
    run(database, store, registry)
    assert moved_aliases(database, registry) == {}
    registry.set_alias(CODE, "active", None)
    assert moved_aliases(database, registry) == {(CODE, "active"): None}


def test_status_shows_everything_or_says_that_nothing_runs(
    world: "World", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in world.environ().items():
        if name.startswith("COLLM_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")
    assert status.main([]) == 0
    shown = capsys.readouterr().out
    for expected in ("replica-0", "ready", "code 1", "code", "promoted", world.adapter.initial_uid[:12], "rounds"):
        assert expected in shown

    monkeypatch.setenv("COLLM_DATABASE_URL", "postgresql+psycopg://postgres@127.0.0.1:1/collm")
    assert status.main([]) == 1
    assert "does not answer" in capsys.readouterr().err

    monkeypatch.delenv("COLLM_DATABASE_URL")
    monkeypatch.setenv("COLLM_STATE_DIR", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="no cluster runs"):
        status.main([])


async def test_pausing_and_resuming_reach_postgres_and_the_schedule(world: "World") -> None:
    from flows.rounds import federated_round

    deployment = await federated_round.ato_deployment(name=CODE, interval=3600, parameters={"adapter": CODE})
    deployment_id = await deployment.aapply()
    switch = control.Switch(settings=world.settings, database=world.database, clock=ManualClock())

    for on in (False, True):
        await switch.set(CODE, training=on, actor="test")
        with world.database.transaction() as s:
            assert adapters.get(s, CODE).training is on
        async with get_client() as client:
            assert (await client.read_deployment(deployment_id)).paused is not on

    run_id = await control.start_round(world.settings, CODE)
    async with get_client() as client:
        run = await client.read_flow_run(run_id)  # type: ignore[arg-type]
    assert run.deployment_id == deployment_id


async def test_the_demo_sizes_the_rounds_of_a_real_schedule(world: "World") -> None:
    from flows.rounds import federated_round

    deployment = await federated_round.ato_deployment(name=CODE, interval=3600, parameters={"adapter": CODE})
    deployment_id = await deployment.aapply()
    mine = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))
    async with get_client() as client, RoundSchedule(world.settings.prefect_api_url) as schedule:
        before = {run.id for run in await client.read_flow_runs(deployment_filter=mine)}
        await schedule.set_tokens(700)
        await schedule.resume()
        found = await client.read_deployment(deployment_id)
        runs = [run for run in await client.read_flow_runs(deployment_filter=mine) if run.id not in before]
    assert found.parameters == {"adapter": CODE, "tokens": 700}
    assert [schedule.active for schedule in found.schedules] == [True]
    assert runs
    assert {run.parameters["tokens"] for run in runs} == {700}


def test_two_projections_at_once_keep_the_order(database: Database) -> None:
    store, registry = MemoryUpdateStore(), Failing()
    registry.broken = "alias"
    with pytest.raises(RegistryUnavailable):
        run(database, store, registry)
    registry.broken = ""
    with try_lock(database.url, "outbox") as mine:
        assert mine
        assert project(database, lambda: registry) == 0
    assert project(database, lambda: registry) == 1


def test_a_version_that_a_person_deleted_costs_its_tags_and_not_the_alias(database: Database) -> None:
    registry = MemoryStore()
    record = run(database, MemoryUpdateStore(), registry)
    tagged = OutboxRow(adapter=CODE, alias="active", number=None, tagged=9, tags={"a": "b"}, created_s=0, done=False)
    with database.transaction() as s:
        s.add(tagged)
    assert record.epoch == 1
    assert project(database, lambda: registry) == 1
    assert registry.aliases == {}


def set_environ(monkeypatch: pytest.MonkeyPatch, world: "World", **changes: str) -> None:
    for name, value in {**world.environ(), **changes}.items():
        if name.startswith("COLLM_"):
            monkeypatch.setenv(name, value)


def test_a_version_is_rolled_back_by_hand(
    world: "World", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, world)
    with pytest.raises(UnknownVersion, match="no previous version"):
        control.main(["rollback"])
    with world.database.transaction() as s:
        first = adapters.version(s, world.adapter.initial_uid)
        second = replace(first, uid=VersionUid("2"), number=2, parent_uid=first.uid, state=VersionState.CANDIDATE)
        adapters.add_version(s, second)
        adapters.promote(s, CODE, second.uid, expected_epoch=Epoch(1), actor="gate", reason="", now_s=0)
    assert control.main(["rollback", "--reason", "it swears"]) == 0
    assert "version 1 is in force again (epoch 3), 2 is rejected" in capsys.readouterr().out
    with world.database.transaction() as s:
        assert adapters.get(s, CODE).desired_uid == first.uid
        assert adapters.audit(s, 1)[0].detail["reason"] == "it swears"


def test_servers_that_are_away_cost_one_line(
    world: "World", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, world, COLLM_PREFECT_API_URL="http://127.0.0.1:1/api")
    assert control.main(["run"]) == 1
    assert capsys.readouterr().err.startswith("Prefect does not answer at http://127.0.0.1:1/api: ")
    assert control.main(["pause"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "training of code is paused"
    assert [line.startswith("Prefect does not answer at ") for line in said] == [False, True]
    with world.database.transaction() as s:
        assert not adapters.get(s, CODE).training

    away = "postgresql+psycopg://postgres@127.0.0.1:1/collm"
    set_environ(monkeypatch, world, COLLM_DATABASE_URL=away, COLLM_REPLICA__FAKE_ENGINE="true")
    for command, arguments in ((control.main, ["pause"]), (control.main, ["rollback"]), (first_version, [])):
        assert command(arguments) == 1
        assert capsys.readouterr().err.startswith("the database does not answer: ")
