"""Rows as tokens, and several of them side by side in one packed micro-batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.replica.text import Tokenizer
from serving.rows import Row, render_prompt


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row's tokens; the loss is over those after the first ``prompt``."""

    ids: tuple[int, ...]
    prompt: int
    """At least 1."""

    @property
    def supervised(self) -> int:
        """How many tokens the loss is over."""
        return len(self.ids) - self.prompt


class RowEncoder:
    """Makes token rows of rows: the prompt as a request has it, the completion, the end-of-sequence token.

    Prompt and completion are tokenised apart, as in generation, where the prompt's tokens are given.
    """

    def __init__(self, tokenizer: Tokenizer, *, eos_id: int | None, row_tokens: int) -> None:
        assert row_tokens >= 2
        self._tokenizer = tokenizer
        self._eos = () if eos_id is None else (eos_id,)
        self._row_tokens = row_tokens
        self._before = tokenizer.encode("")
        """Tokens that the tokenizer puts before every text."""

    def encode(self, row: Row) -> TokenRow:
        """Return at most ``row_tokens`` tokens.

        A longer row loses the start of its prompt until half of the tokens are left for the completion, then the
        completion's end.
        """
        prompt = self._tokenizer.encode(render_prompt(row.prompt))
        text = self._tokenizer.encode(row.completion)
        if self._before and text[: len(self._before)] == self._before:
            text = text[len(self._before) :]
        completion = text + self._eos
        room = self._row_tokens - min(len(completion), self._row_tokens // 2)
        prompt = prompt[-room:]
        return TokenRow((prompt + completion)[: self._row_tokens], len(prompt))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A packed micro-batch of T tokens, S of them supervised."""

    ids: Tensor
    """[T]."""
    positions: Tensor
    """[T], from 0 in each row."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    predicts: Tensor
    """[S] index of the hidden state that predicts each supervised token."""
    labels: Tensor
    """[S] the supervised tokens."""
    supervised: tuple[int, ...]
    """Supervised tokens of each row; S in all."""


def pack(rows: Sequence[TokenRow], device: torch.device) -> Batch:
    """Put rows side by side."""
    ids: list[int] = []
    positions: list[int] = []
    predicts: list[int] = []
    for row in rows:
        start = len(ids)
        ids.extend(row.ids)
        positions.extend(range(len(row.ids)))
        predicts.extend(range(start + row.prompt - 1, start + len(row.ids) - 1))
    tokens = torch.tensor(ids, device=device)
    index = torch.tensor(predicts, dtype=torch.long, device=device)
    return Batch(
        ids=tokens,
        positions=torch.tensor(positions, device=device),
        lengths=tuple(len(row.ids) for row in rows),
        predicts=index,
        labels=tokens[index + 1],
        supervised=tuple(row.supervised for row in rows),
    )


def micro_batches(rows: Iterable[TokenRow], most_tokens: int) -> Iterator[tuple[TokenRow, ...]]:
    """Cut rows, in order, into runs of at most ``most_tokens`` tokens; a longer row is alone."""
    run: list[TokenRow] = []
    tokens = 0
    for row in rows:
        if run and tokens + len(row.ids) > most_tokens:
            yield tuple(run)
            run, tokens = [], 0
        run.append(row)
        tokens += len(row.ids)
    if run:
        yield tuple(run)


def even_batches(rows: Sequence[TokenRow], most_tokens: int) -> list[tuple[TokenRow, ...]]:
    """Cut rows as ``micro_batches`` into as few runs, the largest as small as can be.

    A token costs the more the smaller its run is.
    """
    runs = list(micro_batches(rows, most_tokens))
    low, high = max((len(row.ids) for row in rows), default=0), most_tokens
    while low < high:
        middle = (low + high) // 2
        tried = list(micro_batches(rows, middle))
        if len(tried) == len(runs):
            runs, high = tried, middle
        else:
            low = middle + 1
    return runs
