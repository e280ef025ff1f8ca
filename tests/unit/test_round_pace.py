"""A round's clock."""

import asyncio
from dataclasses import replace

import pytest

from db.records import (
    AdapterName,
    AdapterRecord,
    Epoch,
    Factor,
    LoraSpec,
    Publishing,
    RoundId,
    RoundRecord,
    RoundState,
    VersionUid,
)
from flows.pace import Pace, Paused
from flows.plan import RoundSize, plan_round
from infra.errors import RoundError, StaleUpdate
from infra.settings import RoundSettings

ADAPTER = AdapterRecord(
    name=AdapterName("code"),
    backbone="b",
    spec=LoraSpec(rank=1, alpha=1, targets=("q_proj",)),
    initial_uid=VersionUid("one"),
    desired_uid=VersionUid("one"),
    previous_uid=None,
    epoch=Epoch(1),
    training=True,
    publishing=Publishing.GUARDED,
)
PAUSED = replace(ADAPTER, training=False)
ROUND = RoundRecord(
    id=RoundId("code-1"),
    adapter=ADAPTER.name,
    number=1,
    state=RoundState.TRAINING,
    base_uid=ADAPTER.desired_uid,
    base_epoch=ADAPTER.epoch,
    plan=plan_round(
        RoundSettings(deadline_s=10),
        round_id=RoundId("code-1"),
        factor=Factor.B,
        size=RoundSize(tokens=1, rows_per_step=1),
    ),
    clients=(),
    candidate_uid=None,
    aggregation_error=None,
    ce_before=None,
    ce_after=None,
    reason="",
    started_s=0,
    decided_s=None,
    served_s=None,
    flow_run_id=None,
)


def test_time_that_training_is_paused_does_not_count_towards_the_deadline() -> None:
    pace = Pace(ROUND, now_s=0)
    pace.see(ADAPTER, now_s=6)
    pace.see(PAUSED, now_s=15)
    pace.see(ADAPTER, now_s=19)
    pace.check()
    pace.see(ADAPTER, now_s=20)
    with pytest.raises(RoundError, match="not done within 10 s"):
        pace.check()


def test_a_long_pause_gives_the_round_to_a_later_run() -> None:
    pace = Pace(ROUND, now_s=0)
    pace.see(PAUSED, now_s=9)
    pace.check()
    pace.see(PAUSED, now_s=11)
    with pytest.raises(Paused):
        pace.check()


async def test_a_replaced_base_ends_the_round_also_during_a_pause() -> None:
    pace = Pace(ROUND, now_s=0)
    pace.see(PAUSED, now_s=1)
    waiting = asyncio.create_task(pace.running())
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.see(replace(ADAPTER, epoch=Epoch(2), desired_uid=VersionUid("two")), now_s=2)
    with pytest.raises(StaleUpdate, match="version two came into force"):
        await waiting


async def test_whoever_waits_goes_on_when_the_pause_ends() -> None:
    pace = Pace(ROUND, now_s=0)
    pace.see(PAUSED, now_s=1)
    waiting = asyncio.create_task(pace.running())
    await asyncio.sleep(0)
    pace.see(ADAPTER, now_s=2)
    await waiting


def test_an_unwatched_round_does_not_go_on() -> None:
    pace = Pace(ROUND, now_s=0)
    pace.fail(OSError("the database is gone"))
    with pytest.raises(OSError, match="gone"):
        pace.check()
