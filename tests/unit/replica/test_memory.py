"""What a replica takes on follows from its budget in bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from serving.replica.memory import MIB, SPARE_VERSIONS, Costs, plan_memory

COSTS = Costs(
    process=100 * MIB,
    weights=500 * MIB,
    packed=500 * MIB,
    place=10 * MIB,
    version=5 * MIB,
    row=20 * MIB,
    step=50 * MIB,
    training=400 * MIB,
    training_checkpointed=100 * MIB,
)
KEPT = (100 + 500 + 8 * 10 + (8 + SPARE_VERSIONS) * 5 + 50) * MIB


def test_with_plenty_everything_is_as_asked_and_the_rest_holds_versions() -> None:
    plan = plan_memory(4000 * MIB, COSTS, rows=16, places=8)
    assert (plan.packed, plan.checkpointed, plan.rows) == (True, False, 16)
    assert plan.versions > 8 + SPARE_VERSIONS


def test_activations_are_computed_again_before_anything_gets_slower_for_requests() -> None:
    plan = plan_memory(KEPT + (500 + 100 + 16 * 20) * MIB, COSTS, rows=16, places=8)
    assert (plan.packed, plan.checkpointed, plan.rows) == (True, True, 16)


def test_then_packed_weights_go_and_at_last_rows() -> None:
    plan = plan_memory(KEPT + (400 + 16 * 20) * MIB, COSTS, rows=16, places=8)
    assert (plan.packed, plan.checkpointed, plan.rows) == (False, False, 16)
    plan = plan_memory(KEPT + (100 + 3 * 20) * MIB, COSTS, rows=16, places=8)
    assert (plan.packed, plan.checkpointed, plan.rows) == (False, True, 3)


def test_what_cannot_fit_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=f"at least {(KEPT // MIB) + 120} MiB"):
        plan_memory(KEPT + 119 * MIB, COSTS, rows=16, places=8)


@given(
    budget=st.integers(1, 5000),
    row=st.integers(1, 200),
    training=st.integers(0, 900),
    part=st.floats(0, 1),
    rows=st.integers(1, 64),
    places=st.integers(2, 12),
)
def test_no_plan_exceeds_its_budget_and_more_memory_never_admits_less(
    budget: int, row: int, training: int, part: float, rows: int, places: int
) -> None:
    costs = Costs(
        process=100 * MIB,
        weights=500 * MIB,
        packed=450 * MIB,
        place=10 * MIB,
        version=5 * MIB,
        row=row * MIB,
        step=50 * MIB,
        training=training * MIB,
        training_checkpointed=int(part * training) * MIB,
    )
    try:
        plan = plan_memory(budget * MIB, costs, rows=rows, places=places)
    except ConfigError:
        return
    assert 1 <= plan.rows <= rows
    assert plan.used <= plan.budget
    assert plan.versions >= places + SPARE_VERSIONS
    assert plan_memory((budget + 500) * MIB, costs, rows=rows, places=places).rows >= plan.rows
