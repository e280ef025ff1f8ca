"""How a replica's engine is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from infra.errors import ConfigError
from infra.settings import Settings
from serving.replica.backbone import Backbone
from serving.replica.build import load_engine
from tests.small_models import build


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path)
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(folder: Path, device: str) -> Settings:
    replica = {"max_total_tokens": 64, "row_tokens": 32, "rows": 2}
    return Settings.model_validate({"model": {"path": folder, "device": device}, "replica": replica})


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_replica_on_a_gpu_says_that_it_is_experimental(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def load(*_: object) -> Backbone:
        raise ConfigError("there is no such device here")

    monkeypatch.setattr(Backbone, "load", load)
    with capture_logs() as logs, pytest.raises(ConfigError, match="no such device"):
        load_engine(settings(folder, device))
    (entry,) = (entry for entry in logs if entry["event"] == "device_is_experimental")
    assert (entry["log_level"], entry["device"]) == ("warning", device)


def test_a_device_that_is_not_there_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="COLLM_MODEL__DEVICE: 'cuda:97'"):
        load_engine(settings(folder, "cuda:97"))


def test_a_replica_on_a_cpu_has_nothing_to_warn_of(folder: Path) -> None:
    with capture_logs() as logs:
        load_engine(settings(folder, "cpu"))
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("memory_planned", "info")]
