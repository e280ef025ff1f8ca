"""What a local cluster's processes are given."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from infra.cluster import LocalCluster, chosen_shards
from infra.errors import ConfigError
from infra.postgres import sibling_url
from infra.process import require_free_port
from infra.services import BACKGROUND, Program, ports, programs
from infra.settings import GatewaySettings, ModelSettings, ReplicaSettings, Settings

URL = "postgresql+psycopg://u:p@db:5433/collm"


def made(settings: Settings, **environ: str) -> dict[str, Program]:
    complete = settings.model_copy(
        update={"database_url": URL, "cluster_token": SecretStr("secret"), "state_dir": Path("/state")}
    )
    groups = programs(complete, [Path("/shards/a.jsonl")], environ)
    return {part.name: part for group in groups for part in group if isinstance(part, Program)}


def environ_of(part: Program) -> dict[str, str]:
    assert part.child.environ is not None
    return dict(part.child.environ)


def test_the_order() -> None:
    complete = Settings(database_url=URL, cluster_token=SecretStr("secret"), state_dir=Path("/state"), replicas=1)
    names = [[part.name for part in group] for group in programs(complete, [], {})]
    assert names == [
        ["migrate"],
        ["prefect", "mlflow"],
        ["bootstrap"],
        ["replica-0", "gateway", "controller"],
        ["worker"],
    ]


def test_each_replica_is_itself() -> None:
    settings = Settings(replica=ReplicaSettings(port=9000), model=ModelSettings(threads=3))
    parts = made(settings, COLLM_REPLICA__ID="other", COLLM_LOG_LEVEL="debug", HOME="/home/me")
    for i, shard in enumerate(["/shards/a.jsonl", None]):
        environ = environ_of(parts[f"replica-{i}"])
        assert environ["COLLM_REPLICA__ID"] == f"replica-{i}"
        assert environ["COLLM_REPLICA__PORT"] == str(9000 + i)
        assert environ.get("COLLM_REPLICA__SHARD") == shard
        assert environ["COLLM_DATABASE_URL"] == URL
        assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
        assert environ["HOME"] == "/home/me"
        assert environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
        assert environ["COLLM_LOG_LEVEL"] == "info"
        assert parts[f"replica-{i}"].health == f"http://127.0.0.1:{9000 + i}/health"


def test_tunables_of_ones_own_stay() -> None:
    parts = made(Settings(), GLIBC_TUNABLES="glibc.malloc.arena_max=1")
    assert environ_of(parts["replica-0"])["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"


def test_each_server_has_its_own_database_and_secrets_stay_off_command_lines() -> None:
    parts = made(Settings())
    assert environ_of(parts["prefect"])["PREFECT_API_DATABASE_CONNECTION_URL"] == (
        "postgresql+asyncpg://u:p@db:5433/prefect"
    )
    assert environ_of(parts["mlflow"])["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg://u:p@db:5433/mlflow"
    assert "COLLM_CLUSTER_TOKEN" not in {**environ_of(parts["prefect"]), **environ_of(parts["mlflow"])}
    assert not any("secret" in str(word) or "u:p" in str(word) for part in parts.values() for word in part.child.argv)


def test_what_is_not_serving_is_nice() -> None:
    nice = {name: part.child.nice for name, part in made(Settings()).items()}
    assert nice["prefect"] == nice["mlflow"] == nice["worker"] == BACKGROUND
    assert nice["replica-0"] == nice["replica-1"] == nice["gateway"] == nice["controller"] == 0


def test_no_proxy_stands_between_the_parts() -> None:
    environ = environ_of(made(Settings(), no_proxy="example.org", http_proxy="http://proxy:3128")["worker"])
    assert environ["no_proxy"] == environ["NO_PROXY"] == "127.0.0.1,localhost,example.org"


def test_nothing_of_another_prefect_or_mlflow_is_inherited() -> None:
    inherited = {"PREFECT_API_KEY": "k", "PREFECT_PROFILE": "cloud", "MLFLOW_TRACKING_URI": "http://elsewhere"}
    for part in made(Settings(), **inherited).values():
        assert not {"PREFECT_API_KEY", "PREFECT_PROFILE"} & set(environ_of(part))
        assert environ_of(part).get("MLFLOW_TRACKING_URI") != "http://elsewhere"


@pytest.mark.parametrize("setting", ["prefect_api_url", "mlflow_url"])
@pytest.mark.parametrize("url", ["http://prefect.example:4200/api", "http://127.0.0.1/api"])
def test_a_local_cluster_needs_local_urls(setting: str, url: str) -> None:
    with pytest.raises(ConfigError, match=f"COLLM_{setting.upper()}"):
        ports(Settings().model_copy(update={setting: url}), embedded=True)


def test_prefects_driver_gets_its_own_name_for_sslmode() -> None:
    url = "postgresql+psycopg://u:p@db/collm?sslmode=require"
    assert sibling_url(url, "prefect", "asyncpg") == ("postgresql+asyncpg://u:p@db/prefect?ssl=require")
    assert sibling_url(url, "mlflow", "psycopg").endswith("/mlflow?sslmode=require")


def test_a_shard_that_no_replica_of_a_cluster_would_read_is_refused(tmp_path: Path) -> None:
    settings = Settings(replica=ReplicaSettings(shard=tmp_path / "mine.jsonl"), state_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"^COLLM_REPLICA__SHARD.*collm up --shard"):
        LocalCluster(settings)


def test_shards_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("")
    assert chosen_shards([], 2) is None
    assert chosen_shards([file, file], 2) == [file.resolve()] * 2
    with pytest.raises(ConfigError, match="2 shards for 1 replicas"):
        chosen_shards([file, file], 1)
    with pytest.raises(ConfigError, match="is no file"):
        chosen_shards([tmp_path / "b.jsonl"], 1)


def test_a_port_beyond_the_last_is_named() -> None:
    with pytest.raises(ConfigError, match=r"COLLM_REPLICA__PORT \+ 1: there is no port 65536"):
        require_free_port("127.0.0.1", 65_536, "COLLM_REPLICA__PORT + 1")


def test_one_port_for_two_parts_is_named(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=tmp_path,
        database_url=URL,
        gateway=GatewaySettings(port=45_671),
        replica=ReplicaSettings(port=45_670, fake_engine=True),
        prefect_api_url="http://127.0.0.1:45672/api",
        mlflow_url="http://127.0.0.1:45673",
    )
    with pytest.raises(ConfigError, match=r"^COLLM_REPLICA__PORT \+ 1: port 45671 is COLLM_GATEWAY__PORT's too$"):
        LocalCluster(settings).start()
    # The folder is free again.
    with pytest.raises(ConfigError, match=r"too$"):
        LocalCluster(settings).start()
