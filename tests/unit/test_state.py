"""How a running local cluster is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from infra import state
from infra.errors import ConfigError
from infra.settings import Settings
from infra.state import Addresses, Process, State

ADDRESSES = Addresses(
    gateway="http://127.0.0.1:1",
    replicas={"replica-0": "http://127.0.0.1:2"},
    prefect="http://127.0.0.1:3",
    mlflow="http://127.0.0.1:4",
    database_url="postgresql+psycopg://u:p@127.0.0.1:5/collm",
    token="secret",
)


def me() -> Process:
    process = Process.of(os.getpid())
    assert process is not None
    return process


def test_written_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    written = State(owner=me(), addresses=ADDRESSES, processes={"gateway": me()})
    state.write(tmp_path, written)
    state.write(tmp_path, written)
    assert state.read(tmp_path) == written
    assert (tmp_path / state.FILE).stat().st_mode & 0o777 == 0o600
    state.remove(tmp_path)
    assert state.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"owner": 1, "addresses": {}, "processes": {}}', "[]"])
def test_a_file_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / state.FILE).write_text(text)
    assert state.read(tmp_path) is None


def test_settings_are_completed_from_a_running_cluster(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    assert state.with_local_cluster(settings) == settings
    state.write(tmp_path, State(owner=me(), addresses=ADDRESSES, processes={}))
    found = state.with_local_cluster(settings)
    assert found.database_url == ADDRESSES.database_url
    assert found.required_token() == "secret"
    assert (found.prefect_api_url, found.mlflow_url) == ("http://127.0.0.1:3/api", "http://127.0.0.1:4")
    own = Settings(state_dir=tmp_path, database_url="postgresql+psycopg://elsewhere/collm")
    assert state.with_local_cluster(own) == own
    assert (
        state.with_local_cluster(Settings(state_dir=tmp_path, cluster_token=SecretStr("mine"))).required_token()
        == "mine"
    )


def test_a_cluster_that_is_gone_is_not_taken_for_one(tmp_path: Path) -> None:
    gone = Process(os.getpid(), me().born_s - 1)  # the number names another process now
    assert gone.find() is None
    state.write(tmp_path, State(owner=gone, addresses=ADDRESSES, processes={}))
    assert state.with_local_cluster(Settings(state_dir=tmp_path)).database_url is None


def test_only_one_holds_a_folder(tmp_path: Path) -> None:
    holder = f"already runs on {tmp_path} .pid {os.getpid()}."
    with state.owned(tmp_path), pytest.raises(ConfigError, match=holder), state.owned(tmp_path):
        pass
    with state.owned(tmp_path):
        pass


def test_clearing_leaves_what_is_not_the_clusters(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "letters").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    state.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters", "notes.txt"]


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(ADDRESSES) + ADDRESSES.lines()
    assert "u:p" not in repr(ADDRESSES) + ADDRESSES.lines()


def test_what_outlives_the_leader_of_a_session_is_found() -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        left = int(leader.stdout.readline())
        known = Process.of(leader.pid)
        assert known is not None
        assert {p.pid for p in known.session()} == {leader.pid, left}
        assert Process(leader.pid, known.born_s - 1.0).session() == [], "another process had that number before"
        leader.kill()
        leader.wait()
        (found,) = known.session()
        assert found.pid == left
        found.kill()


def test_a_new_state_folder_is_no_one_elses(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with state.owned(folder):
        assert folder.stat().st_mode & 0o066 == 0
