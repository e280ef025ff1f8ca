"""Residency: pins, shares, and who gives way."""

import pytest

from adapters.places import Places
from db.records import AdapterName, VersionUid
from infra.errors import UnknownVersion

A, B, C = AdapterName("a"), AdapterName("b"), AdapterName("c")


def uids(*names: str) -> frozenset[VersionUid]:
    return frozenset(VersionUid(n) for n in names)


def uid(name: str) -> VersionUid:
    return VersionUid(name)


def filled(count: int, per_adapter: int, *names: str) -> Places:
    places = Places(count, per_adapter=per_adapter)
    for name in names:
        assert places.claim(A, uid(name), keep=()) is not None
    return places


def hold(places: Places, adapter: AdapterName, name: str) -> None:
    """Bring a version in for a request, which keeps it."""
    assert places.claim(adapter, uid(name), keep=(), awaited=True) is not None
    places.pin(uid(name), f"request for {name}")


def test_places_are_taken_lowest_first() -> None:
    places = filled(4, 4, "x", "y")
    assert [places.place_of(uid(n)) for n in "xy"] == [0, 1]
    assert places.claim(A, uid("x"), keep=()) == 0, "a resident version keeps its place"


def test_a_pinned_version_is_never_evicted() -> None:
    places = filled(2, 2, "x", "y")
    places.pin(uid("x"), "r1")
    places.pin(uid("y"), "r2")
    assert places.claim(A, uid("z"), keep=()) is None
    places.release("r1")
    assert places.claim(A, uid("z"), keep=()) == 0
    assert places.place_of(uid("x")) is None


def test_kept_versions_stay_and_spared_ones_go_last() -> None:
    places = filled(3, 3, "kept", "spared", "plain")
    places.pin(uid("plain"), "r")
    places.release("r")
    assert places.claim(A, uid("n"), keep=uids("kept"), spare=uids("spared")) == 2
    assert places.claim(A, uid("m"), keep=uids("kept", "n"), spare=uids("spared")) == 1
    assert places.claim(A, uid("o"), keep=uids("kept", "n", "m")) is None


def test_the_least_recently_used_gives_way() -> None:
    places = filled(3, 3, "x", "y", "z")
    places.pin(uid("x"), "r")
    places.release("r")
    assert places.claim(A, uid("n"), keep=()) == 1


def test_an_adapter_has_at_most_its_share() -> None:
    places = filled(8, 3, "x", "y", "z")
    assert places.claim(A, uid("n"), keep=()) == 0
    assert len(places.resident()) == 3


def test_versions_that_serve_go_last_and_in_order_of_use() -> None:
    places = Places(3, per_adapter=3)
    for adapter, name in ((A, "a"), (B, "b"), (B, "old")):
        places.claim(adapter, uid(name), keep=())
    places.pin(uid("a"), "r")
    places.release("r")
    serving, spare = uids("a", "b"), uids("old")
    assert places.claim(C, uid("c1"), keep=(), spare=spare, serving=serving, awaited=True) == 2
    assert places.claim(C, uid("c2"), keep=uids("c1"), spare=spare, serving=serving, awaited=True) == 1, (
        "not used lately"
    )


def test_with_more_adapters_than_places_every_one_gets_a_place_in_its_turn() -> None:
    places = Places(2, per_adapter=2)
    for name in "abcdabcd":
        adapter, serving = AdapterName(name), uids(*"abcd")
        assert places.claim(adapter, uid(name), keep=(), serving=serving, awaited=True) is not None
        places.pin(uid(name), "r")
        places.release("r")
    assert [u for _, u in places.resident()] == ["c", "d"]


def test_what_is_to_take_over_gets_a_second_place_from_an_idle_adapter_but_no_third() -> None:
    places = Places(3, per_adapter=3)
    hold(places, A, "a1")
    for adapter, name in ((B, "b"), (C, "c")):
        places.claim(adapter, uid(name), keep=())
    serving = uids("a1", "b", "c")
    assert places.claim(A, uid("a2"), keep=(), serving=serving) == 1
    places.pin(uid("a2"), "r2")
    assert places.claim(A, uid("a3"), keep=(), serving=uids("a2", "b", "c")) is None
    assert places.place_of(uid("c")) == 2


def test_a_busy_adapter_keeps_to_its_share_when_others_are_busy_too() -> None:
    places = Places(6, per_adapter=4)
    for name in ("a1", "a2"):
        hold(places, A, name)
    assert places.claim(A, uid("a3"), keep=()) == 2, "alone it may have four"
    places.drop(uid("a3"))
    hold(places, B, "b")
    hold(places, C, "c")
    assert places.claim(A, uid("a3"), keep=()) is None, "two of six each, though two places are free"
    assert places.claim(B, uid("b2"), keep=()) is not None
    assert places.claim(A, uid("a3"), keep=(), awaited=True) is not None, "requests wait for it"


def test_an_adapter_never_has_more_places_than_it_may() -> None:
    places = Places(4, per_adapter=2)
    hold(places, A, "a1")
    hold(places, A, "a2")
    assert places.full(A)
    assert places.claim(A, uid("a3"), keep=(), awaited=True) is None
    places.release("request for a1")
    assert places.claim(A, uid("a3"), keep=(), awaited=True) == 0


def test_a_request_pins_once_and_is_released_once() -> None:
    places = filled(1, 1, "x")
    places.pin(uid("x"), "r")
    with pytest.raises(AssertionError):
        places.pin(uid("x"), "r")
    assert places.pins() == {"x": 1}
    with pytest.raises(AssertionError):
        places.drop(uid("x"))
    places.release("r")
    with pytest.raises(KeyError):
        places.release("r")
    with pytest.raises(UnknownVersion):
        places.pin(uid("gone"), "s")
