"""What every ``UpdateStore`` promises."""

import hashlib
import os
from pathlib import Path

import pytest

from adapters.memory import MemoryUpdateStore
from adapters.ports import UpdateStore
from adapters.updates import FsUpdateStore
from infra.clock import ManualClock
from infra.errors import UnknownVersion, UpdateRejected

NOW_S = 1_700_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock."""
    return ManualClock(NOW_S)


@pytest.fixture(params=["memory", "file", "fsspec"])
def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> UpdateStore:
    """Every implementation; the last on a file system that is not the local one."""
    if request.param == "memory":
        return MemoryUpdateStore(clock)
    if request.param == "file":
        return FsUpdateStore((tmp_path / "not yet there").as_uri(), clock)
    return FsUpdateStore(f"memory://{tmp_path.name}", clock)


def test_bytes_come_back_under_their_hash(store: UpdateStore) -> None:
    key = store.put("updates", b"one")
    assert key == f"updates/{hashlib.sha256(b'one').hexdigest()}"
    assert store.put("updates", b"one") == key
    assert store.get(key, max_bytes=3) == b"one"
    assert store.get(store.put("local", b""), max_bytes=0) == b""


def test_more_bytes_than_allowed_are_refused(store: UpdateStore) -> None:
    with pytest.raises(UpdateRejected):
        store.get(store.put("updates", b"four"), max_bytes=3)


@pytest.mark.parametrize("key", ["updates/../secret", "/etc/passwd", "updates/zz", "updates", "", "a/b/" + "0" * 64])
def test_a_key_names_a_hash_and_no_path(store: UpdateStore, key: str) -> None:
    with pytest.raises(UnknownVersion):
        store.get(key, max_bytes=10)
    with pytest.raises(ValueError, match="prefix"):
        store.put("../up", b"x")


def test_what_is_not_there_is_named(store: UpdateStore) -> None:
    with pytest.raises(UnknownVersion):
        store.get("updates/" + "0" * 64, max_bytes=10)


def test_sweep_of_certain_keys_leaves_the_others(clock: ManualClock, tmp_path: Path) -> None:
    for store in (MemoryUpdateStore(clock), FsUpdateStore((tmp_path / "store").as_uri())):
        gone, kept = store.put("versions", b"one"), store.put("versions", b"two")
        clock.advance(100)
        assert store.sweep("versions", older_than_s=-50, only={gone, "versions/" + "0" * 64}) == 1
        assert store.get(kept, max_bytes=3) == b"two"
        with pytest.raises(UnknownVersion):
            store.get(gone, max_bytes=3)


def test_sweep_deletes_the_old_of_one_prefix(clock: ManualClock, tmp_path: Path) -> None:
    store = MemoryUpdateStore(clock)
    old, kept = store.put("updates", b"old"), store.put("versions", b"old")
    clock.advance(100)
    new = store.put("updates", b"new")
    assert store.sweep("updates", older_than_s=50) == 1
    assert store.get(kept, max_bytes=3) + store.get(new, max_bytes=3) == b"oldnew"
    with pytest.raises(UnknownVersion):
        store.get(old, max_bytes=3)


def test_sweep_of_files_goes_by_their_age(clock: ManualClock, tmp_path: Path) -> None:
    store = FsUpdateStore(tmp_path.as_uri(), clock)
    assert store.sweep("updates", older_than_s=50) == 0
    old, new, again = (store.put("updates", data) for data in (b"old", b"new", b"again"))
    for key in (old, again):
        os.utime(tmp_path / key, (NOW_S - 51, NOW_S - 51))
    os.utime(tmp_path / new, (NOW_S - 49, NOW_S - 49))
    left_over = tmp_path / "updates" / ".half"
    left_over.write_bytes(b"hal")
    os.utime(left_over, (NOW_S - 99, NOW_S - 99))
    store.put("updates", b"again")  # whoever puts it again counts on it
    assert store.sweep("updates", older_than_s=50) == 2
    assert {path.name for path in (tmp_path / "updates").iterdir()} == {Path(new).name, Path(again).name}


def test_a_damaged_file_is_refused_and_healed_by_the_next_put(tmp_path: Path) -> None:
    store = FsUpdateStore(tmp_path.as_uri())
    key = store.put("versions", b"weights")
    (tmp_path / key).write_bytes(b"weightz")
    with pytest.raises(UpdateRejected):
        store.get(key, max_bytes=100)
    store.put("versions", b"weights")
    assert store.get(key, max_bytes=100) == b"weights"
    assert [path.name for path in (tmp_path / "versions").iterdir()] == [Path(key).name]
