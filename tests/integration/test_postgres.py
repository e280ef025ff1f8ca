"""The embedded Postgres, in the ways it starts and ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import make_url

from infra.errors import ConfigError
from infra.postgres import Postgres, PostgresFailed, create_databases, sibling_url
from infra.process import wait_for_end


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the account that Postgres runs as can reach."""
    made = Path(tempfile.mkdtemp(prefix="collm-postgres-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def query(server: Postgres, statement: str, database: str = "collm") -> list[tuple[object, ...]]:
    url = make_url(server.url(database)).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def killed(server: Postgres) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert server.child is not None
    assert server.child.process is not None
    server.child.process.wait()


def test_data_outlive_a_stop_and_a_kill(folder: Path, port: int) -> None:
    with Postgres(folder, port=port) as server:
        create_databases(server.url(), ["collm", "prefect"])
        create_databases(server.url(), ["collm", "prefect"])
        query(server, "CREATE TABLE kept (x int)")
        query(server, "CREATE EXTENSION pg_trgm", "prefect")
    assert server.child is not None
    assert server.child.exit_code == 0
    with server:
        query(server, "INSERT INTO kept VALUES (1)")
        killed(server)
        server.start()
        assert query(server, "SELECT x FROM kept") == [(1,)]


def test_a_pid_file_that_names_another_process(folder: Path, port: int) -> None:
    with Postgres(folder, port=port) as server:
        killed(server)
        pid_file = next(folder.glob("data/postmaster.pid"))
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
        server.start()
        assert query(server, "SELECT 1", "postgres") == [(1,)]


def test_a_pid_file_that_a_crash_left_empty(folder: Path, port: int) -> None:
    with Postgres(folder, port=port) as server:
        killed(server)
        next(folder.glob("data/postmaster.pid")).write_text("")
        server.start()
        assert query(server, "SELECT 1", "postgres") == [(1,)]


def test_a_server_whose_owner_was_killed_is_replaced(folder: Path, port: int) -> None:
    code = f"""
import os
from pathlib import Path
from infra.postgres import Postgres
server = Postgres(Path({str(folder)!r}), port={port})
server.start()
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    orphan = int(done.stdout)
    with Postgres(folder, port=port) as server:
        assert server.pid != orphan
        assert query(server, "SELECT 1", "postgres") == [(1,)]
    assert wait_for_end(orphan, 5.0)


def test_a_taken_port_is_one_line(folder: Path, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"^port {port} on 127.0.0.1 is taken .COLLM_POSTGRES_PORT.") as caught:
            Postgres(folder, port=port).start()
    assert "\n" not in caught.value.message


def test_a_bad_option_shows_the_log(folder: Path, port: int) -> None:
    server = Postgres(folder, port=port, options={"no_such_option": "1"})
    with pytest.raises(PostgresFailed, match="no_such_option"):
        server.start()
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)


def test_the_password_is_needed_and_its_owners_own(folder: Path, port: int) -> None:
    with Postgres(folder, port=port) as server:
        assert (folder / "password").stat().st_mode & 0o777 == 0o600
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(f"postgresql://postgres:wrong@127.0.0.1:{port}/postgres")
        url = sibling_url(server.url(), "prefect", "asyncpg")
        assert url == server.url("prefect", "asyncpg")


def test_databases_that_cannot_be_made_are_a_setting_error(port: int) -> None:
    with pytest.raises(ConfigError, match=r"^COLLM_DATABASE_URL: cannot create the databases prefect") as caught:
        create_databases(f"postgresql+psycopg://u:secret@127.0.0.1:{port}/x", ["prefect"], timeout_s=2)
    assert "secret" not in caught.value.message


def test_below_a_folder_that_the_account_cannot_enter(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:  # one's own server reaches one's own folders
        with Postgres(tmp_path, port=port) as server:
            assert (tmp_path / "data" / "PG_VERSION").exists()
        return
    system = Path(tempfile.mkdtemp(prefix="collm-system-"))
    system.chmod(0o755)
    monkeypatch.setattr("infra.postgres.SYSTEM_DIR", system)
    tmp_path.chmod(0o700)
    try:
        with Postgres(tmp_path, port=port) as server:
            query(server, "CREATE TABLE kept (x int)", "postgres")
        with Postgres(tmp_path, port=port) as server:
            assert query(server, "SELECT * FROM kept", "postgres") == []
        # Whoever deletes the folder means the data too.
        shutil.rmtree(tmp_path)
        with Postgres(tmp_path, port=port) as server, pytest.raises(psycopg.errors.UndefinedTable):
            query(server, "SELECT * FROM kept", "postgres")
    finally:
        shutil.rmtree(system)
