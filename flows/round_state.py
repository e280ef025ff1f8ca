"""Life of a federated round: which moves are legal. Pure.

planned → training → aggregating → evaluating → promoted
                                              ↘ rejected
any of the first four → aborted
"""

from collections.abc import Mapping

from db.records import RoundState
from infra.errors import RoundError

MOVES: Mapping[RoundState, frozenset[RoundState]] = {
    RoundState.PLANNED: frozenset({RoundState.TRAINING, RoundState.ABORTED}),
    RoundState.TRAINING: frozenset({RoundState.AGGREGATING, RoundState.ABORTED}),
    RoundState.AGGREGATING: frozenset({RoundState.EVALUATING, RoundState.ABORTED}),
    RoundState.EVALUATING: frozenset({RoundState.PROMOTED, RoundState.REJECTED, RoundState.ABORTED}),
    RoundState.PROMOTED: frozenset(),
    RoundState.REJECTED: frozenset(),
    RoundState.ABORTED: frozenset(),
}


def is_final(state: RoundState) -> bool:
    """Whether nothing follows."""
    return not MOVES[state]


def check_move(before: RoundState, after: RoundState) -> None:
    """Raise ``RoundError`` unless ``before → after`` is a legal move."""
    if after not in MOVES[before]:
        raise RoundError(f"a round cannot go from {before} to {after}")
