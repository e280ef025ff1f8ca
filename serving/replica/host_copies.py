"""Host copies: the versions whose weights a replica keeps in memory, and which of them are staged. Pure.

A copy is kept as long as something can ask for it: a pair or a swap that waits, a place that it lies in, or who staged
it. What only lies in a place that nothing else has taken yet gives way when the room is needed.
"""

from collections.abc import Callable, Collection

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import AdapterName, VersionUid
from infra.errors import NoRoom, UnknownVersion

MAX_STAGED = 4
"""Staged versions per adapter that are not active yet; the oldest is forgotten."""


class HostCopies:
    """Versions and their weights by uid."""

    def __init__(
        self, places: Places, needed: Callable[[], frozenset[VersionUid]], *, max_adapters: int, max_versions: int
    ) -> None:
        """``needed``: the versions that are in force, or about to take over."""
        self._places = places
        self._needed = needed
        self._max_adapters = max_adapters
        self._max_versions = max_versions
        self._held: dict[VersionUid, tuple[Version, LoraWeights]] = {}
        self._staged: dict[AdapterName, dict[VersionUid, None]] = {}
        """In order of staging."""

    def __contains__(self, uid: VersionUid) -> bool:
        return uid in self._held

    def __len__(self) -> int:
        return len(self._held)

    def version(self, uid: VersionUid) -> Version:
        """Return a version. Raises ``UnknownVersion`` if it is not here."""
        return self._copy(uid)[0]

    def weights(self, uid: VersionUid) -> LoraWeights:
        """Return a version's factors. Raises ``UnknownVersion`` if they are not here."""
        return self._copy(uid)[1]

    def federated(self, adapter: AdapterName, uid: VersionUid) -> Version:
        """Return a version that an adapter's base may be. Raises ``UnknownVersion`` if there is no such one here."""
        version, _ = self._held.get(uid, (None, None))
        if version is None or version.adapter != adapter or version.local_steps:
            raise UnknownVersion(f"version {uid} of adapter {adapter!r} has not been staged")
        return version

    def staged(self) -> frozenset[VersionUid]:
        """Return the staged versions of all adapters."""
        return frozenset(uid for uids in self._staged.values() for uid in uids)

    def staging(self) -> frozenset[AdapterName]:
        """Return the adapters that have any staged version."""
        return frozenset(adapter for adapter, uids in self._staged.items() if uids)

    def add(self, version: Version, weights: LoraWeights) -> None:
        """Keep a version."""
        self._held[version.uid] = version, weights

    def stage(self, version: Version, weights: LoraWeights) -> None:
        """Keep a version that serves nothing yet; one that is here already stays as it is."""
        if version.uid not in self._held:
            self.add(version, weights)
        staged = self._staged.setdefault(version.adapter, {})
        if version.uid not in staged:
            staged[version.uid] = None
            while len(staged) > MAX_STAGED:
                del staged[next(iter(staged))]

    def unstage(self, version: Version) -> None:
        """It has become active, or the engine has refused it."""
        self._staged.get(version.adapter, {}).pop(version.uid, None)

    def make_room(
        self,
        adapter: AdapterName,
        uid: VersionUid,
        *,
        known: Collection[AdapterName],
        under_way: Collection[VersionUid],
    ) -> None:
        """Forget what nobody needs, if it takes that for a version. Raises ``NoRoom`` if it is not enough.

        ``known``: the adapters there are. Versions ``under_way`` to their places keep those.
        """
        if adapter not in known and len(known) >= self._max_adapters:
            raise NoRoom(f"this replica holds {self._max_adapters} adapters already (COLLM_REPLICA__ADAPTERS)")
        if uid in self._held:
            return
        if len(self._held) >= self._max_versions:
            self._vacate(under_way)
            self.sweep()
        if len(self._held) >= self._max_versions:
            raise NoRoom(f"this replica's memory holds {len(self._held)} versions already")

    def sweep(self) -> None:
        """Forget the versions that nothing can ask for any more."""
        wanted = self._needed() | self.staged() | {uid for _, uid in self._places.resident()}
        for uid in self._held.keys() - wanted:
            del self._held[uid]

    def _vacate(self, under_way: Collection[VersionUid]) -> None:
        """Give up the places of versions that lie there only because nothing has taken those yet."""
        kept = self._needed() | self.staged() | self._places.pins().keys() | frozenset(under_way)
        for _, uid in self._places.resident():
            if uid not in kept:
                self._places.drop(uid)

    def _copy(self, uid: VersionUid) -> tuple[Version, LoraWeights]:
        copy = self._held.get(uid)
        if copy is None:
            raise UnknownVersion(f"version {uid} is not here")
        return copy
