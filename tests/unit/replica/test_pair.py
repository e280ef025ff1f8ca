"""Active and shadow: who may take over from whom."""

from collections.abc import Callable

import pytest

from adapters.model import Version
from adapters.pair import Pair
from db.records import AdapterName, Epoch, RoundId, VersionUid
from infra.errors import UnknownVersion, VersionConflict

CODE = AdapterName("code")


def version(uid: str, number: int = 1, steps: int = 0) -> Version:
    return Version(adapter=CODE, uid=VersionUid(uid), number=number, local_steps=steps)


ONE = version("one")
TWO = version("two", 2)
LOCAL = version("local", 1, 8)


def fresh() -> Pair:
    return Pair(base=ONE, active=ONE, epoch=Epoch(1))


def in_round() -> Pair:
    return fresh().start_round(RoundId("r"), ONE.uid, Epoch(1))


def test_a_promotion_makes_base_and_active_and_keeps_the_previous() -> None:
    pair = fresh().promote(TWO, Epoch(2))
    assert (pair.base, pair.active, pair.previous, pair.epoch) == (TWO, TWO, ONE, 2)
    assert pair.kept == {"one", "two"}


def test_the_same_promotion_again_changes_nothing() -> None:
    pair = fresh().promote(TWO, Epoch(2))
    assert pair.promote(TWO, Epoch(2)) is pair


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_promotion_of_another_version_needs_a_later_epoch(epoch: int) -> None:
    pair = fresh().promote(TWO, Epoch(2))
    with pytest.raises(VersionConflict):
        pair.promote(version("three", 3), Epoch(epoch))


def test_a_child_of_the_shadow_is_published() -> None:
    pair = in_round()
    after = pair.publish(LOCAL, pair.lineage)
    assert (after.active, after.base, after.previous) == (LOCAL, ONE, ONE)
    assert after.lineage == pair.lineage


def test_nothing_is_published_before_a_round() -> None:
    with pytest.raises(VersionConflict):
        fresh().publish(LOCAL, fresh().lineage)


@pytest.mark.parametrize("moved", ["promote", "same base again", "roll_back", "end_round", "start_round"])
def test_a_child_of_what_was_rebased_is_never_published(moved: str) -> None:
    pair = in_round()
    lineage = pair.lineage
    pair = pair.publish(LOCAL, lineage)
    moves: dict[str, Callable[[], Pair]] = {
        "promote": lambda: pair.promote(TWO, Epoch(2)),
        "same base again": lambda: pair.promote(ONE, Epoch(2)),
        "roll_back": pair.roll_back,
        "end_round": pair.end_round,
        "start_round": lambda: pair.start_round(RoundId("next"), ONE.uid, Epoch(1)),
    }
    after = moves[moved]()
    with pytest.raises(VersionConflict):
        after.publish(version("late", 1, 16), lineage)
    restarted = after.start_round(RoundId("other"), after.base.uid, after.epoch)
    with pytest.raises(VersionConflict):
        restarted.publish(version("late", 1, 16), lineage)


def test_a_roll_back_returns_to_what_was_active_and_stops_publishing_until_the_next_round() -> None:
    pair = in_round()
    pair = pair.publish(LOCAL, pair.lineage).roll_back()
    assert pair.active == ONE
    with pytest.raises(VersionConflict):
        pair.publish(version("later", 1, 16), pair.lineage)
    again = pair.start_round(RoundId("next"), ONE.uid, Epoch(1))
    assert again.publish(LOCAL, again.lineage).active == LOCAL


def test_what_was_rolled_back_cannot_be_returned_to() -> None:
    with pytest.raises(UnknownVersion):
        fresh().promote(TWO, Epoch(2)).roll_back().roll_back()


def test_an_aborted_round_gives_way_to_the_base() -> None:
    pair = in_round()
    ended = pair.publish(LOCAL, pair.lineage).end_round()
    assert (ended.active, ended.previous) == (ONE, None)
    assert in_round().end_round().active == ONE


@pytest.mark.parametrize(("uid", "epoch"), [("two", 1), ("one", 2)])
def test_a_round_starts_from_the_version_in_force_only(uid: str, epoch: int) -> None:
    with pytest.raises(VersionConflict):
        fresh().start_round(RoundId("r"), VersionUid(uid), Epoch(epoch))
