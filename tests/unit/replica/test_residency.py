"""How a version takes over: where it waits, what it leaves alone, what becomes of those it overtakes."""

from concurrent.futures import Future

import numpy as np
import pytest

from adapters.model import LoraWeights, Version
from adapters.places import Places
from db.records import AdapterName, Epoch, LoraSpec, RoundId, VersionUid
from infra.clock import ManualClock
from infra.errors import EngineDead, IncompatibleAdapter, NoRoom, NotLoaded, VersionConflict
from serving.model import RequestId
from serving.replica.copying import Done
from serving.replica.history import History
from serving.replica.line import DRAIN_AFTER_S, FORGIVE_S, HOLD_S
from serving.replica.residency import Residency
from serving.wire.control import VersionBody

CODE = AdapterName("code")
WEIGHTS = LoraWeights(spec=LoraSpec(rank=1, alpha=1, targets=("q",)), tensors={"q": np.zeros(1, np.float32)})


class Site:
    """A residency whose copies end when the test says so."""

    def __init__(self, places: int = 4) -> None:
        self.copies: list[tuple[int, Done]] = []
        self.clock = ManualClock()
        self.residency = Residency(self.copy, Places(places, per_adapter=places), self.clock, history=History())
        self.promote("v1", 1)
        self.end_copy()

    def copy(self, place: int, weights: LoraWeights, done: Done) -> None:
        self.copies.append((place, done))

    def end_copy(self, error: Exception | None = None) -> None:
        self.copies.pop(0)[1](error)
        self.residency.settle()

    def promote(self, uid: str, epoch: int) -> "Future[VersionBody]":
        done: Future[VersionBody] = Future()
        self.residency.stage(Version(adapter=CODE, uid=VersionUid(uid), number=epoch), WEIGHTS)
        self.residency.activate(CODE, VersionUid(uid), Epoch(epoch), done)
        return done

    def publish(self, uid: str, steps: int) -> None:
        version = Version(adapter=CODE, uid=VersionUid(uid), number=1, local_steps=steps)
        lineage = self.residency.pair(CODE).lineage
        self.residency.publish(version, WEIGHTS, lineage, ready_s=self.clock.monotonic())

    def start_round(self) -> None:
        pair = self.residency.pair(CODE)
        self.residency.start_round(CODE, RoundId("r"), pair.base.uid, pair.epoch)

    @property
    def active(self) -> str:
        return self.residency.pair(CODE).active.uid


def test_the_old_version_serves_until_the_new_one_lies_in_its_place() -> None:
    site = Site()
    done = site.promote("v2", 2)
    site.residency.settle()
    assert site.active == "v1"
    pinned = site.residency.pin(CODE, RequestId("a"))
    assert pinned is not None
    assert pinned[0].uid == "v1"
    site.end_copy()
    assert site.active == "v2"
    assert done.result(0).uid == "v2"


def test_of_several_that_wait_for_a_place_the_latest_takes_over() -> None:
    site = Site(places=2)
    site.start_round()
    site.residency.pin(CODE, RequestId("a"))
    site.publish("l1", 1)
    site.end_copy()
    site.residency.pin(CODE, RequestId("b"))
    site.publish("l2", 2)
    site.publish("l3", 3)
    assert site.residency.lacks_place(CODE)
    assert site.active == "l1"
    site.residency.release(RequestId("a"))
    site.residency.settle()
    site.end_copy()
    assert site.active == "l3"


def test_a_version_overtaken_while_it_is_copied_does_not_take_over() -> None:
    site = Site()
    first, second = site.promote("v2", 2), site.promote("v3", 3)
    with pytest.raises(VersionConflict):
        first.result(0)
    site.end_copy()
    assert site.active == "v1"
    site.end_copy()
    assert (site.active, second.result(0).uid) == ("v3", "v3")


def test_a_place_under_copy_is_not_given_away() -> None:
    site = Site(places=2)
    site.promote("v2", 2)
    site.promote("v3", 3)
    assert len(site.copies) == 1
    site.end_copy()
    site.end_copy()
    assert site.active == "v3"
    assert not site.copies


def test_a_version_that_the_engine_refuses_changes_nothing() -> None:
    site = Site()
    done = site.promote("v2", 2)
    site.end_copy(IncompatibleAdapter("rank"))
    with pytest.raises(IncompatibleAdapter):
        done.result(0)
    assert site.active == "v1"
    again = site.promote("v2", 2)
    site.end_copy()
    assert again.result(0).uid == site.active == "v2"


