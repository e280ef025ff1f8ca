"""Accounting of KV rows: who holds which, and what those hold that nobody has now. Pure; the tensors are the engine's.

A row that is given back keeps its content until another request needs the row. A prompt that begins like it goes on
in place, or gets the common part copied into a row of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from infra.errors import PromptTooLong
from serving.model import CopyPrefix, RequestId
from serving.replica.prefix import Held, longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A row handed out."""

    row: int
    start: int = 0
    """Positions that need not be computed, once ``copy`` is carried out."""
    copy: CopyPrefix | None = None


class KvRows:
    """Rows of equal capacity, one per running request; unused ones first, lowest first, so that steps work on few."""

    def __init__(self, rows: int, max_total_tokens: int, *, least_prefix: int | None = None) -> None:
        """``least_prefix``: shorter common beginnings are not worth a row's choice; None: nothing is kept."""
        self.rows = rows
        self.max_total_tokens = max_total_tokens
        self._least = least_prefix
        self._blank = set(range(rows))
        self._kept: dict[int, Held] = {}
        """Free rows with what they hold, the least recently used first."""
        self._owner: dict[int, RequestId] = {}

    def check(self, total_tokens: int) -> None:
        """Raise ``PromptTooLong`` if a request of that many tokens, answer included, can never fit."""
        if total_tokens > self.max_total_tokens:
            raise PromptTooLong(
                "`inputs` tokens + `max_new_tokens` must be <= "
                f"{self.max_total_tokens}. Given: {total_tokens} tokens in all"
            )

    def take(
        self, owner: RequestId, prompt: Held | None = None, running: Iterable[tuple[int, Held]] = ()
    ) -> Taken | None:
        """Hand out a row; None if all are taken.

        ``prompt``: what is to be computed, if what a row holds may be used for it: a free one or one of ``running``
        (row and what is computed in it).
        """
        if self.free == 0:
            return None
        match = None
        if prompt is not None and self._least is not None:
            match = longest(prompt, (*self._kept.items(), *running), least=self._least)
        if match is None:
            return self._hand_out(owner, self._least_used())
        kept = self._kept.get(match.row)
        if kept is not None:
            self._kept[match.row] = self._kept.pop(match.row)  # used just now
            # In place where next to nothing would be lost by it, or no other row is free.
            if len(kept.tokens) - match.tokens < (self._least or 0) or self.free == 1:
                return self._hand_out(owner, match.row, start=match.tokens)
        target = self._least_used()
        copy = CopyPrefix(source=match.row, target=target, tokens=match.tokens)
        return self._hand_out(owner, target, start=match.tokens, copy=copy)

    def give_back(self, row: int, held: Held | None = None) -> None:
        """Free a row; ``held``: its valid content, None if there is none."""
        del self._owner[row]
        if held is None or self._least is None or len(held.tokens) < self._least:
            self._blank.add(row)
        else:
            self._kept[row] = held

    def owner(self, row: int) -> RequestId:
        """Return who holds a row."""
        return self._owner[row]

    @property
    def free(self) -> int:
        """How many rows are free."""
        return self.rows - len(self._owner)

    @property
    def used(self) -> float:
        """Share of the rows in use; rows that only keep something are free."""
        return len(self._owner) / self.rows

    @property
    def kept_tokens(self) -> int:
        """Positions that free rows hold for prompts to come."""
        return sum(len(held.tokens) for held in self._kept.values())

    def _least_used(self) -> int:
        return min(self._blank) if self._blank else next(iter(self._kept))

    def _hand_out(self, owner: RequestId, row: int, *, start: int = 0, copy: CopyPrefix | None = None) -> Taken:
        self._blank.discard(row)
        self._kept.pop(row, None)
        self._owner[row] = owner
        return Taken(row=row, start=start, copy=copy)
