"""What a running local cluster says of itself: the file ``cluster.json`` in its state folder.

``collm status`` and ``collm replay`` find the cluster by it, and the next ``collm up`` finds what an earlier one that
was killed left behind. It holds the cluster token and the database's password, so only its owner may read it.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from pydantic import SecretStr

from infra.errors import ConfigError
from infra.settings import Settings

FILE = "cluster.json"
LOCK = "lock"
DEMO = "demo"
"""Folder of the demo's cluster, in the state folder."""
PRIVATE = ("prefect", "mlflow", "store", "logs")
"""Folders of a cluster's parts that are their owner's alone."""
PARTS = ("postgres", *PRIVATE)
"""All of them; Postgres' account, which may be another, must get into its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the parts of a cluster are reached."""

    gateway: str
    replicas: Mapping[str, str]
    """By replica id."""
    prefect: str
    """The UI; the API is at ``/api`` below it."""
    mlflow: str
    database_url: str = field(repr=False)
    token: str = field(repr=False)

    def lines(self) -> str:
        """For people; without secrets."""
        named = {"gateway": self.gateway, **self.replicas, "Prefect UI": self.prefect, "MLflow UI": self.mlflow}
        return "\n".join(f"  {name:<12} {url}" for name, url in named.items())


@dataclass(frozen=True, slots=True)
class Process:
    """A process by a name that is never given twice: id and time of birth."""

    pid: int
    born_s: float

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """Return the process that has this id now."""
        with contextlib.suppress(psutil.Error):
            return cls(pid, psutil.Process(pid).create_time())
        return None

    def find(self) -> psutil.Process | None:
        """Return it if it still runs."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if process.create_time() == self.born_s and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def session(self) -> list[psutil.Process]:
        """Return what still runs of the session that it leads, or led: a leader may end before what it started."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.pid).create_time() != self.born_s:
                return []  # the number names another process now, and so does the session's
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The file's content."""

    owner: Process
    addresses: Addresses
    processes: Mapping[str, Process]


@contextlib.contextmanager
def owned(state_dir: Path) -> Iterator[None]:
    """Hold the state folder. Raises ``ConfigError`` if a cluster runs on it already."""
    try:
        # As root, Postgres runs as another account, which passes through to its folder.
        state_dir.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        lock = (state_dir / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"COLLM_STATE_DIR: {state_dir}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"COLLM_STATE_DIR: a cluster already runs on {state_dir} (pid {lock.read().strip()})"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def write(state_dir: Path, state: State) -> None:
    """Replace the file at once, readable by its owner alone."""
    partial = state_dir / f"{FILE}.partial"
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(asdict(state), out, indent=1)
    partial.rename(state_dir / FILE)


def read(state_dir: Path) -> State | None:
    """Return the state; None without a (readable, whole) file."""
    try:
        data = json.loads((state_dir / FILE).read_text())
        return State(
            owner=Process(**data["owner"]),
            addresses=Addresses(**data["addresses"]),
            processes={name: Process(**process) for name, process in data["processes"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove(state_dir: Path) -> None:
    """Forget the cluster."""
    (state_dir / FILE).unlink(missing_ok=True)


def clear(state_dir: Path) -> None:
    """Delete what clusters left in a state folder, which is ``owned``, and nothing else; nothing of them runs."""
    for name in PARTS:
        shutil.rmtree(state_dir / name, ignore_errors=True)
    remove(state_dir)


def running(state_dir: Path) -> State | None:
    """Return the state of the cluster that runs on a state folder, or of the demo's below it; None if neither does."""
    folder = state_dir.expanduser().resolve()
    found = [state for state in (read(folder), read(folder / DEMO)) if state is not None]
    return next((state for state in found if state.owner.find() is not None), None)


def with_local_cluster(settings: Settings) -> Settings:
    """Complete settings that name no database by the cluster that runs on their state folder, if one does."""
    state = None if settings.database_url is not None else running(settings.state_dir)
    if state is None:
        return settings
    return settings.model_copy(
        update={
            "database_url": state.addresses.database_url,
            "cluster_token": settings.cluster_token or SecretStr(state.addresses.token),
            "prefect_api_url": f"{state.addresses.prefect}/api",
            "mlflow_url": state.addresses.mlflow,
        }
    )
