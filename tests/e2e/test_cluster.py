"""``collm up`` with a stand-in for the engine: everything else is real."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from infra import state
from infra.postgres import Postgres

pytestmark = pytest.mark.e2e

COLLM = Path(sys.executable).with_name("collm")
PARTS = {"postgres", "prefect", "mlflow", "replica-0", "replica-1", "gateway", "controller", "worker"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that the account that Postgres runs as can reach."""
    made = Path(tempfile.mkdtemp(prefix="collm-cluster-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def environ(folder: Path) -> dict[str, str]:
    """Settings of a cluster on free ports."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(5)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        gateway, prefect, mlflow, postgres, replica = [probe.getsockname()[1] for probe in probes]
    state_dir = folder / "state"
    state_dir.mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("COLLM_")},
        "COLLM_STATE_DIR": str(state_dir),
        "COLLM_GATEWAY__PORT": str(gateway),
        "COLLM_PREFECT_API_URL": f"http://127.0.0.1:{prefect}/api",
        "COLLM_MLFLOW_URL": f"http://127.0.0.1:{mlflow}",
        "COLLM_POSTGRES_PORT": str(postgres),
        "COLLM_REPLICA__PORT": str(replica),
        "COLLM_REPLICA__FAKE_ENGINE": "true",
    }


@contextmanager
def up(environ: dict[str, str]) -> Iterator[tuple["subprocess.Popen[str]", state.State]]:
    """Run ``collm up`` until the cluster is ready; kill it in the end if it still runs."""
    with Path(environ["COLLM_STATE_DIR"], "up.log").open("w") as log:
        process = subprocess.Popen([COLLM, "up"], env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert "The cluster is up" in process.stdout.readline(), Path(log.name).read_text()
        drain(process.stdout, "MLflow UI")
        found = state.read(Path(environ["COLLM_STATE_DIR"]))
        assert found is not None
        yield process, found
    finally:
        process.kill()
        process.communicate()


def drain(lines: IO[str], until: str) -> None:
    while until not in lines.readline():
        pass


def run(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([COLLM, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False)


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def family(found: state.State) -> list[psutil.Process]:
    """Every process of the cluster, grandchildren too."""
    return [p for p in psutil.Process(found.owner.pid).children(recursive=True) if p.is_running()]


def generate(address: str) -> str:
    request = urllib.request.Request(
        f"{address}/generate",
        data=json.dumps({"inputs": "print", "parameters": {"max_new_tokens": 4, "ignore_eos": True}}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = json.load(answer)["generated_text"]
        return text


def test_a_whole_cluster(environ: dict[str, str]) -> None:
    with up(environ) as (process, found):
        assert set(found.processes) == PARTS
        assert (Path(environ["COLLM_STATE_DIR"]) / state.FILE).stat().st_mode & 0o777 == 0o600
        assert generate(found.addresses.gateway)
        status = run(environ, "status")
        assert status.returncode == 0
        assert "code" in status.stdout

        # Not twice on one folder.
        again = run(environ, "up")
        assert again.returncode == 2
        assert again.stderr == (
            f"collm up: COLLM_STATE_DIR: a cluster already runs on {environ['COLLM_STATE_DIR']} (pid {process.pid})\n"
        )

        # What dies comes back, under a new number that the state tells.
        os.kill(found.processes["replica-1"].pid, signal.SIGKILL)

        def back() -> bool:
            now = state.read(Path(environ["COLLM_STATE_DIR"]))
            return now is not None and now.processes.get("replica-1") not in (None, found.processes["replica-1"])

        eventually(back)
        assert generate(found.addresses.gateway)

        everyone = family(found)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not [p for p in everyone if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert state.read(Path(environ["COLLM_STATE_DIR"])) is None
    assert run(environ, "status").returncode == 2


def test_a_cluster_whose_owner_is_killed_ends_and_can_be_started_again(environ: dict[str, str]) -> None:
    with up(environ) as (process, found):
        everyone = family(found)
        assert len(everyone) >= len(PARTS)
        process.kill()
        eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in everyone))
    with up(environ) as (process, found):
        assert generate(found.addresses.gateway)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("setting", "offset"),
    [
        ("COLLM_GATEWAY__PORT", 0),
        ("COLLM_REPLICA__PORT", 1),
        ("COLLM_PREFECT_API_URL", 0),
        ("COLLM_MLFLOW_URL", 0),
        ("COLLM_POSTGRES_PORT", 0),
    ],
)
def test_a_taken_port_is_named_and_nothing_starts(environ: dict[str, str], setting: str, offset: int) -> None:
    port = int(environ[setting].removesuffix("/api").rpartition(":")[2]) + offset
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = run(environ, "up")
    name = f"{setting} + {offset}" if offset else setting
    assert done.returncode == 2
    assert done.stderr == f"collm up: port {port} on 127.0.0.1 is taken ({name}): Address already in use\n"
    assert state.read(Path(environ["COLLM_STATE_DIR"])) is None


def test_a_part_that_does_not_start_is_named_with_its_reason(environ: dict[str, str], folder: Path) -> None:
    port = int(environ["COLLM_POSTGRES_PORT"])
    with Postgres(folder / "own", port=port) as server:
        own = {**environ, "COLLM_DATABASE_URL": server.url("nowhere"), "COLLM_STATE_DIR": str(folder / "other")}
        done = run(own, "up")
    assert done.returncode == 1
    assert "migrate did not start" in done.stderr
    assert 'database "nowhere" does not exist' in done.stderr
