"""Prompts that begin alike share what rows hold, under one version only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from db.records import VersionUid
from serving.model import CopyPrefix, RequestId
from serving.replica.kv import KvRows, Taken
from serving.replica.prefix import BLOCK, Held, Match, common_tokens, longest

ONE, TWO = VersionUid("one"), VersionUid("two")


def held(text: str, uid: VersionUid | None = None) -> Held:
    return Held(uid, tuple(text.encode()))


def taken(rows: KvRows, owner: str, prompt: str = "", uid: VersionUid | None = None, **running: Held) -> Taken:
    """Take a row; ``running``: what rows in use hold, as ``r3=…``."""
    in_use = [(int(name[1:]), one) for name, one in running.items()]
    got = rows.take(RequestId(owner), held(prompt, uid) if prompt else None, in_use)
    assert got is not None
    return got


def keeping(*texts: str, rows: int = 4, least: int = 3) -> KvRows:
    """Rows 0, 1, … that hold texts of the backbone, the first used least recently."""
    made = KvRows(rows, 64, least_prefix=least)
    given_out = [taken(made, text).row for text in texts]
    assert given_out == list(range(len(texts)))
    for row, text in enumerate(texts):
        made.give_back(row, held(text))
    return made


@given(st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_tokens_are_those_before_the_first_difference(same: int, a: list[int], b: list[int]) -> None:
    one, other = (*(7,) * same, *a), (*(7,) * same, *b)
    n = common_tokens(one, other)
    assert one[:n] == other[:n]
    assert n in (len(one), len(other)) or one[n] != other[n]


def test_the_longest_beginning_wins_and_leaves_the_last_token_to_compute() -> None:
    rows = [(0, held("abx")), (1, held("abcdefgh")), (2, held("abcdefgh"))]
    assert longest(held("abcd"), rows, least=2) == Match(1, 3)
    assert longest(held("abcdefz"), rows, least=2) == Match(1, 6)
    assert longest(held("ab"), rows, least=2) is None


@pytest.mark.parametrize(("wanted", "known"), [(ONE, TWO), (None, ONE), (ONE, None)])
def test_another_version_shares_nothing(wanted: VersionUid | None, known: VersionUid | None) -> None:
    assert longest(held("abcdef", wanted), [(0, held("abcdef", known))], least=2) is None
    assert longest(held("abcdef", wanted), [(0, held("abcdef", wanted))], least=2) == Match(0, 5)


def test_a_continued_conversation_goes_on_in_its_row() -> None:
    rows = keeping("hello", "abcdef")
    assert taken(rows, "a", "abcdefgh") == Taken(row=1, start=6)


def test_a_row_with_more_to_lose_keeps_it_and_gives_a_copy() -> None:
    rows = keeping("hello", "system: one")
    got = taken(rows, "a", "system: two")
    assert got == Taken(row=2, start=8, copy=CopyPrefix(source=1, target=2, tokens=8))
    assert taken(rows, "b", "system: one more") == Taken(row=1, start=11), "what was copied is there still"


def test_a_running_row_gives_a_copy() -> None:
    rows = keeping()
    assert taken(rows, "a").row == 0
    got = taken(rows, "b", "abcdef", r0=held("abcdxy"))
    assert got == Taken(row=1, start=4, copy=CopyPrefix(source=0, target=1, tokens=4))


def test_the_last_free_row_is_used_in_place_whatever_it_loses() -> None:
    rows = keeping("system: one", rows=2)
    taken(rows, "other")
    assert taken(rows, "a", "system: two") == Taken(row=0, start=8)


def test_rows_are_evicted_by_use() -> None:
    rows = keeping("firstly", "second", "third", rows=3)
    assert taken(rows, "a", "firmly").row == 1, "a copy counts as use of row 0"
    assert taken(rows, "b").row == 2
    assert taken(rows, "c").row == 0
    assert rows.take(RequestId("d")) is None


def test_rows_that_hold_nothing_go_first_lowest_first() -> None:
    rows = keeping("first")
    assert [taken(rows, name).row for name in "abcd"] == [1, 2, 3, 0]


def test_what_failed_or_is_short_is_forgotten() -> None:
    rows = keeping("abcdef", "xy")
    assert rows.kept_tokens == 6
    assert taken(rows, "a", "abcdef").row == 0
    rows.give_back(0)
    assert rows.kept_tokens == 0
    assert taken(rows, "b", "abcdef") == Taken(row=0)


def test_switched_off_nothing_is_kept() -> None:
    rows = KvRows(2, 64)
    rows.give_back(taken(rows, "a", "abcdef").row, held("abcdef"))
    assert rows.kept_tokens == 0
    assert taken(rows, "b", "abcdef", r1=held("abcdef")) == Taken(row=0)


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=8), st.sampled_from([None, ONE]), st.booleans())))
def test_rows_are_never_lost_or_handed_out_twice(calls: list[tuple[str, VersionUid | None, bool]]) -> None:
    rows, running = KvRows(3, 64, least_prefix=2), dict[int, Held]()
    for i, (text, uid, ends) in enumerate(calls):
        if len(running) < 3:
            got = rows.take(RequestId(str(i)), held(text, uid), running.items())
            assert got is not None
            assert got.row not in running
            assert got.start < len(text)
            running[got.row] = held(text, uid)
        if ends and running:
            row = min(running)
            rows.give_back(row, running.pop(row))
        assert rows.free == 3 - len(running)
        assert rows.used == pytest.approx(len(running) / 3)
