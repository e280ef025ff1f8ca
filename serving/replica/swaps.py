"""Swaps: of each adapter one at most waits for its version to lie in a place, then that takes over. Engine thread only.

Of several that wait for one adapter only the latest takes over: whoever waits for the others is told so.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import structlog

from adapters.model import Version
from adapters.pair import Pair
from db.records import AdapterName, VersionUid
from infra.clock import Clock
from infra.errors import EngineDead, VersionConflict
from serving.replica.host_copies import HostCopies
from serving.wire.control import Swap, VersionBody

log = structlog.get_logger()
Kind = Literal["local", "federated", "rollback"]
Transition = Callable[[Pair | None], Pair]


@dataclass(slots=True, kw_only=True)
class Pending:
    """A swap that waits for its version to lie in a place."""

    version: Version
    kind: Kind
    transition: Transition
    """Checked and applied when the version has its place: the pair may have moved on since."""
    ready_s: float
    spent_s: float
    """Engine-thread time so far."""
    done: "Future[VersionBody] | None"

    def refuse(self, error: Exception) -> None:
        """Tell who waits that it is given up."""
        if self.done is not None:
            self.done.set_exception(error)

    def overtaken(self) -> None:
        """Tell who waits that another one takes over instead."""
        self.refuse(VersionConflict(f"{self.version.label} was overtaken by a later version"))


class Swaps:
    """Those that wait; the pairs are theirs to flip."""

    def __init__(
        self,
        pairs: dict[AdapterName, Pair],
        host: HostCopies,
        clock: Clock,
        *,
        may_flip: Callable[[Version], bool],
        made: Callable[[Swap, "Future[VersionBody] | None"], None],
    ) -> None:
        """``may_flip``: whether a version can take over now; ``made`` is told of each flip, and of who waits for it."""
        self._pairs = pairs
        self._host = host
        self._clock = clock
        self._may_flip = may_flip
        self._made = made
        self._pending: dict[AdapterName, Pending] = {}

    def get(self, adapter: AdapterName) -> Pending | None:
        """Return the swap that waits."""
        return self._pending.get(adapter)

    def adapters(self) -> frozenset[AdapterName]:
        """Return the adapters for which one waits."""
        return frozenset(self._pending)

    def uids(self) -> frozenset[VersionUid]:
        """Return the versions that are about to take over."""
        return frozenset(pending.version.uid for pending in self._pending.values())

    def submit(
        self,
        version: Version,
        kind: Kind,
        transition: Transition,
        *,
        ready_s: float | None = None,
        spent_s: float = 0.0,
        done: "Future[VersionBody] | None" = None,
    ) -> None:
        """Let a version take over as soon as it can. ``ready_s``: since when it could, if that is not now."""
        overtaken = self._pending.get(version.adapter)
        # In its place before anything is forgotten: the new version's weights are kept for its sake.
        self._pending[version.adapter] = Pending(
            version=version,
            kind=kind,
            transition=transition,
            ready_s=self._clock.monotonic() if ready_s is None else ready_s,
            spent_s=spent_s,
            done=done,
        )
        if overtaken is not None:
            overtaken.overtaken()
        self.attempt(version.adapter)
        self._host.sweep()

    def settle(self) -> None:
        """Make those that can be made now."""
        for adapter in list(self._pending):
            self.attempt(adapter)

    def attempt(self, adapter: AdapterName) -> None:
        """Make the swap that waits, if that is possible now."""
        pending = self._pending.get(adapter)
        if pending is None:
            return
        begin_s = self._clock.monotonic()
        try:
            after = pending.transition(self._pairs.get(adapter))
            if not self._may_flip(pending.version):
                pending.spent_s += self._clock.monotonic() - begin_s
                return
        except EngineDead:
            raise
        except Exception as error:
            self.refuse(adapter, error)
            return
        del self._pending[adapter]
        self._pairs[adapter] = after
        self._host.unstage(pending.version)
        self._host.sweep()
        now_s = self._clock.monotonic()
        swap = Swap(
            at_s=self._clock.wall(),
            adapter=adapter,
            uid=pending.version.uid,
            label=pending.version.label,
            kind=pending.kind,
            pause_ms=1000 * (now_s - begin_s + pending.spent_s),
            delay_ms=1000 * (now_s - pending.ready_s),
            store_key=None,
        )
        self._made(swap, pending.done)

    def refuse(self, adapter: AdapterName, error: Exception) -> None:
        """Give a swap up: whatever is wrong with its version, the active one goes on."""
        pending = self._pending.pop(adapter)
        log.warning("swap_refused", adapter=adapter, version=pending.version.label, error=str(error))
        pending.refuse(error)
        self._host.sweep()

    def drop(self, adapter: AdapterName, *, kind: Kind) -> None:
        """Give a swap up if it is of that kind."""
        pending = self._pending.get(adapter)
        if pending is None or pending.kind != kind:
            return
        del self._pending[adapter]
        pending.overtaken()
        self._host.sweep()

    def close(self) -> list["Future[VersionBody]"]:
        """Forget all and return who waits."""
        waiting = [pending.done for pending in self._pending.values() if pending.done is not None]
        self._pending.clear()
        return waiting
