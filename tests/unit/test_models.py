"""The model cache: whole or not there; broken copies are fetched again."""

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import ConfigError
from infra.models import PullFailed, backbone_sha256, cache_folder, model_dir, pull
from infra.settings import ModelSettings, Settings


class FakeSource:
    """Writes a tiny model; counts how often."""

    name = "fake"

    def __init__(self) -> None:
        self.fetched = 0

    def fetch(self, model: str, target: Path) -> None:
        self.fetched += 1
        write_model(target)


class BrokenSource:
    """Leaves what ``spoil`` makes of a model."""

    name = "broken"

    def __init__(self, spoil: Callable[[Path], None]) -> None:
        self.spoil = spoil

    def fetch(self, model: str, target: Path) -> None:
        write_model(target)
        self.spoil(target)


class DeadSource:
    """Cannot be reached."""

    name = "dead"

    def fetch(self, model: str, target: Path) -> None:
        (target / "half").write_bytes(b"x")
        raise PullFailed("no route")


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", model=ModelSettings(name="someone/tiny"))


def test_pulled_once_then_found(settings: Settings) -> None:
    source = FakeSource()
    folder = pull(settings, [source])
    assert pull(settings, [source]) == folder == model_dir(settings)
    assert source.fetched == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "collm.json").unlink(),
        lambda folder: (folder / "collm.json").write_text('{"files": 3}'),
        lambda folder: (folder / "collm.json").write_text("{"),
    ],
)
def test_a_broken_cache_is_noticed_and_fetched_again(settings: Settings, damage: Callable[[Path], None]) -> None:
    source = FakeSource()
    folder = pull(settings, [source])
    damage(folder)
    with pytest.raises(ConfigError, match=r"COLLM_MODEL__NAME: someone/tiny is .* in the cache.*collm model pull"):
        model_dir(settings)
    pull(settings, [source])
    assert model_dir(settings) == folder
    assert source.fetched == 2


def test_a_flipped_bit_is_found_by_pull(settings: Settings) -> None:
    source = FakeSource()
    weights = pull(settings, [source]) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    pull(settings, [source])
    assert source.fetched == 2
    assert weights.read_bytes()[-1] == 0


def test_the_next_source_is_taken_and_nothing_half_is_left(settings: Settings) -> None:
    folder = pull(settings, [DeadSource(), FakeSource()])
    assert not (folder / "half").exists()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["someone--tiny", "someone--tiny.lock"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 20), "is no safetensors file"),
        (lambda folder: os.truncate(folder / "model.safetensors", 70), "is cut short"),
    ],
)
def test_what_a_source_gives_is_checked(settings: Settings, spoil: Callable[[Path], None], reason: str) -> None:
    with pytest.raises(PullFailed, match=f"dead: no route; broken: .*{reason}"):
        pull(settings, [DeadSource(), BrokenSource(spoil)])
    assert not cache_folder(settings).exists()


def test_two_pulls_at_once_fetch_once(settings: Settings) -> None:
    source = FakeSource()
    threads = [threading.Thread(target=pull, args=(settings, [source])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.fetched == 1


def test_a_cache_that_cannot_be_written_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="COLLM_CACHE_DIR"):
        pull(settings, [FakeSource()])


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_leads_out_of_the_cache_deletes_nothing(settings: Settings, name: str) -> None:
    folder = pull(settings, [FakeSource()])
    strange = settings.model_copy(update={"model": settings.model.model_copy(update={"name": name})})
    with pytest.raises(ConfigError, match="COLLM_MODEL__NAME"):
        pull(strange, [FakeSource()])
    assert model_dir(settings) == folder


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    settings = Settings(model=ModelSettings(path=tmp_path))
    with pytest.raises(ConfigError, match="COLLM_MODEL__PATH"):
        model_dir(settings)
    write_model(tmp_path)
    assert model_dir(settings) == tmp_path == pull(settings, [])


def test_the_backbone_is_named_by_its_weights(settings: Settings, tmp_path: Path) -> None:
    pulled = pull(settings, [FakeSource()])
    own = tmp_path / "own"
    own.mkdir()
    write_model(own)
    assert backbone_sha256(own) == backbone_sha256(pulled)
    (own / "config.json").write_text('{"other": 1}')
    assert backbone_sha256(own) == backbone_sha256(pulled)
    (own / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes()[:-1] + b"\x01")
    assert backbone_sha256(own) != backbone_sha256(pulled)
