"""Residency: which version lies in which place of the engine, and which requests are pinned to it. Pure.

A place is rewritten only while no request is pinned to its version. A request pins once and is released once; both
are checked, since a leaked pin would hold a place for ever and a lost one would change a running answer.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from db.records import AdapterName, VersionUid
from infra.errors import UnknownVersion


@dataclass(slots=True, kw_only=True)
class Resident:
    """A version in a place."""

    adapter: AdapterName
    uid: VersionUid
    place: int
    used: int
    """Turn of its last pin or claim: the least recently used goes first."""
    pinned_by: set[Hashable] = field(default_factory=set)


class Places:
    """All places of an engine; adapters come and go, there may be more of them than places.

    An adapter holds at most ``per_adapter``. A version that nobody waits for, which is to take over from one that
    serves, takes no more than its adapter's share of the places among those that have requests (two at least: without
    a second place nothing could take over under load). Where its adapter has two, it does not take the one that serves
    now, nor another adapter's only one.
    """

    def __init__(self, count: int, *, per_adapter: int) -> None:
        self.count = count
        self.per_adapter = per_adapter
        self._by_uid: dict[VersionUid, Resident] = {}
        """In order of coming in."""
        self._by_owner: dict[Hashable, Resident] = {}
        self._turn = 0

    def claim(
        self,
        adapter: AdapterName,
        uid: VersionUid,
        *,
        keep: Collection[VersionUid],
        spare: Collection[VersionUid] = (),
        serving: Collection[VersionUid] = (),
        awaited: bool = False,
    ) -> int | None:
        """Give a version a place and return it; None if there is none now.

        Versions in ``keep`` and pinned ones stay. Of the others those in neither set go first, then ``spare``, then
        ``serving``; of each the least recently used, but before ``serving`` the adapter's own. ``awaited``: requests
        wait for it. The caller writes the place before it publishes the version, and calls ``drop`` if the write fails.
        """
        if uid in self._by_uid:
            return self._by_uid[uid].place
        held = self._held(adapter)
        room = held < (self.per_adapter if awaited else self._share(adapter))
        free = self._free()
        if room and free:
            place = min(free)
        else:
            victim = self._victim(adapter, keep, spare, serving, others=room, last=awaited or held <= 1)
            if victim is None:
                return None
            del self._by_uid[victim.uid]
            place = victim.place
        self._by_uid[uid] = Resident(adapter=adapter, uid=uid, place=place, used=self._tick())
        return place

    def drop(self, uid: VersionUid) -> None:
        """Give up the place of a version that no request is pinned to."""
        resident = self._by_uid[uid]
        assert not resident.pinned_by, f"{uid} is pinned"
        del self._by_uid[uid]

    def pin(self, uid: VersionUid, owner: Hashable) -> int:
        """Hold a version for ``owner`` and return its place."""
        assert owner not in self._by_owner, f"{owner} is pinned already"
        resident = self._by_uid.get(uid)
        if resident is None:
            raise UnknownVersion(f"version {uid} is not resident")
        resident.pinned_by.add(owner)
        resident.used = self._tick()
        self._by_owner[owner] = resident
        return resident.place

    def release(self, owner: Hashable) -> None:
        """Let go of what ``owner`` pinned."""
        resident = self._by_owner.pop(owner)
        resident.pinned_by.remove(owner)

    def place_of(self, uid: VersionUid) -> int | None:
        """Return where a version lies, None if it is not resident."""
        resident = self._by_uid.get(uid)
        return None if resident is None else resident.place

    def uid_at(self, place: int) -> VersionUid | None:
        """Return the version in a place."""
        return next((r.uid for r in self._by_uid.values() if r.place == place), None)

    def pins(self) -> dict[VersionUid, int]:
        """Return how many requests are pinned to each version that has any, in order of coming in."""
        return {r.uid: len(r.pinned_by) for r in self._by_uid.values() if r.pinned_by}

    def full(self, adapter: AdapterName) -> bool:
        """Whether an adapter may have a place only in exchange for one of its own."""
        return self._held(adapter) >= self.per_adapter

    def resident(self) -> tuple[tuple[AdapterName, VersionUid], ...]:
        """Return what is resident, in order of place."""
        return tuple((r.adapter, r.uid) for r in sorted(self._by_uid.values(), key=lambda r: r.place))

    def _tick(self) -> int:
        self._turn += 1
        return self._turn

    def _held(self, adapter: AdapterName) -> int:
        return sum(r.adapter == adapter for r in self._by_uid.values())

    def _free(self) -> set[int]:
        return set(range(self.count)) - {r.place for r in self._by_uid.values()}

    def _share(self, adapter: AdapterName) -> int:
        busy = {adapter} | {r.adapter for r in self._by_uid.values() if r.pinned_by}
        return min(self.per_adapter, max(2, self.count // len(busy)))

    def _victim(
        self,
        adapter: AdapterName,
        keep: Collection[VersionUid],
        spare: Collection[VersionUid],
        serving: Collection[VersionUid],
        *,
        others: bool,
        last: bool,
    ) -> Resident | None:
        """The version that gives way.

        ``others``: it may be another adapter's. ``last``: also its only one, and the adapter's own that serves.
        """

        def worth(resident: Resident) -> int:
            return 2 if resident.uid in serving else int(resident.uid in spare)

        def may_go(resident: Resident) -> bool:
            if resident.pinned_by or resident.uid in keep:
                return False
            if resident.adapter == adapter:
                return last or resident.uid not in serving
            return others and (last or not worth(resident) or self._held(resident.adapter) > 1)

        def rank(resident: Resident) -> tuple[int, bool, int]:
            cost = worth(resident)
            return cost, cost < 2 and resident.adapter != adapter, resident.used

        return min(filter(may_go, self._by_uid.values()), key=rank, default=None)
