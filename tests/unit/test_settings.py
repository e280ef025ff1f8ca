"""Settings: what is misspelt or wrong is named; what a child reads is what its parent had."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from infra.errors import ConfigError
from infra.settings import Settings, load_settings, to_environ


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLLM_GATEWEY__PORT", "8080"),
        ("COLLM_GATEWAY__PROT", "8080"),
        ("COLLM_GATEWAY__PORT", "eighty"),
        ("COLLM_GATEWAY__PORT", "0"),
        ("COLLM_MODEL__DTYPE", "int3"),
        ("COLLM_REPLICAS", "0"),
        ("COLLM_TYPO", "1"),
        ("COLLM_MODEL__NAME", ""),
        ("COLLM_MODEL__NAME", "../x"),
        ("COLLM_MODEL__NAME", "a/b/c"),
        ("COLLM_ROUNDS__ADAPTER", "it's"),
        ("COLLM_ROUNDS__ADAPTER", ""),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"^{name}[: ]") as caught:
        load(monkeypatch, **{name: value})
    assert "\n" not in caught.value.message


def test_the_largest_rank_is_that_of_rounds_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, COLLM_ROUNDS__RANK="16").max_rank == 16
    assert load(monkeypatch, COLLM_ROUNDS__RANK="16", COLLM_REPLICA__MAX_RANK="64").max_rank == 64
    with pytest.raises(ConfigError, match="COLLM_REPLICA__MAX_RANK"):
        _ = load(monkeypatch, COLLM_ROUNDS__RANK="16", COLLM_REPLICA__MAX_RANK="8").max_rank


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="COLLM_DATABASE_URL"):
        Settings().required_database_url()
    with pytest.raises(ConfigError, match="COLLM_CLUSTER_TOKEN"):
        Settings(cluster_token=SecretStr("")).required_token()


def test_another_process_reads_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(
        state_dir=tmp_path, cluster_token=SecretStr("secret"), database_url="postgresql+psycopg://u:p%40@h/collm"
    )
    replica = settings.replica.model_copy(update={"id": "replica-7", "fake_engine": True, "shard": tmp_path / "x"})
    settings = settings.model_copy(update={"replica": replica})
    assert load(monkeypatch, **to_environ(settings)) == settings
