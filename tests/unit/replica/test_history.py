"""The audit finds what it is there to find."""

import pytest

from db.records import VersionUid
from serving.model import RequestId
from serving.replica.history import Entry, History, Pinned, Released, Stepped, Wrote, violations

X, Y = VersionUid("x"), VersionUid("y")
R, S = RequestId("r"), RequestId("s")
GOOD: list[Entry] = [
    Wrote(0, X),
    Pinned(R, X, 0),
    Wrote(1, Y),
    Stepped(((R, 0),)),
    Pinned(S, Y, 1),
    Stepped(((R, 0), (S, 1))),
    Released(R),
    Wrote(0, Y),
    Released(S),
]


def test_a_good_history_has_no_violations() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([*GOOD[:4], Wrote(0, Y), Released(R)], "rewritten"),
        ([*GOOD[:4], Wrote(0, Y), Stepped(((R, 0),)), Released(R)], "got y"),
        ([*GOOD[:3], Stepped(((R, 1),)), Released(R)], "got y"),
        ([Wrote(0, X), Stepped(((R, 0),))], "without a pin"),
        ([Wrote(0, X), Pinned(R, Y, 0), Released(R)], "pinned to y"),
        ([Wrote(0, X), Pinned(R, X, 0)], "still pinned"),
        ([Wrote(0, X), Pinned(R, X, 0), Released(R), Released(R)], "released without"),
        ([Wrote(0, X), Pinned(R, X, 0), Released(R), Pinned(R, X, 0), Released(R)], "pinned again"),
    ],
)
def test_each_kind_of_violation_is_found(entries: list[Entry], word: str) -> None:
    assert any(word in v for v in violations(entries))


def test_the_ring_is_bounded_and_the_sink_gets_everything() -> None:
    seen: list[Entry] = []
    history = History(keep=3, sink=seen.append)
    for entry in GOOD:
        history.add(entry)
    assert list(history.latest) == GOOD[-3:]
    assert seen == GOOD
