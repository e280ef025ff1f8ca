"""A round on disk: whole or not at all."""

from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from serving.replica.checkpoints import Checkpoints, RoundNote, SavedRound
from serving.wire.control import RoundBody

BODY = RoundBody(
    round_id="r-1",
    adapter="code",
    base_uid="u",
    epoch=3,
    factor="B",
    tokens=88,
    rows_per_step=2,
    lr=1e-3,
    swap_every=2,
    seed=0,
    deadline_s=100,
)


def saved(steps: int = 3) -> SavedRound:
    note = RoundNote(
        body=BODY,
        rows_sha256="s",
        steps=steps,
        tokens=40,
        candidate_steps=2,
        loss_first=0.1 + 0.2,
        loss_last=None,
        best_ce=1 / 3,
        started_s=1e9 + 1 / 7,
    )
    rng = np.random.default_rng(steps)
    arrays = {
        "values": rng.normal(size=5).astype(np.float32),
        "mean": rng.normal(size=(2, 3)).astype(np.float32),
        "square": np.zeros(0, np.float32),
    }
    return SavedRound(note=note, arrays=arrays)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "training" / "r.safetensors"


def test_what_is_read_is_what_was_written_last(path: Path) -> None:
    file = Checkpoints(path)
    assert file.read("r-1") is None
    for steps in (3, 4):
        file.write(saved(steps))
    read = file.read("r-1")
    assert read is not None
    assert read.note == saved(4).note
    assert {n: (a.shape, a.tobytes()) for n, a in read.arrays.items()} == {
        n: (a.shape, a.tobytes()) for n, a in saved(4).arrays.items()
    }
    assert read.state.steps == 4
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o077 == 0, "it tells of the client's rows"


def test_another_round_is_none_of_ours_and_stays(path: Path) -> None:
    file = Checkpoints(path)
    file.write(saved())
    assert file.read("r-2") is None
    assert file.read("r-1") is not None
    file.clear()
    file.clear()
    assert file.read("r-1") is None


def test_a_broken_file_is_discarded_with_a_warning(path: Path) -> None:
    file = Checkpoints(path)
    file.write(saved())
    good = path.read_bytes()
    at = good.index(b"steps")
    spoilt = [b"", b"\x80\x04pickle", good[:-1], good[:60], good[:-3] + b"???"]
    spoilt += [good[:at] + b"stepz" + good[at + 5 :], good.replace(b'\\"steps\\":3', b'\\"steps\\":4')]
    for data in spoilt:
        assert data != good
        path.write_bytes(data)
        with capture_logs() as logs:
            assert file.read("r-1") is None
        assert [entry["event"] for entry in logs] == ["checkpoint_broken"]
        assert not path.exists()


def test_a_write_that_fails_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Checkpoints(path)
    file.write(saved(3))

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space"):
            file.write(saved(4))
    read = file.read("r-1")
    assert read is not None
    assert read.note.steps == 3


def test_each_replica_has_its_own_file(tmp_path: Path) -> None:
    one, other = Checkpoints.of(tmp_path, "a/../b"), Checkpoints.of(tmp_path, "b")
    one.write(saved(3))
    other.write(saved(4))
    read = one.read("r-1")
    assert read is not None
    assert read.note.steps == 3
    assert len(list((tmp_path / "training").iterdir())) == 2