def test_who_stages_is_told_when_it_lies_ready() -> None:
    site = Site()
    staged: list[Future[VersionBody]] = [Future(), Future()]
    version = Version(adapter=CODE, uid=VersionUid("v2"), number=2)
    for done in staged:
        site.residency.stage(version, WEIGHTS, done)
    assert not any(done.done() for done in staged)
    site.end_copy()
    assert [done.result(0).state for done in staged] == ["staged", "staged"]
    assert site.active == "v1"


def test_nobody_waits_for_ever_when_the_replica_stops() -> None:
    site = Site()
    done = site.promote("v2", 2)
    site.residency.close(EngineDead("stopped"))
    with pytest.raises(EngineDead):
        done.result(0)


class Fleet:
    """Five adapters, each with a version, on a few places; what is copied or checked ends when the test says so."""

    names = tuple(AdapterName(name) for name in "abcde")

    def __init__(self, places: int, *, adapters: int = 8, versions: int = 64) -> None:
        self.copies: list[Done] = []
        self.clock = ManualClock()
        self.residency = Residency(
            lambda place, weights, done: self.copies.append(done),
            Places(places, per_adapter=4),
            self.clock,
            history=History(),
            check=lambda weights, done: self.copies.append(done),
            max_adapters=adapters,
            max_versions=versions,
        )

    def know(self, *names: str, number: int = 1) -> None:
        for name in names or self.names:
            version = self.stage(name, number)
            self.residency.activate(version.adapter, version.uid, Epoch(number))
            self.copied()

    def stage(self, name: str, number: int, done: "Future[VersionBody] | None" = None) -> Version:
        version = Version(adapter=AdapterName(name), uid=VersionUid(f"{name}{number}"), number=number)
        self.residency.stage(version, WEIGHTS, done)
        return version

    def copied(self, error: Exception | None = None) -> None:
        while self.copies:
            self.copies.pop(0)(error)
        self.residency.settle()

    def pin(self, name: str, request: str = "r") -> str | None:
        pinned = self.residency.pin(AdapterName(name), RequestId(f"{name}-{request}"))
        return None if pinned is None else pinned[0].uid

    def release(self, name: str, request: str = "r") -> None:
        self.residency.release(RequestId(f"{name}-{request}"))
        self.residency.settle()

    def resident(self) -> list[str]:
        return [v.uid for v in self.residency.resident()]


def test_a_version_without_a_place_comes_in_when_it_is_asked_for() -> None:
    fleet = Fleet(places=2)
    fleet.know()
    assert fleet.resident() == ["a1", "b1"]
    assert [v.uid for v in fleet.residency.active()] == ["a1", "b1", "c1", "d1", "e1"]
    assert fleet.pin("c") is None
    assert fleet.pin("b") == "b1", "the others go on"
    fleet.copied()
    assert fleet.pin("c") == "c1"
    assert fleet.resident() == ["c1", "b1"], "a's was not used lately"


def test_places_are_given_first_come_first_served() -> None:
    fleet = Fleet(places=2)
    fleet.know()
    fleet.pin("a"), fleet.pin("b")
    assert [fleet.pin(name) for name in "ecd"] == [None] * 3
    assert fleet.residency.awaited() == ("e", "c", "d")
    for name, held in (("b", "e"), ("a", "c"), ("e", "d")):
        fleet.release(name)
        fleet.copied()
        assert [n for n in "dce" if fleet.residency.places.place_of(VersionUid(f"{n}1")) is not None and n == held]
        assert fleet.pin(held) == f"{held}1"


def test_what_has_come_in_for_a_request_is_held_for_it_but_not_for_ever() -> None:
    fleet = Fleet(places=1)
    fleet.know()
    assert fleet.pin("b") is None
    fleet.copied()
    assert fleet.pin("c") is None
    assert fleet.resident() == ["b1"]
    fleet.clock.advance(HOLD_S + 0.1)  # nobody asks for b any more
    assert fleet.pin("c") is None
    fleet.copied()
    assert fleet.pin("c") == "c1"


