"""Which moves a round may make."""

import pytest

from db.records import RoundState
from flows.round_state import MOVES, check_move, is_final
from infra.errors import RoundError


def test_every_state_is_reached_and_every_way_ends() -> None:
    reached = {after for moves in MOVES.values() for after in moves}
    assert set(MOVES) == set(RoundState)
    assert reached == set(RoundState) - {RoundState.PLANNED}
    for state in RoundState:
        steps, seen = {state}, set[RoundState]()
        while steps:
            assert not steps & seen, "a round must not go in circles"
            seen |= steps
            steps = {after for before in steps for after in MOVES[before]} - {RoundState.ABORTED}


def test_only_decisions_are_final() -> None:
    assert {s for s in RoundState if is_final(s)} == {RoundState.PROMOTED, RoundState.REJECTED, RoundState.ABORTED}


def test_any_unfinished_round_can_be_aborted() -> None:
    for state in RoundState:
        if not is_final(state):
            check_move(state, RoundState.ABORTED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RoundState.PLANNED, RoundState.AGGREGATING),
        (RoundState.TRAINING, RoundState.PROMOTED),
        (RoundState.PROMOTED, RoundState.REJECTED),
        (RoundState.ABORTED, RoundState.TRAINING),
    ],
)
def test_an_illegal_move_is_named(before: RoundState, after: RoundState) -> None:
    with pytest.raises(RoundError, match=f"{before} to {after}"):
        check_move(before, after)
