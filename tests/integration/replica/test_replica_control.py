"""The control API of a replica: versions, rounds, scores."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from adapters import weights as codec
from adapters.model import LoraWeights
from db.records import AdapterName, Factor, Publishing
from infra.errors import (
    IncompatibleAdapter,
    InvalidRequest,
    NoPlace,
    Unauthorized,
    UnknownAdapter,
    UnknownVersion,
    VersionConflict,
)
from serving.client import HttpReplicaClient
from serving.replica import control_api
from serving.replica.background import Directives, Mode
from serving.replica.checkpoints import Checkpoints
from serving.replica.fake_engine import FakeEngine, expected_tokens, fake_loss, fake_tokens
from serving.replica.history import violations
from serving.rows import Row, set_sha256
from serving.wire.control import (
    ActivateBody,
    RollbackBody,
    RoundBody,
    RoundStatus,
    RowBody,
    ScoreBody,
    StageBody,
    VersionBody,
)

if TYPE_CHECKING:
    from tests.integration.replica.conftest import Site

CODE = AdapterName("code")


async def staged(site: "Site", control: HttpReplicaClient, seed: int, number: int) -> VersionBody:
    uid = site.keep(site.fresh(seed))
    return await control.stage(StageBody(adapter="code", uid=uid, number=number, store_key=site.key(uid)))


async def active(control: HttpReplicaClient) -> VersionBody:
    return (await control.status()).active[0]


def round_body(base: VersionBody, round_id: str = "r1", **changes: Any) -> RoundBody:
    made = RoundBody(
        round_id=round_id,
        adapter="code",
        base_uid=base.uid,
        epoch=1,
        factor="B",
        tokens=300,
        rows_per_step=2,
        lr=2e-3,
        swap_every=2,
        seed=1,
        deadline_s=30,
    )
    return made.model_copy(update=changes)


async def ended(control: HttpReplicaClient, round_id: str = "r1") -> RoundStatus:
    for _ in range(1000):
        status = await control.round(round_id)
        if status.state != "running":
            return status
        await asyncio.sleep(0.01)
    raise AssertionError(f"still running: {status}")


async def test_a_version_is_staged_then_active_then_previous(site: "Site", control: HttpReplicaClient) -> None:
    first = await active(control)
    second = await staged(site, control, 1, 2)
    assert second.state == "staged"
    assert await active(control) == first
    flipped = await control.activate(ActivateBody(adapter="code", uid=second.uid, epoch=2))
    assert flipped == second.model_copy(update={"state": "active"})
    assert await control.activate(ActivateBody(adapter="code", uid=second.uid, epoch=2)) == flipped, "again: no change"
    async with site.http() as http:
        parameters = {"max_new_tokens": 6, "details": True}
        answer = await http.post("/generate", json={"inputs": "q", "parameters": parameters})
    assert answer.headers["x-adapter-uid"] == second.uid
    tokens = [t["id"] for t in answer.json()["details"]["tokens"]]
    assert tokens == expected_tokens(b"q", site.weights[second.uid], 6)
    back = await control.roll_back(RollbackBody(adapter="code"))
    assert (back.uid, back.state) == (first.uid, "active")
    status = await control.status()
    assert [s.kind for s in status.swaps] == ["federated", "federated", "rollback"]
    assert status.swaps_total == 3
    assert all(s.pause_ms >= 0 and s.delay_ms >= 0 for s in status.swaps)


async def test_a_stale_activation_is_refused(site: "Site", control: HttpReplicaClient) -> None:
    first, second = await active(control), await staged(site, control, 1, 2)
    with pytest.raises(VersionConflict):
        await control.activate(ActivateBody(adapter="code", uid=second.uid, epoch=1))
    with pytest.raises(UnknownVersion):
        await control.activate(ActivateBody(adapter="code", uid="never-staged", epoch=2))
    with pytest.raises(UnknownAdapter):
        await control.roll_back(RollbackBody(adapter="nope"))
    with pytest.raises(UnknownVersion):
        await control.roll_back(RollbackBody(adapter="code"))
    assert await active(control) == first


def wrong_shape(site: "Site") -> bytes:
    good = site.fresh(5)
    name = min(good.tensors)
    return codec.to_bytes(replace(good, tensors={**good.tensors, name: np.zeros((3, 3), np.float32)}))


def missing_key(site: "Site") -> bytes:
    good = site.fresh(5)
    name = min(good.tensors)
    return codec.to_bytes(replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}))


def not_a_number(site: "Site") -> bytes:
    good = site.fresh(5)
    name = min(good.tensors)
    return codec.to_bytes(replace(good, tensors={**good.tensors, name: np.full_like(good.tensors[name], np.nan)}))


def a_pickle(site: "Site") -> bytes:
    return b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07nothing\x94."


def another_rank(site: "Site") -> bytes:
    return codec.to_bytes(codec.initial(site.shapes, replace(site.spec, rank=4), 5))


@pytest.mark.parametrize("make", [wrong_shape, missing_key, not_a_number, a_pickle, another_rank])
async def test_a_bad_file_is_rejected_and_harms_nothing(
    site: "Site", control: HttpReplicaClient, make: Callable[["Site"], bytes]
) -> None:
    before = await control.status()
    key = site.store.put("versions", make(site))
    with pytest.raises(IncompatibleAdapter):
        await control.stage(StageBody(adapter="code", uid="any", number=2, store_key=key))
    after = await control.status()
    assert (after.active, after.resident) == (before.active, before.resident)


async def test_weights_of_another_backbone_or_uid_are_rejected(site: "Site", control: HttpReplicaClient) -> None:
    other: LoraWeights = site.fresh(5)
    key = site.store.put("versions", codec.to_bytes(other))
    for uid in (codec.version_uid("0" * 64, other), "claimed"):
        with pytest.raises(IncompatibleAdapter):
            await control.stage(StageBody(adapter="code", uid=uid, number=2, store_key=key))
    with pytest.raises(UnknownVersion):
        await control.stage(StageBody(adapter="code", uid="u", number=2, store_key="versions/" + "0" * 64))
    with pytest.raises(UnknownVersion):
        await control.stage(StageBody(adapter="code", uid="u", number=2, store_key="../../etc/passwd"))
    with pytest.raises(UnknownAdapter):
        await control.stage(StageBody(adapter="other", uid="u", number=2, store_key=key))


async def test_every_route_asks_for_the_token(site: "Site") -> None:
    async with HttpReplicaClient("http://replica", "wrong", transport=httpx.ASGITransport(site.app)) as flow:
        with pytest.raises(Unauthorized):
            await flow.status()
        with pytest.raises(Unauthorized):
            await flow.stop_round("r")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://replica") as stranger:
        for path in ("stage", "activate", "rollback", "rounds", "score"):
            assert (await stranger.post(f"/control/{path}", json={})).status_code == 401
        for path in ("", "generate", "generate_stream"):
            answer = await stranger.post(f"/{path}", json={"inputs": "x"})
            assert (answer.status_code, answer.json()["error_type"]) == (401, "unauthorized")
        for path in ("", "health", "ping", "info", "metrics"):
            assert (await stranger.get(f"/{path}")).status_code == 200


async def test_keys_of_local_versions_go_with_their_swaps(site: "Site", control: HttpReplicaClient) -> None:
    base = await active(control)

    async def archived() -> set[str]:
        return await site.desk.call(lambda r: set(r.background.archived))

    await control.start_round(round_body(base))
    await ended(control)
    first = await archived()
    assert first
    await control.stop_round("r1")
    await site.desk.call(lambda r: r.residency.swaps.clear())
    await control.start_round(round_body(base, "r2", seed=2))
    await ended(control, "r2")
    assert await archived()
    assert not await archived() & first


async def test_a_body_that_does_not_fit_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post("/control/activate", json={"adapter": "code"}, headers={"authorization": "Bearer secret"})
    assert answer.status_code == 422
    assert "uid" in answer.json()["error"]


async def test_a_round_trains_publishes_and_hands_in_its_update(site: "Site", control: HttpReplicaClient) -> None:
    base = await active(control)
    first = await control.start_round(round_body(base))
    assert first.state == "running"
    status = await ended(control)
    assert status.state == "done"
    assert status.base_uid == base.uid
    assert status.tokens >= 300
    assert status.loss_last is not None
    assert status.loss_first is not None
    assert status.loss_last < status.loss_first
    assert status.store_key is not None
    update = codec.read_update(
        site.store.get(status.store_key, max_bytes=10**6), base=site.weights[base.uid], factor=Factor.B, max_norm=100
    )
    assert update.keys() == set(codec.of_factor(site.weights[base.uid].tensors, Factor.B))
    assert await control.start_round(round_body(base)) == status, "the same round again changes nothing"
    await asyncio.sleep(0.1)
    replica = await control.status()
    local = [s for s in replica.swaps if s.kind == "local"]
    assert local[-1].label == f"1+{status.steps}"
    assert replica.active[0].label == local[-1].label
    assert replica.train_tokens_total == status.tokens
    key = local[-1].store_key
    assert key is not None
    archived = codec.from_bytes(site.store.get(key, max_bytes=10**6), site.spec, codec.manifest(site.shapes, site.spec))
    for name, tensor in update.items():
        np.testing.assert_array_equal(archived.tensors[name], tensor)


async def test_a_stopped_round_gives_way_to_its_base(site: "Site", control: HttpReplicaClient) -> None:
    base = await active(control)
    await control.start_round(round_body(base))
    await ended(control)
    assert (await control.stop_round("r1")).state == "done"
    assert await active(control) == base
    await control.start_round(round_body(base, "r2", tokens=10**6))
    assert (await control.stop_round("r2")).state == "stopped"
    assert (await control.round("r2")).state == "stopped"
    with pytest.raises(UnknownVersion):
        await control.round("r1")


async def steps(control: HttpReplicaClient, at_least: int) -> int:
    for _ in range(1000):
        status = await control.round("r1")
        if status.steps >= at_least:
            return status.steps
        await asyncio.sleep(0.005)
    raise AssertionError("it does not train")


async def test_a_restarted_replica_goes_on_with_its_round(
    make_site: Callable[..., "Site"], fake: FakeEngine, tmp_path: Path
) -> None:
    undisturbed = make_site()
    async with undisturbed.control() as control:
        await control.start_round(round_body(await active(control)))
        whole = await ended(control)
    undisturbed.stop()

    file = tmp_path / "x" / "round"

    def restart() -> "Site":
        return make_site(checkpoints=Checkpoints(file), checkpoint_s=0.001)

    fake.slice_s = 0.003
    first = restart()
    async with first.control() as control:
        await control.start_round(round_body(await active(control)))
        before = await steps(control, 3)
    first.stop()
    second = restart()
    async with second.control() as control:
        base = await active(control)
        with pytest.raises(UnknownVersion):
            await control.round("r1")
        resumed = await control.start_round(round_body(base))
        assert resumed.steps >= before - 1, "the last step may not have been written"
        assert resumed.loss_first == whole.loss_first
        status = await ended(control)
        assert status.sha256 == whole.sha256, "the same update, bit for bit"
        told = {"tokens", "steps", "loss_last", "state"}
        assert status.model_dump(include=told) == whole.model_dump(include=told)
        assert (await active(control)).label == f"1+{status.steps}"
    second.stop()
    third = restart()
    async with third.control() as control:
        base = await active(control)
        assert (await control.start_round(round_body(base, lr=1e-3))).steps == 0, "that is another task"
        await steps(control, 3)
        await control.stop_round("r1")
        await asyncio.wrap_future(third.loader.submit(lambda: None))
        assert not file.exists()
    third.stop()
    fourth = restart()
    async with fourth.control() as control:
        assert (await control.start_round(round_body(await active(control), lr=1e-3))).steps == 0, "it was stopped"


async def test_a_disk_that_is_full_does_not_end_the_round(make_site: Callable[..., "Site"], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    site = make_site(checkpoints=Checkpoints(tmp_path / "file" / "round"), checkpoint_s=0.001)
    async with site.control() as control:
        await control.start_round(round_body(await active(control)))
        assert (await ended(control)).state == "done"


async def test_a_promotion_ends_a_round_of_the_old_base(site: "Site", control: HttpReplicaClient) -> None:
    base = await active(control)
    await control.start_round(round_body(base, tokens=10**6))
    second = await staged(site, control, 1, 2)
    await control.activate(ActivateBody(adapter="code", uid=second.uid, epoch=2))
    status = await ended(control)
    assert (status.state, status.store_key) == ("failed", None)
    assert (await active(control)).uid == second.uid
    await asyncio.sleep(0.1)
    assert (await active(control)).uid == second.uid, "no child of the old base follows"
    with pytest.raises(VersionConflict):
        await control.start_round(round_body(base, "r2"))
    assert (await control.start_round(round_body(second, "r3", epoch=2))).state == "running"


async def test_after_a_roll_back_nothing_is_published_until_the_next_round(
    site: "Site", control: HttpReplicaClient
) -> None:
    base = await active(control)
    await control.start_round(round_body(base, tokens=10**6, swap_every=1))
    for _ in range(500):
        if (await control.status()).swaps_total >= 3:
            break
        await asyncio.sleep(0.01)
    await control.roll_back(RollbackBody(adapter="code"))
    after = await control.status()
    await asyncio.sleep(0.1)
    assert (await control.status()).swaps_total == after.swaps_total
    await control.start_round(round_body(base, "r2"))
    assert (await ended(control, "r2")).state == "done"
    assert (await control.status()).swaps_total > after.swaps_total


async def test_a_training_loss_that_is_not_finite_discards_the_shadow(
    site: "Site", control: HttpReplicaClient, fake: FakeEngine
) -> None:
    fake.nan_loss_at = 3
    base = await active(control)
    await control.start_round(round_body(base, swap_every=1))
    status = await ended(control)
    assert (status.state, status.store_key) == ("failed", None)
    assert "finite" in status.reason
    assert await active(control) == base, "what it had published gives way to the base"


async def test_a_round_past_its_deadline_fails(site: "Site", control: HttpReplicaClient) -> None:
    await control.start_round(round_body(await active(control), tokens=10**7, deadline_s=0.2))
    status = await ended(control)
    assert (status.state, status.reason) == ("failed", "the round's deadline has passed")


@pytest.mark.parametrize(
    "directives",
    [
        Directives(modes={CODE: Mode(training=False)}),
        Directives(train_share=0.0),
    ],
)
async def test_paused_training_keeps_its_state(
    site: "Site", control: HttpReplicaClient, directives: Directives
) -> None:
    await site.desk.call(lambda r: r.direct(directives))
    base = await active(control)
    await control.start_round(round_body(base))
    await asyncio.sleep(0.2)
    assert (await control.round("r1")).tokens == 0
    assert len((await control.score(ScoreBody(adapter="code", uid=None, split="gate"), timeout_s=5)).nll_by_row) == 4
    await site.desk.call(lambda r: r.direct(Directives()))
    assert (await ended(control)).state == "done"


async def test_without_local_publishing_the_base_stays_active(site: "Site", control: HttpReplicaClient) -> None:
    off = Directives(modes={CODE: Mode(publishing=Publishing.OFF)})
    await site.desk.call(lambda r: r.direct(off))
    base = await active(control)
    await control.start_round(round_body(base, swap_every=1))
    assert (await ended(control)).state == "done"
    assert await active(control) == base
    assert (await control.status()).publishing == "off"


async def test_scores_are_by_row_and_named_by_their_set(site: "Site", control: HttpReplicaClient) -> None:
    base = await active(control)
    rows = site.replica.background.splits
    for uid in (None, base.uid):
        reply = await control.score(ScoreBody(adapter="code", uid=uid, split="report"), timeout_s=5)
        report = next(r for s, r in rows.items() if s.value == "report")
        assert reply.set_sha256 == set_sha256(report)
        assert reply.tokens_by_row == tuple(fake_tokens(r) for r in report)
    second = site.keep(site.fresh(9))
    body = ScoreBody(
        adapter="code", uid=second, store_key=site.key(second), rows=(RowBody(prompt="a", completion="bc"),)
    )
    given = await control.score(body, timeout_s=5)
    assert given.nll_by_row == pytest.approx((3 * fake_loss(site.weights[second]),))
    assert given.set_sha256 == set_sha256([Row("a", "bc")])


@pytest.mark.parametrize(
    "body",
    [
        ScoreBody(adapter="code", uid=None),
        ScoreBody(adapter="code", uid=None, split="gate", rows=(RowBody(prompt="a", completion="b"),)),
    ],
)
async def test_a_score_is_of_a_split_or_of_rows(control: HttpReplicaClient, body: ScoreBody) -> None:
    with pytest.raises(InvalidRequest):
        await control.score(body, timeout_s=5)


async def test_a_version_that_is_not_here_cannot_be_scored(control: HttpReplicaClient) -> None:
    with pytest.raises(UnknownVersion):
        await control.score(ScoreBody(adapter="code", uid="gone", split="gate"), timeout_s=5)


async def test_when_every_place_is_pinned_a_swap_waits_and_requests_do_not(
    make_site: Callable[..., "Site"], fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_api, "SWAP_TIMEOUT_S", 0.1)
    site, fake.step_s = make_site(versions_per_adapter=2), 0.02
    async with site.http() as http, site.control() as control:

        async def ask() -> httpx.Response:
            body = {"inputs": "q", "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
            return await http.post("/generate", json=body)

        old = asyncio.create_task(ask())
        await site.decodes(1)
        second = await staged(site, control, 1, 2)
        await control.activate(ActivateBody(adapter="code", uid=second.uid, epoch=2))
        new = asyncio.create_task(ask())
        await site.decodes(2)
        third, fourth = await staged(site, control, 2, 3), await staged(site, control, 3, 4)
        with pytest.raises(NoPlace):
            await control.activate(ActivateBody(adapter="code", uid=third.uid, epoch=3))
        with pytest.raises(NoPlace):
            await control.activate(ActivateBody(adapter="code", uid=fourth.uid, epoch=4))
        more = asyncio.create_task(ask())
        await site.decodes(3)
        first_uid = (await old).headers["x-adapter-uid"]
        assert [r.headers["x-adapter-uid"] for r in (await new, await more)] == [second.uid] * 2
        assert first_uid not in (second.uid, third.uid, fourth.uid)
        for _ in range(100):
            if (await active(control)).uid == fourth.uid:
                break
            await asyncio.sleep(0.02)
        assert (await active(control)).uid == fourth.uid, "the waiting ones coalesce into the latest"
    await site.idle()
    assert violations(site.entries) == []


async def test_while_the_database_is_silent_nothing_is_published(make_site: Callable[..., "Site"]) -> None:
    site = make_site(governed=True)
    async with site.control() as control:
        base = await active(control)
        assert not (await control.status()).ready
        await control.start_round(round_body(base, swap_every=1))
        assert (await ended(control)).state == "done"
        assert await active(control) == base
        await site.desk.call(lambda r: r.direct(Directives()))
        await control.start_round(round_body(base, "r2", swap_every=1))
        assert (await ended(control, "r2")).state == "done"
        assert (await active(control)).uid != base.uid
        assert (await control.status()).ready
