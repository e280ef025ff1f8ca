"""Laws of dispatch and of the policy, over arbitrary fleets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from db.records import FleetDecision, Heartbeat, ReplicaId
from serving.controller import policy
from serving.controller.policy import Load
from serving.gateway.dispatch import Dispatcher
from serving.model import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.25)
IDS = st.integers(0, 9).map(lambda i: ReplicaId(f"r{i}"))
SECONDS = st.floats(0, 100)
WEIGHTS = st.dictionaries(IDS, st.floats(0, 1) | st.just(0.0), max_size=10)


@st.composite
def beats(draw: st.DrawFn) -> list[Heartbeat]:
    return [
        Heartbeat(
            replica_id=replica,
            at_s=0,
            ready=True,
            queued=draw(st.integers(0, 99)),
            running=draw(st.integers(0, 16)),
            queue_age_s=draw(SECONDS),
            ttft_p95_s=draw(SECONDS),
            tpot_p95_s=draw(SECONDS),
            finished=(finished := draw(st.integers(0, 50))),
            violations=draw(st.integers(0, finished)),
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
        for replica in draw(st.lists(IDS, unique=True, max_size=10))
    ]


@given(beats(), st.sets(IDS), WEIGHTS, WEIGHTS, st.floats(0, 50), st.floats(0, 50))
def test_a_decision_is_a_distribution_over_the_live(
    ready: list[Heartbeat],
    others: set[ReplicaId],
    weights: dict[ReplicaId, float],
    shares: dict[ReplicaId, float],
    recent: float,
    forecast: float,
) -> None:
    live = {b.replica_id for b in ready}
    previous = FleetDecision(id=1, leader_epoch=1, at_s=0, weights=weights, train_shares=shares, reason="")
    load = Load(recent_per_s=recent, forecast_per_s=forecast)
    choice = policy.decide(ready, sorted(others | live), previous, slo=SLO, load=load)
    assert set(choice.weights) == set(choice.train_shares) == others | live
    assert all(choice.weights[r] == choice.train_shares[r] == 0 for r in others - live)
    assert all(0 <= share <= 1 for share in choice.train_shares.values())
    if live:
        assert math.fsum(choice.weights.values()) == pytest.approx(1)
        assert all(choice.weights[r] >= policy.FLOOR / len(live) - 1e-9 for r in live)


@given(st.dictionaries(IDS, st.floats(policy.MIN_PRESSURE, 50), min_size=1))
def test_weights_move_slowly(pressures: dict[ReplicaId, float]) -> None:
    weights = dict.fromkeys(pressures, 1 / len(pressures))
    for _ in range(20):
        before, weights = weights, policy.dispatch_weights(pressures, weights)
        assert max(abs(weights[r] - before[r]) for r in weights) <= policy.MAX_STEP + 1e-9


@given(
    WEIGHTS,
    st.lists(st.tuples(st.dictionaries(IDS, st.integers(0, 40)), st.sets(IDS)), max_size=30),
)
def test_a_choice_is_always_one_that_may_be_asked(
    weights: dict[ReplicaId, float], calls: list[tuple[dict[ReplicaId, int], set[ReplicaId]]]
) -> None:
    dispatcher = Dispatcher()
    for inflight, exclude in calls:
        chosen = dispatcher.choose(weights, inflight, exclude=exclude)
        asked = {r: w for r, w in weights.items() if r not in exclude}
        assert (chosen is None) == (not asked)
        if chosen is not None:
            assert chosen in asked
            assert asked[chosen] > 0 or not any(w > 0 for w in asked.values())
