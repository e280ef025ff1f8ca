"""Versions that requests wait for: they come in when asked for, first come, first served. Engine thread only.

A version that has come in for a request is held until that request is pinned to it, or has long been gone. Where
every place is in use for long, the version that came in first gets no new requests until its place is free: so each
adapter has its turn, however busy the others are.
"""

from collections.abc import Callable, Mapping
from itertools import islice

import structlog

from adapters.model import Version
from adapters.pair import Pair
from adapters.places import Places
from db.records import AdapterName, VersionUid
from infra.clock import Clock
from infra.errors import EngineDead, NotLoaded
from serving.replica.copying import Copies
from serving.replica.line import FORGIVE_S, Line

log = structlog.get_logger()


class Demand:
    """Which adapters' requests wait, and who gets the next place."""

    def __init__(
        self,
        pairs: Mapping[AdapterName, Pair],
        places: Places,
        copies: Copies,
        clock: Clock,
        *,
        claim: Callable[[Version], bool],
        swaps: Callable[[AdapterName], bool],
    ) -> None:
        """``claim`` begins to copy a version into a place if there is one; ``swaps``: whether a swap that is due makes
        another version active before long, where the active one has no place."""
        self.lacking: tuple[AdapterName, ...] = ()
        """Those in line whose version finds no place now, though they may have one more: nothing else may take one."""
        self._pairs = pairs
        self._places = places
        self._copies = copies
        self._clock = clock
        self._claim = claim
        self._swaps = swaps
        self._line = Line()
        self._closed: frozenset[VersionUid] = frozenset()
        """Versions that get no new requests, so that their places become free for those in line."""
        self._failed: dict[VersionUid, tuple[float, str]] = {}
        """Versions that could not be brought in: when, and why."""

    def serves(self, uid: VersionUid) -> bool:
        """Whether requests can be pinned to a version."""
        return uid not in self._closed and self._copies.lies(uid)

    def ask(self, adapter: AdapterName) -> None:
        """Note that a request waits for an adapter, and bring its version in if that is possible now.

        Raises ``NotLoaded`` if that has failed.
        """
        now_s, active = self._clock.monotonic(), self._pairs[adapter].active
        failed_s, _ = self._failed.get(active.uid, (float("-inf"), ""))
        if now_s - failed_s > FORGIVE_S:
            self._failed.pop(active.uid, None)
            if self._line.ask(adapter, now_s):
                self.bring()
            active = self._pairs[adapter].active
        if active.uid in self._failed:
            raise NotLoaded(f"{adapter} {active.label}: {self._failed[active.uid][1]}")

    def waits(self, adapter: AdapterName) -> bool:
        """Whether an adapter's requests have still to wait; they are here, so it keeps what it has got so far."""
        return self._line.stay(adapter, self._clock.monotonic()) and not self.serves(self._pairs[adapter].active.uid)

    def satisfied(self, adapter: AdapterName) -> float | None:
        """Note that an adapter's version serves a request; return how long requests have waited, if any did."""
        since_s = self._line.leave(adapter)
        return None if since_s is None else self._clock.monotonic() - since_s

    def bring(self) -> None:
        """Give places to those in line."""
        now_s, lacking = self._clock.monotonic(), []
        for adapter in self._line.waiting(now_s):
            if not self._coming(adapter):
                lacking.append(adapter)
        # An adapter that has all it may have waits for its own: no place of others would help it.
        self.lacking = tuple(a for a in lacking if not self._places.full(a))
        late = sum(self._line.overdue(a, now_s) for a in self.lacking)
        serving = {pair.active.uid for pair in self._pairs.values()}
        self._closed = frozenset(islice((uid for uid in self._places.pins() if uid in serving), late))

    def failed(self, version: Version, error: Exception) -> None:
        """An active version could not be brought in: the requests that wait for it fail, as do those that ask soon."""
        log.warning("version_not_brought_in", adapter=version.adapter, version=version.label, error=repr(error))
        now_s = self._clock.monotonic()
        self._failed = {uid: f for uid, f in self._failed.items() if now_s - f[0] <= FORGIVE_S}
        self._failed[version.uid] = now_s, str(error) or repr(error)
        self._line.leave(version.adapter)

    def held(self) -> frozenset[VersionUid]:
        """Return the versions that have come in, or will, for a request that waits."""
        return frozenset(self._pairs[adapter].active.uid for adapter in self._line) - self._closed

    def awaited(self) -> tuple[AdapterName, ...]:
        """Return the adapters whose requests wait, first come first."""
        return tuple(self._line)

    def _coming(self, adapter: AdapterName) -> bool:
        """Whether an adapter's version has its place; begin to copy it there if there is one."""
        if self._places.place_of(self._pairs[adapter].active.uid) is None and self._swaps(adapter):
            return True
        active = self._pairs[adapter].active
        if self._places.place_of(active.uid) is not None:
            return True
        try:
            return self._claim(active)
        except EngineDead:
            raise
        except Exception as error:
            self.failed(active, error)
            return True
