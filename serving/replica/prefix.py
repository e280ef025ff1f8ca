"""Which KV positions a new prompt can share with what a row holds already. Pure.

The key is the version's uid, never its place: a place is written again, a uid names the same weights for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

from db.records import VersionUid

BLOCK = 64
"""Tokens that are compared at once, which is ten times as fast as one by one."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the positions of a row, from 0 on, were computed from."""

    uid: VersionUid | None
    """The version that they were computed under; None: the backbone alone."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A row that holds the beginning of a prompt."""

    row: int
    tokens: int


def common_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common from the start."""
    start, n = 0, min(len(a), len(b))
    while start + BLOCK <= n and a[start : start + BLOCK] == b[start : start + BLOCK]:
        start += BLOCK
    a, b = a[start : start + BLOCK], b[start : start + BLOCK]
    return start + next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


def longest(prompt: Held, rows: Iterable[tuple[int, Held]], *, least: int) -> Match | None:
    """Return the row that shares most of a prompt, the first of equal ones; None if none shares ``least`` tokens.

    The prompt's last token is never shared: the logits behind it are wanted.
    """
    best: Match | None = None
    for row, held in rows:
        if held.uid != prompt.uid:
            continue
        tokens = min(common_tokens(prompt.tokens, held.tokens), len(prompt.tokens) - 1)
        if tokens >= least and (best is None or tokens > best.tokens):
            best = Match(row, tokens)
    return best