def test_when_every_place_is_in_use_for_long_the_first_to_come_in_gives_way() -> None:
    fleet = Fleet(places=2)
    fleet.know()
    fleet.pin("b"), fleet.pin("a")
    assert fleet.pin("c") is None
    assert fleet.pin("a", "second") == "a1", "not yet"
    fleet.clock.advance(DRAIN_AFTER_S)
    fleet.residency.settle()
    assert fleet.pin("b", "second") == "b1"
    assert fleet.pin("a", "third") is None
    fleet.release("a")
    assert fleet.resident() == ["a1", "b1"], "a request still has it"
    fleet.release("a", "second")
    fleet.copied()
    assert fleet.pin("c") == "c1"
    assert fleet.residency.awaited() == ("a",)


def test_a_version_that_cannot_be_brought_in_fails_its_requests_and_no_others() -> None:
    fleet = Fleet(places=1)
    fleet.know()
    assert fleet.pin("b") is None
    fleet.copied(RuntimeError("no memory"))
    for request in ("r", "second"):
        with pytest.raises(NotLoaded, match="b 1: no memory"):
            fleet.pin("b", request)
    assert fleet.pin("a") is None, "its place was taken for b's"
    fleet.copied()
    assert fleet.pin("a") == "a1"
    fleet.release("a")
    fleet.clock.advance(FORGIVE_S + 0.1)
    assert fleet.pin("b", "later") is None
    fleet.copied()
    assert fleet.pin("b", "later") == "b1"


def test_a_promotion_of_an_adapter_without_a_place_is_made_at_once() -> None:
    fleet = Fleet(places=1)
    fleet.know()
    fleet.pin("a")
    fleet.know("b", number=2)
    assert fleet.residency.pair(AdapterName("b")).active.uid == "b2"
    fleet.release("a")
    assert fleet.pin("b") is None
    fleet.copied()
    assert fleet.pin("b") == "b2"


def test_what_finds_no_place_is_checked_all_the_same() -> None:
    fleet = Fleet(places=1)
    fleet.know()
    done: Future[VersionBody] = Future()
    version = fleet.stage("b", 2, done)
    fleet.residency.activate(version.adapter, version.uid, Epoch(2))
    fleet.residency.settle()
    assert not done.done()
    fleet.copied(IncompatibleAdapter("rank"))
    with pytest.raises(IncompatibleAdapter):
        done.result(0)
    assert fleet.residency.pair(version.adapter).active.uid == "b1"


def test_a_swap_takes_no_place_that_requests_wait_for() -> None:
    fleet = Fleet(places=2)
    fleet.know()
    fleet.pin("a"), fleet.pin("b")
    assert fleet.pin("c") is None
    fleet.know("a", number=2)
    fleet.release("b")
    fleet.copied()
    assert fleet.pin("c") == "c1"
    assert fleet.residency.lacks_place(AdapterName("a"))


def test_the_previous_version_stays_for_a_roll_back_where_places_allow() -> None:
    fleet = Fleet(places=4)
    fleet.know("a", "b")
    fleet.know("a", "b", number=2)
    fleet.know("c", "d")
    assert set(fleet.resident()) == {"a1", "a2", "b1", "b2"}, "c and d are not asked for"
    fleet.residency.roll_back(AdapterName("a"))
    assert fleet.pin("a") == "a1", "at once"
    for name in "cd":
        assert fleet.pin(name) is None
        fleet.copied()
        assert fleet.pin(name) == f"{name}1"
    assert set(fleet.resident()) == {"a1", "b2", "c1", "d1"}, "first what nobody needs, then what may be needed"
    fleet.residency.roll_back(AdapterName("b"))
    fleet.copied()
    assert fleet.pin("b") == "b1", "from host memory"


def test_host_memory_is_bounded() -> None:
    fleet = Fleet(places=2, adapters=3, versions=4)
    fleet.know("a", "b", "c")
    with pytest.raises(NoRoom, match="3 adapters"):
        fleet.stage("d", 1)
    fleet.stage("a", 2)
    with pytest.raises(NoRoom, match="4 versions"):
        fleet.stage("a", 3)
    assert fleet.pin("a") == "a1"


def test_a_version_that_nobody_needs_gives_way_in_host_memory_too() -> None:
    fleet = Fleet(places=4, versions=3)
    fleet.know("a")
    fleet.know("a", number=2)
    fleet.know("a", number=3)
    assert fleet.resident() == ["a1", "a2", "a3"], "a1 is not needed, but nothing has taken its place"
    fleet.stage("b", 1)
    fleet.copied()
    assert fleet.resident() == ["b1", "a2", "a3"]
