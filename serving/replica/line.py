"""Adapters whose requests wait for a place, first come, first served. Pure; times are monotonic and passed in."""

from collections.abc import Iterator
from dataclasses import dataclass

from db.records import AdapterName

HOLD_S = 2.0
"""A version that has come in for a request is held for it; a request that has not been heard of for so long is gone."""
DRAIN_AFTER_S = 0.5
"""After waiting for so long while every place is pinned, some version gets no new requests until its place is free."""
FORGIVE_S = 1.0
"""A version that could not be brought in fails its requests for so long before it is tried again."""


@dataclass(slots=True)
class _Want:
    since_s: float
    asked_s: float


class Line:
    """Who waits, in order."""

    def __init__(self) -> None:
        self._wants: dict[AdapterName, _Want] = {}

    def ask(self, adapter: AdapterName, now_s: float) -> bool:
        """Note that a request waits for an adapter; whether it is the first to."""
        want = self._wants.get(adapter)
        if want is not None and now_s - want.asked_s <= HOLD_S:
            want.asked_s = now_s
            return False
        self._wants.pop(adapter, None)
        self._wants[adapter] = _Want(now_s, now_s)
        return True

    def stay(self, adapter: AdapterName, now_s: float) -> bool:
        """Note that an adapter's requests are still there; whether it is in line."""
        want = self._wants.get(adapter)
        if want is None:
            return False
        want.asked_s = now_s
        return True

    def leave(self, adapter: AdapterName) -> float | None:
        """Note that an adapter's requests wait no more; return when the first of them began to, if any did."""
        want = self._wants.pop(adapter, None)
        return None if want is None else want.since_s

    def waiting(self, now_s: float) -> tuple[AdapterName, ...]:
        """Return who waits, in order; those that nobody has asked for lately are dropped."""
        for adapter in [a for a, want in self._wants.items() if now_s - want.asked_s > HOLD_S]:
            del self._wants[adapter]
        return tuple(self._wants)

    def overdue(self, adapter: AdapterName, now_s: float) -> bool:
        """Whether an adapter has waited so long that others must make room."""
        want = self._wants.get(adapter)
        return want is not None and now_s - want.since_s >= DRAIN_AFTER_S

    def __iter__(self) -> Iterator[AdapterName]:
        return iter(self._wants)
