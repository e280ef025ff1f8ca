"""The fast controller's policy: what it does in calm, in danger, in a lull, and when replicas come and go."""

import dataclasses

import pytest

from db.records import AdapterName, Arrivals, FleetDecision, Heartbeat, ReplicaId
from serving.controller import policy
from serving.controller.policy import Load
from serving.model import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.2)
BUSY = Load(recent_per_s=5, forecast_per_s=5)
LULL = Load(recent_per_s=1, forecast_per_s=5)
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")

CALM = Heartbeat(
    replica_id=A,
    at_s=0,
    ready=True,
    queued=0,
    running=1,
    queue_age_s=0,
    ttft_p95_s=0.2,
    tpot_p95_s=0.05,
    finished=20,
    violations=0,
    requests_total=20,
    tokens_per_s=30,
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


def beat(
    replica: ReplicaId = A,
    *,
    queue_age_s: float = CALM.queue_age_s,
    ttft_p95_s: float = CALM.ttft_p95_s,
    tpot_p95_s: float = CALM.tpot_p95_s,
    finished: int = CALM.finished,
    violations: int = CALM.violations,
) -> Heartbeat:
    return dataclasses.replace(
        CALM,
        replica_id=replica,
        queue_age_s=queue_age_s,
        ttft_p95_s=ttft_p95_s,
        tpot_p95_s=tpot_p95_s,
        finished=finished,
        violations=violations,
    )


def decision(weights: dict[ReplicaId, float], shares: dict[ReplicaId, float] | None = None) -> FleetDecision:
    return FleetDecision(id=1, leader_epoch=1, at_s=0, weights=weights, train_shares=shares or {}, reason="")


def share(b: Heartbeat, before: float = 0.5, load: Load = BUSY) -> float:
    return policy.train_share(b, before, slo=SLO, load=load)


def test_calm_raises_the_share_slowly_up_to_one() -> None:
    assert share(beat()) == pytest.approx(0.6)
    assert share(beat(), before=0.95) == 1.0


def test_a_lull_raises_it_faster() -> None:
    assert share(beat(), load=LULL) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "trouble",
    [
        beat(queue_age_s=0.6),
        beat(ttft_p95_s=0.9),
        beat(tpot_p95_s=0.19),
        beat(violations=3),
        beat(queue_age_s=0.45, tpot_p95_s=0.4, finished=0),
    ],
)
def test_danger_halves_it_at_once_even_in_a_lull(trouble: Heartbeat) -> None:
    assert share(trouble, load=LULL) == pytest.approx(0.25)


def test_a_request_that_is_already_late_stops_training() -> None:
    assert share(beat(queue_age_s=1.1), before=1.0) == 0.0


@pytest.mark.parametrize(
    "noise",
    [beat(finished=4, ttft_p95_s=9.0), beat(finished=4, tpot_p95_s=0.5), beat(finished=4, violations=3)],
)
def test_figures_of_few_requests_do_not_count(noise: Heartbeat) -> None:
    assert share(noise) == pytest.approx(0.6)


def test_the_first_decision_is_equal_weights_and_full_shares() -> None:
    choice = policy.decide([beat(A), beat(B)], [A, B], None, slo=SLO, load=BUSY)
    assert choice.weights == {A: 0.5, B: 0.5}
    assert choice.train_shares == {A: 1.0, B: 1.0}
    assert choice.reason == "steady"


def test_a_replica_that_is_not_ready_gets_nothing() -> None:
    before = decision({A: 0.4, B: 0.6})
    choice = policy.decide([beat(A)], [A, B], before, slo=SLO, load=BUSY)
    assert choice.weights == {A: 1.0, B: 0.0}
    assert choice.train_shares[B] == 0.0


def test_one_that_comes_back_gets_an_equal_share_at_once() -> None:
    before = decision({A: 1.0, B: 0.0})
    choice = policy.decide([beat(A), beat(B)], [A, B], before, slo=SLO, load=BUSY)
    assert choice.weights[B] > 0.3


def test_nobody_ready() -> None:
    choice = policy.decide([], [A], None, slo=SLO, load=BUSY)
    assert choice.weights == {A: 0.0}
    assert choice.reason == "no live replica"


def test_weights_leave_the_one_under_pressure_slowly_and_not_without_end() -> None:
    weights, seen = {A: 0.5, B: 0.5}, []
    for _ in range(8):
        weights = policy.dispatch_weights({A: 1.6, B: 0.4}, weights)
        seen.append(round(weights[A], 2))
    assert seen == [0.47, 0.44, 0.41, 0.38, 0.35, 0.35, 0.35, 0.35]


def test_a_hopeless_one_keeps_the_floor() -> None:
    weights = {A: 0.5, B: 0.5}
    for _ in range(30):
        weights = policy.dispatch_weights({A: 1000.0, B: 0.1}, weights)
    assert weights == pytest.approx({A: policy.FLOOR / 2, B: 1 - policy.FLOOR / 2}, abs=policy.DEAD_BAND)


def test_small_differences_change_nothing() -> None:
    weights = {A: 0.5, B: 0.5}
    assert policy.dispatch_weights({A: 0.72, B: 0.7}, weights) == weights
    assert policy.dispatch_weights({A: 0.2, B: 0.1}, {A: 0.51, B: 0.49}) == {A: 0.51, B: 0.49}


def test_weights_go_back_to_equal_when_all_is_calm() -> None:
    weights = policy.dispatch_weights({A: 0.2, B: 0.1}, {A: 0.2, B: 0.8})
    assert weights == pytest.approx({A: 0.23, B: 0.77})


def test_the_reason_names_who_is_in_danger() -> None:
    choice = policy.decide([beat(A), beat(B, queue_age_s=2.0)], [A, B], None, slo=SLO, load=BUSY)
    assert choice.reason == "b: queue age"
    assert policy.decide([beat(A)], [A], None, slo=SLO, load=LULL).reason == "lull"


def arrivals(slot_s: float, requests: int) -> Arrivals:
    return Arrivals(
        slot_s=slot_s, gateway_id="g", replica_id=A, adapter=AdapterName("code"), requests=requests, failures=0
    )


def test_load_compares_recent_slots_with_those_before() -> None:
    steady = [arrivals(float(t), 4) for t in range(65, 100)]
    load = policy.observe_load(steady, now_s=100.4, slot_s=1.0)
    assert load == Load(recent_per_s=4, forecast_per_s=4)
    assert not load.lull
    fewer = [arrivals(float(t), 4 if t < 95 else 1) for t in range(65, 100)]
    assert policy.observe_load(fewer, now_s=100.4, slot_s=1.0).lull


def test_half_second_slots_give_rates_per_second() -> None:
    load = policy.observe_load([arrivals(t / 2, 2) for t in range(140, 200)], now_s=100.0, slot_s=0.5)
    assert load.recent_per_s == 4


def test_no_arrivals_are_no_lull() -> None:
    assert not policy.observe_load([], now_s=100.0, slot_s=1.0).lull
