"""A federated round from plan to decision, on a real Prefect server and a real Postgres."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from db import adapters, replicas, rounds
from db.records import (
    AdapterName,
    AdapterRecord,
    ClientId,
    Epoch,
    Publishing,
    RoundId,
    RoundState,
    Split,
    VersionState,
    VersionUid,
)
from flows import clients
from flows.journal import Journal, PrefectJournal, SilentJournal, quietly
from flows.moves import age, begin
from flows.outbox import project
from flows.pace import watched
from flows.plan import fixed_size
from flows.rounds import Outcome, run_round
from flows.worker import sweep_once
from infra.errors import CollmError, StepFailed, UnknownVersion

if TYPE_CHECKING:
    from tests.integration.flows.conftest import World

CODE = AdapterName("code")
# Prefect's client leaves connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


async def run(world: "World", journal: Journal | None = None) -> Outcome:
    """One flow run, as the worker would make it."""

    @flow(name="federated-round")
    async def federated_round() -> dict[str, Outcome]:
        shown = journal or PrefectJournal(CODE, mlflow_url="http://127.0.0.1:5000")
        async with world.site() as site:
            return {"outcome": await run_round(site, shown, CODE)}

    return (await federated_round())["outcome"]


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what happens in a server's thread."""
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 - the other side has no event loop of ours
            await asyncio.sleep(0.02)


def record(world: "World") -> AdapterRecord:
    with world.database.transaction() as s:
        return adapters.get(s, CODE)


async def test_a_round_that_helps_is_promoted_everywhere(world: "World") -> None:
    outcome = await run(world)

    done = outcome.round
    assert done is not None
    assert done.state is RoundState.PROMOTED, outcome.note
    assert done.clients == ("replica-0", "replica-1")
    assert done.aggregation_error == 0
    assert done.ce_before is not None
    assert done.ce_after is not None
    assert done.ce_after < done.ce_before
    assert done.decided_s is not None
    assert done.served_s is not None

    now = record(world)
    assert now.desired_uid == done.candidate_uid
    assert now.previous_uid == now.initial_uid
    assert now.epoch == 2
    with world.database.transaction() as s:
        version = adapters.version(s, now.desired_uid)
        updates = rounds.updates(s, done.id)
        scored = rounds.qualities(s, version.uid)
    assert (version.number, version.state, version.parent_uid) == (2, VersionState.PROMOTED, now.initial_uid)
    assert [u.accepted for u in updates] == [True, True]
    assert {(q.client_id, q.split) for q in scored} == {("replica-0", Split.GATE), ("replica-1", Split.GATE)}
    assert all(client.staged[0].uid == version.uid for client in world.clients.values())

    project(world.database, lambda: world.registry)
    aliases = {alias: number for (_, alias), number in world.memory.aliases.items()}
    assert aliases == {"active": 2, "previous": 1}
    tags = world.memory.versions[CODE][1].tags
    assert tags["decision"] == "promoted"
    assert tags["round"] == done.id
    assert tags["parent"] == now.initial_uid
    assert float(tags["ce_after"]) < float(tags["ce_before"])


async def test_prefect_shows_progress_clients_decision_and_the_version(world: "World") -> None:
    outcome = await run(world)
    assert outcome.round is not None
    async with get_client() as client:
        run_id = outcome.round.flow_run_id
        assert run_id is not None
        shown = await client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        )
    by_key = {artifact.key: artifact for artifact in shown}
    assert set(by_key) == {"code-round-progress", "code-round-clients", "code-round-decision", "code-round-version"}
    assert by_key["code-round-progress"].data == 100
    assert "collm.code/versions/2" in str(by_key["code-round-version"].data)
    assert "promoted" in str(by_key["code-round-decision"].data)
    assert "replica-1" in str(by_key["code-round-clients"].data)


async def test_the_next_round_builds_on_the_last_and_scores_its_base_only_once(world: "World") -> None:
    first = (await run(world)).round
    second = (await run(world)).round
    assert first is not None
    assert second is not None
    assert second.number == 2
    assert second.base_uid == first.candidate_uid
    # Factor A's turn: it changes nothing that these clients' score sees, so the gate sees no gain.
    assert second.state is RoundState.REJECTED
    assert "no sure gain" in second.reason
    for client in world.clients.values():
        assert client.scored.count(first.candidate_uid or "") == 1
        assert client.stopped == [second.id], "a rejected round's shadow is dropped"
    with world.database.transaction() as s:
        assert second.candidate_uid is not None
        assert adapters.version(s, second.candidate_uid).state is VersionState.REJECTED
    assert record(world).desired_uid == first.candidate_uid


