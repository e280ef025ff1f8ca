"""What every ``AdapterStore`` promises: in memory and on a real MLflow server."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from adapters.memory import MemoryStore
from adapters.model import LoraWeights
from adapters.ports import AdapterStore
from adapters.registry import MlflowRegistry
from adapters.weights import initial, load_peft, manifest, version_uid
from db.records import AdapterName, LoraSpec, VersionUid
from infra.errors import RegistryUnavailable, UnknownVersion

SHAPES = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.mlp.down_proj": (4, 10)}
SPEC = LoraSpec(rank=2, alpha=4.0, targets=("down_proj", "q_proj"))
_names = itertools.count()


@pytest.fixture(params=["memory", "mlflow"])
def store(request: pytest.FixtureRequest) -> AdapterStore:
    """Every implementation."""
    if request.param == "memory":
        return MemoryStore()
    return MlflowRegistry(request.getfixturevalue("mlflow_url"))


@pytest.fixture
def adapter() -> AdapterName:
    """A name that no other test uses: the server is shared."""
    return AdapterName(f"code-{next(_names)}")


def _weights(seed: int) -> LoraWeights:
    return initial(SHAPES, SPEC, seed)


def _register(store: AdapterStore, adapter: AdapterName, seed: int) -> int:
    return store.register(
        adapter,
        version_uid("backbone", _weights(seed)),
        _weights(seed),
        base_model="some/model",
        tags={"round": f"r-{seed}"},
        metrics={"ce": 1.25, "broken": float("nan")},
    ).number


def test_versions_count_from_one_and_a_uid_counts_once(store: AdapterStore, adapter: AdapterName) -> None:
    assert [_register(store, adapter, seed) for seed in (1, 2, 1, 3, 2)] == [1, 2, 1, 3, 2]


def test_the_files_are_pefts_and_come_back_bit_for_bit(
    store: AdapterStore, adapter: AdapterName, tmp_path: Path
) -> None:
    _register(store, adapter, 1)
    number = _register(store, adapter, 2)
    folder = store.download(adapter, number, tmp_path / "new")
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    back = load_peft(folder, manifest(SHAPES, SPEC))
    assert back.spec == SPEC
    assert all(np.array_equal(back.tensors[name], tensor) for name, tensor in _weights(2).tensors.items())
    assert store.download(adapter, number, tmp_path / "new") == folder


def test_an_alias_moves_and_goes(store: AdapterStore, adapter: AdapterName) -> None:
    assert store.alias(adapter, "active") is None
    for seed in (1, 2):
        _register(store, adapter, seed)
    store.set_alias(adapter, "active", None)
    assert store.alias(adapter, "active") is None
    for number in (1, 2, 2, 1):
        store.set_alias(adapter, "active", number)
        assert store.alias(adapter, "active") == number
    store.set_alias(adapter, "previous", 2)
    store.set_alias(adapter, "active", None)
    store.set_alias(adapter, "active", None)
    assert (store.alias(adapter, "active"), store.alias(adapter, "previous")) == (None, 2)


def test_what_is_not_there_is_named(store: AdapterStore, adapter: AdapterName, tmp_path: Path) -> None:
    _register(store, adapter, 1)
    with pytest.raises(UnknownVersion):
        store.download(adapter, 7, tmp_path)
    with pytest.raises(UnknownVersion):
        store.set_alias(adapter, "active", 7)
    with pytest.raises(UnknownVersion):
        store.tag(adapter, 7, {"decision": "promoted"})
    with pytest.raises(UnknownVersion):
        store.download(AdapterName("never-seen"), 1, tmp_path)


def test_mlflow_shows_what_people_look_for(mlflow_url: str, adapter: AdapterName) -> None:
    store = MlflowRegistry(mlflow_url)
    uid = version_uid("backbone", _weights(1))
    registered = store.register(
        adapter, uid, _weights(1), base_model="some/model", tags={"round": "r-1"}, metrics={"ce": 1.25}
    )
    store.tag(adapter, 1, {"decision": "promoted"})
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_url, mlflow_url)
    version = client.get_model_version(f"collm.{adapter}", "1")
    assert version.tags == {"uid": uid, "round": "r-1", "decision": "promoted"}
    model = client.get_logged_model(registered.model_id)
    assert (model.model_type, str(model.status.value), model.params["r"]) == ("lora-adapter", "READY", "2")
    assert [(m.key, m.value) for m in model.metrics] == [("ce", 1.25)]
    assert client.get_run(version.run_id).info.status == "FINISHED"


def test_a_server_that_is_away_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = MlflowRegistry("http://127.0.0.1:1")
    with pytest.raises(RegistryUnavailable):
        store.register(AdapterName("code"), VersionUid("u"), _weights(1), base_model="some/model", tags={}, metrics={})
