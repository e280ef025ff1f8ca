"""Versions on one replica: which is active, where it lies, and how the next one takes over. Engine thread only.

Every version that may be needed again has a copy in host memory; the engine's places hold some of them.
There may be more adapters than places: an active version without one comes in when a request asks for it, first come,
first served, in the place of the least recently used that no request holds. The request waits, others do not.

A swap is a pointer flip between two steps, once the new version lies in a place; while it is copied there, beside the
engine's thread, or no place is free it waits, and of several that wait for one adapter only the latest takes over.
Requests never wait for a swap. Where the old version has no place, nobody is served by it: the flip is made at once.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from adapters.model import LoraWeights, Version
from adapters.pair import Lineage, Pair
from adapters.places import Places
from db.records import AdapterName, Epoch, RoundId, VersionUid
from infra.clock import Clock
from infra.errors import UnknownAdapter, UnknownVersion, VersionConflict
from serving.model import RequestId
from serving.replica.copying import Check, Copies, Copy, Waiting, checked_at_once
from serving.replica.demand import Demand
from serving.replica.history import History, Pinned, Released
from serving.replica.host_copies import MAX_STAGED, HostCopies
from serving.replica.inbox import promise
from serving.replica.swaps import Swaps
from serving.wire.control import Swap, VersionBody

MAX_SWAPS = 256


class Residency:
    """Pairs, and the swaps between their versions, of all adapters of one engine; implements ``scheduler.Versions``."""

    def __init__(
        self,
        copy: Copy,
        places: Places,
        clock: Clock,
        *,
        history: History,
        check: Check | None = None,
        max_adapters: int = 64,
        max_versions: int = 512,
        on_swap: Callable[[Swap], None] = lambda swap: None,
        on_arrival: Callable[[Version, float], None] = lambda version, waited_s: None,
    ) -> None:
        """``check``: whether the engine would take a version that gets no place now; without one it is believed.

        Both limits are of host memory. ``on_arrival`` is told of a version that requests waited for, and how long.
        """
        self.places = places
        self.swaps: deque[Swap] = deque(maxlen=MAX_SWAPS)
        self.swaps_total = 0
        self.pairs: dict[AdapterName, Pair] = {}
        self._clock = clock
        self._on_swap = on_swap
        self._on_arrival = on_arrival
        self._history = history
        self._host = HostCopies(
            places,
            needed=lambda: self._kept() | self._swaps.uids(),
            max_adapters=max_adapters,
            max_versions=max_versions,
        )
        self._copies = Copies(copy, check or checked_at_once(lambda weights: None), places, history, self._ended)
        self._swaps = Swaps(self.pairs, self._host, clock, may_flip=self._may_flip, made=self._made)
        self._demand = Demand(
            self.pairs,
            places,
            self._copies,
            clock,
            claim=lambda version: self._claim(version, awaited=True),
            swaps=self._swaps_soon,
        )

    # What requests use.

    def pin(self, adapter: AdapterName, owner: RequestId) -> tuple[Version, int] | None:
        """See ``scheduler.Versions``. Raises ``NotLoaded`` if the version cannot be brought in."""
        active = self.pair(adapter).active
        if not self._demand.serves(active.uid):
            self._demand.ask(adapter)
            active = self.pair(adapter).active
            if not self._demand.serves(active.uid):
                return None
        waited_s = self._demand.satisfied(adapter)
        if waited_s is not None:
            self._on_arrival(active, waited_s)
        place = self.places.pin(active.uid, owner)
        self._history.add(Pinned(owner, active.uid, place))
        return active, place

    def waits(self, adapter: AdapterName) -> bool:
        """See ``scheduler.Versions``."""
        return self._demand.waits(adapter)

    def release(self, owner: RequestId) -> None:
        """See ``scheduler.Versions``."""
        self.places.release(owner)
        self._history.add(Released(owner))

    def pair(self, adapter: AdapterName) -> Pair:
        """Return the state of an adapter. Raises ``UnknownAdapter``."""
        pair = self.pairs.get(adapter)
        if pair is None:
            raise UnknownAdapter(f"no adapter named {adapter!r} is registered")
        return pair

    def weights(self, uid: VersionUid) -> LoraWeights:
        """Return a version's factors. Raises ``UnknownVersion`` if they are not here."""
        return self._host.weights(uid)

    # What changes versions. Each is checked before anything changes.

    def stage(self, version: Version, weights: LoraWeights, done: "Future[VersionBody] | None" = None) -> None:
        """Take a validated version in; it serves nothing yet. If a place is free it is copied there now.

        ``done`` is told when it is staged, or that the engine refuses it; without one a refusal is raised if it comes
        at once. Raises ``NoRoom`` for one adapter or version too many.
        """
        self.make_room(version.adapter, version.uid)
        self._host.stage(version, weights)
        waiting = done or promise()
        self._bring_staged(version, waiting)
        self._host.sweep()
        if done is None and waiting.done():
            waiting.result()

    def make_room(self, adapter: AdapterName, uid: VersionUid) -> None:
        """Forget what nobody needs, if it takes that for a version. Raises ``NoRoom`` if it is not enough."""
        self._host.make_room(adapter, uid, known=self.known(), under_way=self._copies.uids())

    def activate(
        self, adapter: AdapterName, uid: VersionUid, epoch: Epoch, done: "Future[VersionBody] | None" = None
    ) -> None:
        """Make a staged version base and active as soon as it has a place; ``done`` is told.

        Raises ``UnknownVersion`` if it was not staged, ``VersionConflict`` if the epoch has moved on.
        """
        version = self._host.federated(adapter, uid)

        def promoted(pair: Pair | None) -> Pair:
            if pair is None:
                return Pair(base=version, active=version, epoch=epoch)
            return pair.promote(version, epoch)

        before = self.pairs.get(adapter)
        if promoted(before) is before:
            if done is not None:
                done.set_result(self.body(uid))
            return
        self._swaps.submit(version, "federated", promoted, done=done)

    def roll_back(self, adapter: AdapterName, done: "Future[VersionBody] | None" = None) -> None:
        """Return to the previous active version."""
        target = self.pair(adapter).roll_back().active
        self._swaps.submit(target, "rollback", lambda pair: _there(pair).roll_back(), done=done)

    def publish(
        self, version: Version, weights: LoraWeights, lineage: Lineage, *, ready_s: float, copied_s: float = 0.0
    ) -> None:
        """Make a local version active as soon as it has a place. Raises ``VersionConflict`` if it is stale."""
        self.pair(version.adapter).publish(version, lineage)
        waiting = self._swaps.get(version.adapter)
        if waiting is not None and waiting.kind != "local":
            raise VersionConflict(f"{version.adapter} {version.label}: {waiting.version.label} is about to take over")
        self._host.add(version, weights)
        self._swaps.submit(
            version, "local", lambda pair: _there(pair).publish(version, lineage), ready_s=ready_s, spent_s=copied_s
        )

    def start_round(self, adapter: AdapterName, round_id: RoundId, base_uid: VersionUid, epoch: Epoch) -> Pair:
        """Begin the shadow anew at the base. Raises ``VersionConflict``."""
        self.pairs[adapter] = pair = self.pair(adapter).start_round(round_id, base_uid, epoch)
        return pair

    def end_round(self, adapter: AdapterName) -> None:
        """Drop the shadow; if a local version is active its base takes over again."""
        pair = self.pair(adapter)
        ended = pair.end_round()
        self._swaps.drop(adapter, kind="local")
        # Until the base has a place the local version answers, but no other one may follow it.
        self.pairs[adapter] = replace(pair, generation=ended.generation, may_publish=False)
        if ended.active.uid == pair.active.uid or self._swaps.get(adapter) is not None:
            return
        self._swaps.submit(ended.active, "rollback", lambda pair: _there(pair).end_round())

    def settle(self) -> None:
        """Bring in what requests wait for, then let swaps take over where there is a place; called between steps."""
        self._demand.bring()
        self._swaps.settle()

    def close(self, error: Exception) -> None:
        """Tell everybody who waits for a version that none will come."""
        waiting = self._swaps.close() + self._copies.close()
        for one in waiting:
            if not one.done():
                one.set_exception(error)

    def waiting_for(self, adapter: AdapterName) -> VersionUid | None:
        """Return the version that waits for a place to take over."""
        pending = self._swaps.get(adapter)
        return None if pending is None else pending.version.uid

    def lacks_place(self, adapter: AdapterName) -> bool:
        """Whether a swap waits because every place is in use."""
        pending = self._swaps.get(adapter)
        return pending is not None and pending.version.uid not in self._copies

    # What people see.

    def body(self, uid: VersionUid) -> VersionBody:
        """Return a version as the control API shows it."""
        version = self._host.version(uid)
        pair = self.pairs.get(version.adapter)
        state: Literal["staged", "active", "previous"] = "staged"
        if pair is not None and uid == pair.active.uid:
            state = "active"
        elif pair is not None and pair.previous is not None and uid == pair.previous.uid:
            state = "previous"
        return VersionBody(adapter=version.adapter, uid=uid, number=version.number, label=version.label, state=state)

    def active(self) -> tuple[Version, ...]:
        """Return the active version of each adapter, by name."""
        return tuple(self.pairs[name].active for name in sorted(self.pairs))

    def resident(self) -> tuple[Version, ...]:
        """Return the versions that lie in places, in order of place."""
        return tuple(self._host.version(uid) for _, uid in self.places.resident() if uid not in self._copies)

    def known(self) -> frozenset[AdapterName]:
        """Return the adapters that have any version here."""
        return frozenset(self.pairs.keys() | self._swaps.adapters() | self._host.staging())

    def awaited(self) -> tuple[AdapterName, ...]:
        """Return the adapters whose requests wait for a place, or to be copied into one, first come first."""
        return self._demand.awaited()

    # How versions get their places, and take over.

    def _made(self, swap: Swap, done: "Future[VersionBody] | None") -> None:
        self.swaps.append(swap)
        self.swaps_total += 1
        if done is not None:
            done.set_result(self.body(VersionUid(swap.uid)))
        self._on_swap(swap)

    def _may_flip(self, version: Version) -> bool:
        """Return whether a version can take over now; begin to copy it if there is a place for it."""
        if version.uid in self._copies:
            return False
        if self.places.place_of(version.uid) is not None:
            return True
        pair = self.pairs.get(version.adapter)
        if pair is None or self.places.place_of(pair.active.uid) is None:
            return True
        if not self._demand.lacking:
            self._claim(version, awaited=False)
        return self._copies.lies(version.uid)

    def _swaps_soon(self, adapter: AdapterName) -> bool:
        """Make a swap whose old version has no place; whether it has still to wait for the new one's copy."""
        self._swaps.attempt(adapter)
        pending = self._swaps.get(adapter)
        return pending is not None and pending.version.uid in self._copies

    def _bring_staged(self, version: Version, waiting: "Future[VersionBody]") -> None:
        uid, place = version.uid, None
        if uid in self._copies:
            self._copies.join(uid, waiting)
        elif self.places.place_of(uid) is not None:
            waiting.set_result(self.body(uid))
        else:
            if not self._demand.lacking:
                keep = self._kept() | self._copies.uids()
                place = self.places.claim(version.adapter, uid, keep=keep)
            self._copies.begin(version, self.weights(uid), place, waiting)

    def _claim(self, version: Version, *, awaited: bool) -> bool:
        """Begin to copy a version into a place if there is one for it now."""
        serving = frozenset(pair.active.uid for pair in self.pairs.values())
        # What requests are about to use, or what is about to take over, has come in for that.
        held = self._demand.held() | self._swaps.uids()
        place = self.places.claim(
            version.adapter,
            version.uid,
            keep=held | self._copies.uids(),
            spare=self._kept() | self._host.staged(),
            serving=serving,
            awaited=awaited,
        )
        if place is not None:
            self._copies.begin(version, self.weights(version.uid), place)
        return place is not None

    def _ended(self, version: Version, error: Exception | None, waiting: Waiting) -> None:
        """Between two steps: a version lies in its place, or the engine has refused it."""
        if error is None and version.uid not in self._host:
            error = UnknownVersion(f"{version.adapter} {version.label}: {MAX_STAGED} later versions have been staged")
        if error is None:
            for one in waiting:
                one.set_result(self.body(version.uid))
            return  # a swap that waits for it is settled within this turn, a request pins it at the next plan
        self._host.unstage(version)
        for one in waiting:
            one.set_exception(error)
        pending, pair = self._swaps.get(version.adapter), self.pairs.get(version.adapter)
        if pending is not None and pending.version.uid == version.uid:
            self._swaps.refuse(version.adapter, error)
        if pair is not None and pair.active.uid == version.uid:
            self._demand.failed(version, error)
        self._host.sweep()

    def _kept(self) -> frozenset[VersionUid]:
        return frozenset().union(*(pair.kept for pair in self.pairs.values()))


def _there(pair: Pair | None) -> Pair:
    assert pair is not None
    return pair