async def test_a_score_of_another_type_is_not_reused(world: "World") -> None:
    await run(world)
    base = record(world).desired_uid
    world.clients["replica-0"].dtype = "bfloat16"
    await run(world)
    assert [client.scored.count(base) for client in world.clients.values()] == [2, 1]


async def test_a_worse_update_is_rejected_and_the_active_version_stays(world: "World") -> None:
    for client in world.clients.values():
        client.steps = -0.5
    before = record(world)
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.REJECTED
    assert "gate CE worse for replica-0" in outcome.note
    assert record(world) == before
    project(world.database, lambda: world.registry)
    assert world.memory.aliases == {(CODE, "active"): 1}
    assert world.memory.versions[CODE][1].tags["decision"] == "rejected"


@pytest.mark.parametrize(
    ("unscorable", "nll", "said"),
    [
        (None, float("nan"), "replica-1: a score is not finite"),
        (StepFailed("overflow"), None, "replica-1 cannot score"),
    ],
    ids=["nan", "failed"],
)
async def test_a_candidate_that_one_client_cannot_score_is_rejected_whatever_the_others_say(
    world: "World", unscorable: CollmError | None, nll: float | None, said: str
) -> None:
    world.clients["replica-1"].unscorable, world.clients["replica-1"].nll = unscorable, nll
    before = record(world)
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.REJECTED, outcome.note
    assert said in outcome.note
    assert record(world) == before


async def test_a_score_that_takes_too_long_is_not_taken_for_a_client_that_is_away(world: "World") -> None:
    world.settings = world.settings.model_copy(
        update={"rounds": world.settings.rounds.model_copy(update={"score_timeout_s": 1.0, "lost_after_s": 60.0})}
    )
    world.clients["replica-1"].score_s = 3.0
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.ABORTED, outcome.note
    assert outcome.note.endswith("replica-1 did not score version 2 within 1 s")


async def test_an_artifact_that_takes_too_long_is_left_out() -> None:
    assert await quietly(asyncio.sleep(60, result=True), within_s=0.01) is None


async def test_too_few_scores_decide_nothing(world: "World") -> None:
    world.clients["replica-1"].unscorable = CollmError("no disk")
    before = record(world)
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.ABORTED, outcome.note
    assert "1 of 2 clients scored the candidate, 2 are needed; not scored: replica-1;" in outcome.note
    assert record(world) == before


async def test_a_client_that_dies_mid_round_is_left_out(world: "World") -> None:
    world.clients["replica-1"].hang = True

    async def die() -> None:
        await until(lambda: len(world.clients["replica-1"].asked) == 1)
        await asyncio.to_thread(world.kill_client, "replica-1")

    outcome, _ = await asyncio.gather(run(world), die())
    assert outcome.round is not None
    assert outcome.round.state is RoundState.PROMOTED, outcome.note
    with world.database.transaction() as s:
        assert [u.client_id for u in rounds.updates(s, outcome.round.id)] == ["replica-0"]


async def test_a_round_without_enough_clients_left_ends_aborted_with_the_reason(world: "World") -> None:
    world.settings = world.settings.model_copy(
        update={"rounds": world.settings.rounds.model_copy(update={"min_clients": 2})}
    )
    world.clients["replica-1"].fails = "loss is not finite"
    before = record(world)
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.ABORTED
    assert outcome.note == ("1 of 2 clients returned an update, 2 are needed (replica-1: loss is not finite)")
    assert record(world) == before
    assert world.clients["replica-0"].stopped == [outcome.round.id]


async def test_a_client_that_is_late_is_stopped_and_left_out(world: "World") -> None:
    world.settings = world.settings.model_copy(
        update={"rounds": world.settings.rounds.model_copy(update={"deadline_s": 4.0})}
    )
    world.clients["replica-0"].hang = True
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.PROMOTED, outcome.note
    assert world.clients["replica-0"].stopped == [outcome.round.id]


