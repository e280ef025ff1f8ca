"""What the shared model does in the current call: the one switch that linears and attention read.

The engine and the trainer run in one thread and share one model. Whoever calls it sets ``Switch.mode`` for
exactly that call and restores it before returning (``Switch.set``); it is never left set across a yield.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedMode:
    """Several whole sequences side by side in one row: input_ids [1, sum(lengths)], positions from 0 in each.

    Attention is causal and block-diagonal; differentiable in x and in the factors.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, in order."""
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name in ``Backbone.linears`` → (A [r, d_in], B [d_out, r]), any float type; a linear without is plain."""
    scale: float = 1.0
    """y += scale · B (A x)."""


@dataclass(frozen=True)
class TraceMode:
    """One whole sequence; notes how the model is built."""

    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """(name, input) of each linear, in the order of the calls."""
    kv_sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Layer index → (kv heads, head dim)."""
    attention: dict[int, tuple[float | None, int | None]] = field(default_factory=dict)
    """Layer index → (scale of the scores, None: 1/√dim; sliding window, None: all)."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A prefill's share of a step: its tokens are ``x[begin:end]``, written to ``row`` from ``start`` on."""

    row: int
    start: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """The tokens of a step, gathered by the place that they wear: ``count`` slots for each place."""

    count: int
    """The most tokens that wear one place."""
    tokens: Tensor
    """[places · count] which token stands in each slot; any one in a slot that is left over."""
    slots: Tensor
    """[T] where each token stands; anywhere if it wears none."""
    wears: Tensor | None
    """[T, 1] whether a token wears any; None if all do."""


@dataclass(frozen=True, kw_only=True)
class Worn:
    """Which resident versions the tokens of a step wear: places between ``low`` and ``high`` (exclusive)."""

    low: int
    high: int
    place_of: Tensor | None
    """[T] place of each token, ``BASE`` for none; None if all tokens wear the one place ``low``."""
    used: tuple[int, ...] = ()
    """The places that some token wears."""
    by_place: Sorted | None = None
    """Given where each place had better be computed for its own tokens alone; else all are for every token, and
    ``place_of`` chooses."""
    _choices: dict[int, Tensor] = field(default_factory=dict)

    def choice(self, width: int) -> Tensor | None:
        """Return the mask [T, (high - low) · width] of the columns that belong to each token's place."""
        if self.place_of is None:
            return None
        known = self._choices.get(width)
        if known is None:
            columns = torch.arange(self.low, self.high, device=self.place_of.device).repeat_interleave(width)
            known = self._choices[width] = columns[None] == self.place_of[:, None]
        return known

    def wearers(self, place: int) -> Tensor | None:
        """Return which tokens [T, 1] wear a place; None if all do."""
        return None if self.place_of is None else (self.place_of == place)[:, None]


@dataclass(frozen=True, kw_only=True)
class ServingMode:
    """One engine step: input_ids [1, T], first one token for each decoding row, then the prefill chunks.

    Never differentiable.
    """

    keys: tuple[Tensor, ...]
    """By layer: [rows, kv heads, max tokens, head dim]."""
    values: tuple[Tensor, ...]
    rows: Tensor
    """[N] KV row of each decoding token."""
    positions: Tensor
    """[N] where it is written."""
    span: int
    """KV rows 0 to ``span`` (exclusive) hold all decoding rows."""
    width: int
    """Cached positions that decoding looks at: more than the largest of ``positions``."""
    dense: bool
    """``rows`` is 0, 1, …, span - 1."""
    one_by_one: tuple[tuple[int, int], ...]
    """(row, cached positions with its new one) of each decoding row where it is cheaper to attend to each row alone,
    else empty."""
    chunks: tuple[Chunk, ...]
    worn: Worn | None
    """None: no token wears an adapter."""
    tile: int = 0
    """Not 0: a batch-invariant forward of so many tokens: the decoding ones and filling behind, or one chunk with
    filling around."""

    _hidden: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def hidden(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return [span, 1, 1, width]: -inf where a row's new token may not attend to a cached position, else 0.

        It sees the last ``window`` positions up to its own, or all.
        """
        known = self._hidden.get((window, dtype))
        if known is None:
            last = torch.zeros(self.span, 1, dtype=torch.long, device=self.positions.device)
            last[self.rows, 0] = self.positions
            cached = torch.arange(self.width, device=last.device)[None]
            beyond = cached > last
            if window is not None:
                beyond |= cached <= last - window
            known = torch.zeros(beyond.shape, dtype=dtype, device=last.device).masked_fill_(beyond, -torch.inf)
            self._hidden[window, dtype] = known = known[:, None, None]
        return known


Mode = PackedMode | ServingMode | TraceMode | None


class Switch:
    """Holds the mode of the call that is running; None: as transformers alone would compute."""

    def __init__(self) -> None:
        self.mode: Mode = None

    @contextmanager
    def set(self, mode: Mode) -> Iterator[None]:
        """Switch for the body of a ``with`` that must not contain a yield of a generator."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before
