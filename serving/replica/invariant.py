"""Batch-invariant steps: what a request is answered does not depend, to the last bit, on what else is in the batch.

A product's rounding depends on how many rows it has, and so does the order of a sum that is spread over threads. So
every forward of this mode has a constant number of tokens, a *tile*:

- A prompt is cut at multiples of ``PREFILL_TILE`` from its start. A chunk that is less than a tile stands where its
  tokens would stand in the whole one, and attends to as many cached positions: how the scheduler cuts a prompt, and
  what of it another row has computed before, changes nothing.
- Decoding rows share tiles of ``DECODE_TILE``, each attends alone, and each version's low-rank product is computed on
  its own. Where a row's place in the tile or its neighbours would matter (``rows_are_alone``), they stand alone.

Not promised: equal bits on another machine, with another number of threads, another ``rows`` or ``max_total_tokens``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from serving.model import BASE, Draw, Prefill, RowResult, SamplingParams, StepPlan
from serving.replica.layout import Layout, lay_out
from serving.replica.modes import Chunk

PREFILL_TILE = 64
DECODE_TILE = 16
FILLING = Draw(params=SamplingParams(), index=0)
"""What is drawn for a token that is none."""


def tiles(plan: StepPlan, *, decode_tile: int, max_total_tokens: int) -> list[Layout]:
    """Cut a plan into forwards of constant size."""
    decodes = sorted(plan.decodes, key=lambda d: d.row)
    cut = [
        _padded(lay_out(StepPlan(decodes=tuple(decodes[at : at + decode_tile]))), decode_tile)
        for at in range(0, len(decodes), decode_tile)
    ]
    return cut + [_tile(part, max_total_tokens) for prefill in plan.prefills for part in _parts(prefill)]


def joined(results: Iterable[RowResult]) -> tuple[RowResult, ...]:
    """Put together what the parts of a prompt gave."""
    rows: dict[int, RowResult] = {}
    for part in results:
        before = rows.get(part.row)
        if before is None:
            rows[part.row] = part
        elif not before.failed:
            rows[part.row] = replace(part, prompt_logprobs=before.prompt_logprobs + part.prompt_logprobs)
    return tuple(rows.values())


def spread(sources: Tensor, start: int) -> Tensor:
    """Put hidden states [n, d] of positions from ``start`` on where they stand in a tile [PREFILL_TILE, d]."""
    at = torch.arange(start, start + len(sources), device=sources.device) % PREFILL_TILE
    return sources.new_zeros(PREFILL_TILE, sources.shape[1]).index_copy_(0, at, sources)


def gathered(tile: Tensor, start: int, count: int) -> Tensor:
    """Undo ``spread``."""
    return tile[torch.arange(start, start + count, device=tile.device) % PREFILL_TILE]


def rows_are_alone(compute: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether ``compute``: [T, …] → [T, …] gives a row the same bits at every place and beside any neighbours."""
    want = compute(x)
    last = len(x) - 1
    orders = [[*range(last, -1, -1)], [last, *range(last)], [0] * len(x), [last] * len(x)]
    return all(torch.equal(compute(x[order]), want[order]) for order in orders)


def _parts(prefill: Prefill) -> list[Prefill]:
    stop = prefill.start + len(prefill.tokens)
    edges = [prefill.start, *range(-(-(prefill.start + 1) // PREFILL_TILE) * PREFILL_TILE, stop, PREFILL_TILE), stop]
    return [
        replace(
            prefill,
            tokens=prefill.tokens[a - prefill.start : b - prefill.start],
            start=a,
            draw=prefill.draw if b == stop else None,
        )
        for a, b in pairwise(edges)
    ]


def _tile(prefill: Prefill, max_total_tokens: int) -> Layout:
    first = prefill.start // PREFILL_TILE * PREFILL_TILE
    begin = prefill.start - first
    end = begin + len(prefill.tokens)
    after = PREFILL_TILE - end
    return Layout(
        decodes=(),
        prefills=(prefill,),
        chunks=(Chunk(row=prefill.row, start=prefill.start, begin=begin, end=end),),
        ids=(*[0] * begin, *prefill.tokens, *[0] * after),
        positions=tuple(min(first + i, max_total_tokens - 1) for i in range(PREFILL_TILE)),
        places=(*[BASE] * begin, *[prefill.place] * (end - begin), *[BASE] * after),
        tile=PREFILL_TILE,
    )


def _padded(layout: Layout, tile: int) -> Layout:
    filling: Sequence[int] = [0] * (tile - len(layout.ids))
    return replace(
        layout,
        ids=(*layout.ids, *filling),
        positions=(*layout.positions, *filling),
        places=(*layout.places, *[BASE] * len(filling)),
        tile=tile,
    )