def nan(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = min(tensors)
    return {**tensors, name: np.full_like(tensors[name], np.nan)}


def short(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = min(tensors)
    return {**tensors, name: tensors[name][:, :-1].copy()}


def lacking(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if name != min(tensors)}


def huge(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor + np.float32(1e6) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(nan, "is not finite"), (short, "has shape"), (lacking, "tensors missing"), (huge, "norm")],
    ids=["nan", "shape", "missing", "norm"],
)
async def test_a_bad_update_is_refused_and_named_and_the_round_goes_on(
    world: "World", spoil: object, said: str
) -> None:
    world.clients["replica-1"].spoil = spoil  # type: ignore[assignment]
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.PROMOTED, outcome.note
    with world.database.transaction() as s:
        good, bad = rounds.updates(s, outcome.round.id)
    assert (good.accepted, good.reason) == (True, "")
    assert bad.accepted is False
    assert said in bad.reason


async def test_an_update_from_another_base_is_refused(world: "World") -> None:
    for client in world.clients.values():
        client.descends_from = "f" * 64
    before = record(world)
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.ABORTED
    assert "replica-0: it descends from ffffffffffff" in outcome.note
    assert record(world) == before


async def test_a_paused_adapter_starts_nothing(world: "World") -> None:
    with world.database.transaction() as s:
        adapters.set_mode(s, CODE, training=False, publishing=Publishing.OFF, actor="test", now_s=0)
    outcome = await run(world)
    assert outcome.round is None
    assert outcome.note.startswith("paused")
    with world.database.transaction() as s:
        assert rounds.latest(s, CODE) is None
    assert not any(client.asked for client in world.clients.values())


async def test_a_round_under_way_waits_for_a_pause_to_end(world: "World") -> None:
    for client in world.clients.values():
        client.seconds = 1.5
    asked = world.clients["replica-0"].asked

    async def pause() -> None:
        await until(lambda: len(asked) == 1)
        set_training(world, on=False)
        await asyncio.sleep(4)
        assert all(not client.scored for client in world.clients.values()), "nothing is scored while paused"
        set_training(world, on=True)

    outcome, _ = await asyncio.gather(run(world), pause())
    assert outcome.round is not None
    assert outcome.round.state is RoundState.PROMOTED, outcome.note


def set_training(world: "World", *, on: bool) -> None:
    with world.database.transaction() as s:
        adapters.set_mode(s, CODE, training=on, publishing=Publishing.GUARDED, actor="test", now_s=0)


async def test_a_round_whose_base_is_replaced_ends_aborted(world: "World") -> None:
    first = await run(world)
    assert first.round is not None
    world.clients["replica-0"].hang = True

    async def roll_back() -> None:
        await until(lambda: len(world.clients["replica-0"].asked) == 2)
        with world.database.transaction() as s:
            adapters.roll_back(s, CODE, expected_epoch=Epoch(2), actor="person", reason="no", now_s=0)

    outcome, _ = await asyncio.gather(run(world), roll_back())
    assert outcome.round is not None
    assert outcome.round.state is RoundState.ABORTED
    assert "came into force" in outcome.note
    assert record(world).desired_uid == record(world).initial_uid


async def test_the_clients_of_a_round_that_failed_are_stopped_before_people_are_told(world: "World") -> None:
    for client in world.clients.values():
        client.steps = -0.5
    stopped: list[list[str]] = []

    class Slow(SilentJournal):
        async def progress(self, percent: float, text: str) -> None:
            if percent == 100:
                stopped.extend(client.stopped.copy() for client in world.clients.values())

    outcome = await run(world, Slow())
    assert outcome.round is not None
    assert outcome.round.state is RoundState.REJECTED
    assert stopped == [[outcome.round.id]] * 2


async def test_what_a_killed_worker_left_in_force_is_stopped_by_the_next_round(world: "World") -> None:
    for client in world.clients.values():
        client.steps = -0.5
    first = (await run(world)).round
    assert first is not None
    for client in world.clients.values():
        client.stopped.clear()
        client.steps = 0.3
    second = (await run(world)).round
    assert second is not None
    assert second.state is RoundState.PROMOTED
    assert [client.stopped for client in world.clients.values()] == [[first.id]] * 2


async def test_a_round_that_another_run_has_taken_is_left_to_it(world: "World") -> None:
    for client in world.clients.values():
        client.seconds = 1.5

    async def take() -> None:
        await until(lambda: len(world.clients["replica-0"].asked) == 1)
        with world.database.transaction() as s:
            there = rounds.latest(s, CODE)
            assert there is not None
            rounds.advance(s, there.id, expected=RoundState.TRAINING, to=RoundState.EVALUATING)

    outcome, _ = await asyncio.gather(run(world), take())
    assert outcome.round is None
    assert "another run has it" in outcome.note
    with world.database.transaction() as s:
        there = rounds.latest(s, CODE)
    assert there is not None
    assert there.state is RoundState.EVALUATING
    assert not any(client.stopped for client in world.clients.values())


async def test_an_update_that_is_recorded_is_not_asked_for_again(world: "World") -> None:
    world.clients["replica-1"].hang = True

    async def cut() -> None:
        def recorded() -> bool:
            with world.database.transaction() as s:
                there = rounds.latest(s, CODE)
                return there is not None and len(rounds.updates(s, there.id)) == 1

        await until(recorded)
        with world.database.transaction() as s:
            there = rounds.latest(s, CODE)
        assert there is not None
        calls = world.clients["replica-0"].calls
        async with world.site() as site, watched(site, there) as pace:
            found = await clients.train(site, pace, there, ClientId("replica-0"), lambda *_: None)
        assert found.client_id == "replica-0"
        assert world.clients["replica-0"].calls == calls
        world.clients["replica-1"].hang = False

    outcome, _ = await asyncio.gather(run(world), cut())
    assert outcome.round is not None


async def test_a_replica_of_another_backbone_neither_gets_nor_delays_a_version(world: "World") -> None:
    client = world.clients["replica-1"]
    with world.database.transaction() as s:
        there = next(r for r, _ in replicas.every(s) if r.id == "replica-1")
        replicas.announce(s, replace(there, backbone="c" * 64))
    outcome = await run(world)
    assert outcome.round is not None
    assert outcome.round.state is RoundState.PROMOTED, outcome.note
    assert outcome.round.served_s is not None
    assert client.staged == []


async def test_a_pause_does_not_age_a_round(world: "World") -> None:
    outcome = await run(world)
    assert outcome.round is not None
    world.clients["replica-0"].hang = world.clients["replica-1"].hang = True
    old = replace(
        outcome.round,
        id=RoundId("code-old"),
        number=2,
        state=RoundState.TRAINING,
        base_uid=record(world).desired_uid,
        base_epoch=record(world).epoch,
        started_s=time.time() - 10_000,
    )
    with world.database.transaction() as s:
        rounds.open_round(s, old)
        for training, ago_s in ((False, 9_950), (True, 10)):
            adapters.set_mode(
                s, CODE, training=training, publishing=Publishing.GUARDED, actor="me", now_s=time.time() - ago_s
            )
    async with world.site() as site:
        assert await age(site, old) == pytest.approx(60, abs=5)
        resumed = await begin(site, record(world), None, fixed_size, flow_run_id=None)
    assert resumed.id == old.id


async def test_what_is_old_and_rejected_leaves_the_store(world: "World") -> None:
    for client in world.clients.values():
        client.steps = -0.5
    outcome = await run(world)
    assert outcome.round is not None
    with world.database.transaction() as s:
        gone, kept = (
            adapters.version(s, VersionUid(u)) for u in (outcome.round.candidate_uid or "", outcome.round.base_uid)
        )
    world.settings = world.settings.model_copy(
        update={"rounds": world.settings.rounds.model_copy(update={"retain_s": 0.001})}
    )
    async with world.site() as site:
        await sweep_once(site)
    assert world.store.get(kept.store_key, max_bytes=1 << 20)
    with pytest.raises(UnknownVersion):
        world.store.get(gone.store_key, max_bytes=1 << 20)


async def test_two_runs_at_once_never_double_a_round(world: "World") -> None:
    world.clients["replica-0"].seconds = 1.5
    one, two = await asyncio.gather(run(world), run(world))
    assert sorted(o.round is None for o in (one, two)) == [False, True]
    idle = one if one.round is None else two
    assert "another run works" in idle.note
    with world.database.transaction() as s:
        assert len(rounds.of_adapter(s, CODE)) == 1
