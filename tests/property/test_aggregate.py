"""Laws of the federated strategies, and their error against dense matrices."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.aggregate import STRATEGIES
from adapters.model import ClientUpdate, LoraWeights
from adapters.ports import Aggregate, Aggregator
from adapters.weights import initial, of_factor, to_bytes
from db.records import ClientId, Factor, LoraSpec, RoundId, VersionUid
from infra.errors import NotEnoughClients, RoundError, StaleUpdate

SHAPES = {"model.layers.0.self_attn.q_proj": (7, 5), "model.layers.1.mlp.down_proj": (4, 9)}
SPEC = LoraSpec(rank=2, alpha=4.0, targets=("down_proj", "q_proj"))
ALTERNATE, FEDAVG = STRATEGIES["alternate"], STRATEGIES["fedavg"]


def _base(seed: int) -> LoraWeights:
    """Factors with B ≠ 0."""
    fresh, random = initial(SHAPES, SPEC, seed), np.random.default_rng(seed + 1)
    b = {n: random.normal(size=fresh.tensors[n].shape).astype(np.float32) for n in of_factor(fresh.tensors, Factor.B)}
    return LoraWeights(spec=SPEC, tensors={**fresh.tensors, **b})


def _update(base: LoraWeights, factor: Factor, client: str, tokens: int, seed: int, size: float = 1.0) -> ClientUpdate:
    random = np.random.default_rng(seed)
    return ClientUpdate(
        round_id=RoundId("r"),
        client_id=ClientId(client),
        base_uid=VersionUid("base"),
        factor=factor,
        tokens=tokens,
        tensors={
            name: base.tensors[name] + random.normal(0, size, base.tensors[name].shape).astype(np.float32)
            for name in of_factor(base.tensors, factor)
        },
    )


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Aggregator, LoraWeights, list[ClientUpdate]]:
    """A strategy, a base, and the updates of one to five clients."""
    strategy = draw(st.sampled_from([ALTERNATE, FEDAVG]))
    factor = strategy.factor(draw(st.integers(1, 9)))
    base = _base(draw(st.integers(0, 50)))
    tokens = draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=5))
    updates = [
        _update(base, factor, f"client-{i}", count, draw(st.integers(0, 1000))) for i, count in enumerate(tokens)
    ]
    return strategy, base, updates


@given(rounds(), st.randoms())
def test_the_order_of_updates_changes_no_bit(
    case: tuple[Aggregator, LoraWeights, list[ClientUpdate]], random: Random
) -> None:
    strategy, base, updates = case
    shuffled = updates.copy()
    random.shuffle(shuffled)
    first, second = strategy.aggregate(base, updates), strategy.aggregate(base, shuffled)
    assert to_bytes(first.weights) == to_bytes(second.weights)
    assert (first.error, first.error_by_layer) == (second.error, second.error_by_layer)


def _dense(weights: LoraWeights, layer: str) -> np.ndarray:
    a, b = weights.tensors[layer + ".lora_A.weight"], weights.tensors[layer + ".lora_B.weight"]
    return b.astype(np.float64) @ a.astype(np.float64)


def _wearing(base: LoraWeights, update: ClientUpdate) -> LoraWeights:
    return LoraWeights(spec=base.spec, tensors={**base.tensors, **update.tensors})


def _mean_product(base: LoraWeights, updates: Sequence[ClientUpdate], layer: str) -> np.ndarray:
    total = sum(u.tokens for u in updates)
    products = [u.tokens / total * _dense(_wearing(base, u), layer) for u in updates]
    return np.sum(products, axis=0)  # type: ignore[no-any-return]


@given(rounds())
def test_the_error_is_that_of_dense_matrices(case: tuple[Aggregator, LoraWeights, list[ClientUpdate]]) -> None:
    strategy, base, updates = case
    result = strategy.aggregate(base, updates)
    error_square = change_square = 0.0
    for layer in SHAPES:
        target = _mean_product(base, updates, layer)
        error = float(np.sum((target - _dense(result.weights, layer)) ** 2))
        change = float(np.sum((target - _dense(base, layer)) ** 2))
        assert result.error_by_layer[layer] == pytest.approx((error / change) ** 0.5, rel=1e-3, abs=1e-5)
        error_square, change_square = error_square + error, change_square + change
    assert result.error == pytest.approx((error_square / change_square) ** 0.5, rel=1e-3, abs=1e-5)
    if strategy is ALTERNATE or len(updates) == 1:
        assert result.error == pytest.approx(0, abs=1e-7)


def test_fedavg_of_clients_that_differ_has_an_error() -> None:
    base = _base(1)
    result = FEDAVG.aggregate(base, [_update(base, Factor.BOTH, f"c{i}", 10, i) for i in range(3)])
    assert result.error > 0.1
    small = FEDAVG.aggregate(base, [_update(base, Factor.BOTH, f"c{i}", 10, i, size=1e-4) for i in range(3)])
    assert 0 < small.error < 1e-3


def _one(result: Aggregate, name: str) -> float:
    return float(result.weights.tensors[name].ravel()[0])


def test_clients_count_by_their_tokens_and_the_other_factor_stays() -> None:
    base = _base(1)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    updates = [_update(base, Factor.B, client, tokens, tokens) for client, tokens in (("x", 300), ("y", 100), ("z", 0))]
    result = ALTERNATE.aggregate(base, updates)
    expected = 0.75 * updates[0].tensors[name].ravel()[0] + 0.25 * updates[1].tensors[name].ravel()[0]
    assert _one(result, name) == pytest.approx(float(expected), rel=1e-6)
    for kept in of_factor(base.tensors, Factor.A):
        assert result.weights.tensors[kept].tobytes() == base.tensors[kept].tobytes()
    assert all(t.dtype == np.float32 for t in result.weights.tensors.values())


def test_factors_alternate_from_b() -> None:
    assert [ALTERNATE.factor(n) for n in (1, 2, 3)] == [Factor.B, Factor.A, Factor.B]
    assert [FEDAVG.factor(n) for n in (1, 2)] == [Factor.BOTH, Factor.BOTH]


def test_updates_that_do_not_belong_together_are_refused() -> None:
    base = _base(1)
    good = _update(base, Factor.B, "a", 10, 1)
    with pytest.raises(NotEnoughClients):
        ALTERNATE.aggregate(base, [])
    with pytest.raises(NotEnoughClients):
        ALTERNATE.aggregate(base, [_update(base, Factor.B, "a", 0, 1)])
    with pytest.raises(RoundError, match="two updates"):
        ALTERNATE.aggregate(base, [good, good])
    with pytest.raises(StaleUpdate):
        ALTERNATE.aggregate(base, [good, _update(base, Factor.A, "b", 10, 1)])
    with pytest.raises(StaleUpdate):
        FEDAVG.aggregate(base, [good])
