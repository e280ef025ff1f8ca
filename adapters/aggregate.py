"""Federated strategies: the clients' factors in, the fleet's new factors out. Pure.

Clients count by the supervised tokens they trained. Sums run in fp64 over the clients in sorted order, so that the
order in which updates arrived changes no bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from adapters.model import Array, ClientUpdate, LoraWeights
from adapters.ports import Aggregate, Aggregator
from adapters.weights import A_SUFFIX, B_SUFFIX
from db.records import Factor
from infra.errors import NotEnoughClients, RoundError, StaleUpdate

Wide = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Alternate:
    """Train one factor a round, B first; the other is common to all clients, so the mean of products is exact.

    RoLoRA, arXiv:2502.01755.
    """

    name: str = "alternate"

    def factor(self, round_number: int) -> Factor:
        """Odd rounds B, even rounds A: with B = 0 at the start, A would have no gradient."""
        return Factor.B if round_number % 2 else Factor.A

    def aggregate(self, base: LoraWeights, updates: Sequence[ClientUpdate]) -> Aggregate:
        """See ``Aggregator``."""
        ordered = _ordered(updates, {Factor.A, Factor.B})
        mean = _mean(ordered)
        weights = LoraWeights(spec=base.spec, tensors={**base.tensors, **_narrow(mean)})
        return Aggregate(weights=weights, error=0.0, error_by_layer=dict.fromkeys(_layers(base), 0.0))


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Train both factors and average each by itself: the product of means is not the mean of products.

    FedIT, arXiv:2305.05644.
    """

    name: str = "fedavg"

    def factor(self, round_number: int) -> Factor:
        """Both, always."""
        return Factor.BOTH

    def aggregate(self, base: LoraWeights, updates: Sequence[ClientUpdate]) -> Aggregate:
        """See ``Aggregator``."""
        ordered = _ordered(updates, {Factor.BOTH})
        mean = _mean(ordered)
        squares = {layer: _squares(layer, base, ordered, mean) for layer in _layers(base)}
        return Aggregate(
            weights=LoraWeights(spec=base.spec, tensors=_narrow(mean)),
            error=_ratio(sum(e for e, _ in squares.values()), sum(c for _, c in squares.values())),
            error_by_layer={layer: _ratio(error, change) for layer, (error, change) in squares.items()},
        )


STRATEGIES: Mapping[str, Aggregator] = MappingProxyType({s.name: s for s in (Alternate(), FedAvg())})
"""By the name that the setting ``rounds.strategy`` gives."""


def shares(updates: Sequence[ClientUpdate]) -> list[float]:
    """Return each client's weight in the mean; they sum to 1."""
    total = sum(u.tokens for u in updates)
    return [u.tokens / total for u in updates]


def _ordered(updates: Sequence[ClientUpdate], factors: set[Factor]) -> list[ClientUpdate]:
    """Return the updates by client. Raises ``RoundError`` if they do not belong together."""
    ordered = sorted((u for u in updates if u.tokens > 0), key=lambda u: u.client_id)
    if not ordered:
        raise NotEnoughClients("no client trained a supervised token")
    if len({u.client_id for u in ordered}) != len(ordered):
        raise RoundError("a client has returned two updates")
    if len({(u.round_id, u.base_uid, u.factor) for u in ordered}) != 1:
        raise StaleUpdate("the updates come from different rounds, bases or factors")
    if ordered[0].factor not in factors:
        raise StaleUpdate(f"the updates hold factor {ordered[0].factor.value}, which this strategy does not train")
    return ordered


def _mean(ordered: Sequence[ClientUpdate]) -> dict[str, Wide]:
    """Return the weighted mean of every tensor."""
    weights = shares(ordered)
    mean: dict[str, Wide] = {}
    for name in sorted(ordered[0].tensors):
        total = np.zeros(ordered[0].tensors[name].shape, np.float64)
        for update, weight in zip(ordered, weights, strict=True):
            total += weight * update.tensors[name].astype(np.float64)
        mean[name] = total
    return mean


def _narrow(mean: Mapping[str, Wide]) -> dict[str, Array]:
    return {name: tensor.astype(np.float32) for name, tensor in mean.items()}


def _layers(weights: LoraWeights) -> list[str]:
    return sorted(name.removesuffix(A_SUFFIX) for name in weights.tensors if name.endswith(A_SUFFIX))


def _squares(
    layer: str, base: LoraWeights, ordered: Sequence[ClientUpdate], mean: Mapping[str, Wide]
) -> tuple[float, float]:
    """Return ‖Σp·BA − B̄Ā‖² and ‖Σp·BA − B₀A₀‖² of one layer, neither by a d×d matrix.

    The first is ‖Σp(B−B̄)(A−Ā)‖². The second is written in changes b = B−B₀, a = A−A₀, lest it cancel when they are
    small: Σp·BA − B₀A₀ = B₀·Σp·a + Σp·b·A.
    """
    a_name, b_name = layer + A_SUFFIX, layer + B_SUFFIX
    a_base, b_base = base.tensors[a_name].astype(np.float64), base.tensors[b_name].astype(np.float64)
    weights = shares(ordered)
    a = [u.tensors[a_name].astype(np.float64) for u in ordered]
    b = [u.tensors[b_name].astype(np.float64) for u in ordered]
    error = _product_square(
        np.hstack([w * (one - mean[b_name]) for w, one in zip(weights, b, strict=True)]),
        np.vstack([one - mean[a_name] for one in a]),
    )
    change = _product_square(
        np.hstack([b_base, *(w * (one - b_base) for w, one in zip(weights, b, strict=True))]),
        np.vstack([mean[a_name] - a_base, *a]),
    )
    return error, change


def _product_square(left: Wide, right: Wide) -> float:
    """Return ‖LR‖² = tr(LᵀL·RRᵀ). Shapes: left [d_out, k], right [k, d_in], k small."""
    return max(0.0, float(np.sum((left.T @ left) * (right @ right.T))))


def _ratio(error_square: float, change_square: float) -> float:
    return float((error_square / change_square) ** 0.5) if change_square > 0 else 0.0
