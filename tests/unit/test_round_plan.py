"""Whom a round asks, and for what."""

import pytest

from adapters.aggregate import STRATEGIES
from db.records import (
    AdapterName,
    Epoch,
    Factor,
    Heartbeat,
    ReplicaId,
    ReplicaRecord,
    RoundId,
    RoundRecord,
    RoundState,
    VersionUid,
)
from flows.clients import round_body
from flows.plan import factor_turn, fixed_size, plan_round, round_seed, select_clients
from infra.errors import NotEnoughClients
from infra.settings import RoundSettings

INITIAL = VersionUid("initial")


def replica(
    name: str, *, shard: bool = True, ready: bool = True, backbone: str = "b"
) -> tuple[ReplicaRecord, Heartbeat]:
    record = ReplicaRecord(id=ReplicaId(name), url="http://x", backbone=backbone, has_shard=shard, started_s=0)
    beat = Heartbeat(
        replica_id=record.id,
        at_s=0,
        ready=ready,
        queued=0,
        running=0,
        queue_age_s=0,
        ttft_p95_s=0,
        tpot_p95_s=0,
        finished=0,
        violations=0,
        requests_total=0,
        tokens_per_s=0,
        train_tokens_total=0,
        train_tokens_decoding_total=0,
        train_share=0,
        round_id=None,
        active={},
        active_uids={},
        resident=(),
        swaps_total=0,
        kv_used=0,
    )
    return record, beat


def test_only_replicas_that_could_train_now_are_asked() -> None:
    fleet = [
        replica("c"),
        replica("a"),
        replica("starting", ready=False),
        replica("no-shard", shard=False),
        replica("foreign", backbone="other"),
    ]
    assert select_clients(fleet, backbone="b", min_clients=2) == ("a", "c")


def test_too_few_clients_says_what_the_fleet_lacks() -> None:
    with pytest.raises(NotEnoughClients, match="1 of 2 live replicas can train, 2 are needed; 1 have another backbone"):
        select_clients([replica("a"), replica("b", backbone="other")], backbone="b", min_clients=2)


def test_a_resumed_round_asks_for_the_same() -> None:
    settings = RoundSettings(tokens=512)
    one, two = (
        plan_round(settings, round_id=RoundId("code-1-x"), factor=Factor.B, size=fixed_size(settings, []))
        for _ in range(2)
    )
    assert one == two
    assert one.tokens == 512
    assert round_seed(RoundId("code-1-x")) != round_seed(RoundId("code-2-x"))


def test_how_clients_train_is_a_matter_of_settings() -> None:
    chosen = {"lr": 0.01, "lr_ratio": 16.0, "warmup_steps": 7, "max_grad_norm": 0.5, "tokens": 99, "rows_per_step": 3}
    settings = RoundSettings.model_validate(chosen)
    plan = plan_round(settings, round_id=RoundId("r"), factor=Factor.BOTH, size=fixed_size(settings, []))
    current = RoundRecord(
        id=RoundId("r"), adapter=AdapterName("a"), number=1, state=RoundState.TRAINING, base_uid=INITIAL,
        base_epoch=Epoch(1), plan=plan, clients=(), candidate_uid=None, aggregation_error=None, ce_before=None,
        ce_after=None, reason="", started_s=0, decided_s=None, served_s=None, flow_run_id=None,
    )  # fmt: skip
    assert round_body(current).model_dump(include=set(chosen)) == chosen


def test_b_keeps_the_turn_until_the_initial_version_is_left() -> None:
    def turn(decided: int, base: str) -> Factor:
        return STRATEGIES["alternate"].factor(factor_turn(decided, initial_uid=INITIAL, base_uid=VersionUid(base)))

    assert [turn(n, INITIAL) for n in range(4)] == [Factor.B] * 4
    assert [turn(n, "v2") for n in range(1, 4)] == [Factor.A, Factor.B, Factor.A]
