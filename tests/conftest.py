"""Fixtures that every suite shares: a real Postgres, started once, and a migrated database of its own for each test."""

import itertools
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from hypothesis import HealthCheck, settings

from db.migrate import upgrade
from db.session import Database
from infra.models import pull
from infra.postgres import Postgres
from infra.process import Child
from infra.settings import load_settings

TEMPLATE = "collm_template"
_numbers = itertools.count()

# A busy machine is no failure of a law.
settings.register_profile("collm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("collm")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a running server, without a database name: append one."""
    folder = Path(tempfile.mkdtemp(prefix="collm-postgres-"))
    folder.chmod(0o711)  # as root, the server runs as another account, which must get at its data
    port = _free_port()
    # Nothing here outlives the tests: no need to reach the disk.
    with Postgres(folder, port=port, options={"fsync": "off", "full_page_writes": "off"}) as server:
        yield server.url("")
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the real model: ``COLLM_MODEL__PATH``, or the cache, into which it is pulled if need be."""
    return pull(load_settings())


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real MLflow server with an empty store."""
    folder = tmp_path_factory.mktemp("mlflow")
    port = _free_port()
    argv = [sys.executable, "-P", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    argv += ["--artifacts-destination", (folder / "artifacts").as_uri()]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = Child(name="mlflow", argv=argv, log=folder / "log", environ={**os.environ, **quiet})
    server.start()
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(server, f"{url}/health")
        yield url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def _template(postgres_url: str) -> str:
    """Name of a migrated database that tests copy."""
    _execute(postgres_url, f"CREATE DATABASE {TEMPLATE}")
    upgrade(postgres_url + TEMPLATE)
    return TEMPLATE


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """URL of a database without a table."""
    yield from _database(postgres_url, "template1")


@pytest.fixture
def database_url(postgres_url: str, _template: str) -> Iterator[str]:
    """URL of a migrated, empty database."""
    yield from _database(postgres_url, _template)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The same, opened."""
    opened = Database(database_url)
    yield opened
    opened.close()


def _database(server_url: str, template: str) -> Iterator[str]:
    name = f"collm_test_{next(_numbers)}"
    _execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server_url + name
    _execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_healthy(server: Child, url: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while server.running and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"{server.name} is not healthy:\n{server.last_lines(20)}")


def _execute(server_url: str, statement: str) -> None:
    url = server_url.replace("+psycopg", "") + "postgres"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
