"""The choice of a replica: exact shares over time, and no pile-up on one that is slow."""

from collections import Counter

from db.records import ReplicaId
from serving.gateway.dispatch import Dispatcher

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
NONE: frozenset[ReplicaId] = frozenset()


def run(dispatcher: Dispatcher, weights: dict[ReplicaId, float], count: int) -> list[ReplicaId]:
    chosen = [dispatcher.choose(weights, {}, exclude=NONE) for _ in range(count)]
    return [c for c in chosen if c is not None]


def test_shares_are_exact_and_interleaved() -> None:
    got = run(Dispatcher(), {A: 0.75, B: 0.25}, 8)
    assert Counter(got) == {A: 6, B: 2}
    assert "bb" not in "".join(got)


def test_a_burst_stays_near_the_weights() -> None:
    dispatcher, inflight = Dispatcher(), Counter[ReplicaId]()
    for _ in range(30):
        chosen = dispatcher.choose({A: 0.5, B: 0.3, C: 0.2}, inflight, exclude=NONE)
        assert chosen is not None
        inflight[chosen] += 1
    assert inflight == {A: 15, B: 9, C: 6}


def test_a_slow_replica_does_not_collect_requests() -> None:
    dispatcher = Dispatcher()
    got = [dispatcher.choose({A: 0.8, B: 0.2}, {A: 20, B: 0}, exclude=NONE) for _ in range(5)]
    assert got == [B] * 5


def test_one_that_was_passed_over_does_not_get_a_burst_afterwards() -> None:
    dispatcher = Dispatcher()
    for _ in range(50):
        dispatcher.choose({A: 0.5, B: 0.5}, {A: 10, B: 0}, exclude=NONE)
    assert Counter(run(dispatcher, {A: 0.5, B: 0.5}, 10))[A] <= 8


def test_excluded_replicas_are_not_asked() -> None:
    assert Dispatcher().choose({A: 1.0, B: 1.0}, {}, exclude={A}) == B
    assert Dispatcher().choose({A: 1.0}, {}, exclude={A}) is None
    assert Dispatcher().choose({}, {}, exclude=NONE) is None


def test_weight_zero_is_the_last_resort() -> None:
    assert Counter(run(Dispatcher(), {A: 0.0, B: 1.0}, 5)) == {B: 5}
    assert Dispatcher().choose({A: 0.0, B: 1.0}, {}, exclude={B}) == A
    assert Counter(run(Dispatcher(), {A: 0.0, B: 0.0}, 4)) == {A: 2, B: 2}
