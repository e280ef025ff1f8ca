"""Where a plan's tokens lie in a step's one sequence."""

from dataclasses import dataclass

from serving.model import Decode, Prefill, StepPlan
from serving.replica.modes import Chunk


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward's tokens: first one for each decoding row, then the prefill chunks."""

    decodes: tuple[Decode, ...]
    """By row."""
    prefills: tuple[Prefill, ...]
    chunks: tuple[Chunk, ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[int, ...]
    tile: int = 0
    """Tokens with the filling around them, where their number is constant; see ``invariant``."""


def lay_out(plan: StepPlan) -> Layout:
    """Return the whole plan as one forward."""
    decodes = tuple(sorted(plan.decodes, key=lambda d: d.row))
    ids = [d.token for d in decodes]
    positions = [d.position for d in decodes]
    places = [d.place for d in decodes]
    chunks = []
    for prefill in plan.prefills:
        begin = len(ids)
        ids += prefill.tokens
        positions += range(prefill.start, prefill.start + len(prefill.tokens))
        places += [prefill.place] * len(prefill.tokens)
        chunks.append(Chunk(row=prefill.row, start=prefill.start, begin=begin, end=len(ids)))
    return Layout(
        decodes=decodes,
        prefills=plan.prefills,
        chunks=tuple(chunks),
        ids=tuple(ids),
        positions=tuple(positions),
        places=tuple(places),
    )
