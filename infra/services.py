"""What a local cluster is made of: programs, their order, their environment, how to tell that they are ready."""

import http.client
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ByteSize

from infra.errors import ConfigError
from infra.machine import MEMORY_PART, memory_bytes
from infra.postgres import Postgres, create_databases, sibling_url
from infra.process import Child
from infra.settings import PREFIX, ReplicaSettings, Settings, to_environ
from infra.supervisor import Part

BACKGROUND = 10
"""Niceness of what must not take a core from serving."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""For ``GLIBC_TUNABLES``: malloc asks for huge pages, where the kernel gives them to those who ask."""
DATABASES = ("collm", "prefect", "mlflow")


@dataclass(slots=True, kw_only=True)
class Program:
    """A part that is one child."""

    name: str
    child: Child
    health: str = ""
    """URL that answers 200 when it is ready; without one, running is enough."""
    to_its_end: bool = False
    """It does its work and exits 0; nothing else is started before."""
    start_timeout_s: float = 120.0

    @property
    def pid(self) -> int | None:
        """Of its process, if it runs."""
        return self.child.pid if self.child.running else None

    def start(self) -> None:
        """See ``Part``."""
        self.child.start()

    def ready(self) -> bool:
        """See ``Part``."""
        if self.to_its_end:
            return self.child.exit_code == 0
        return self.child.running and (not self.health or answers(self.health))

    def ended(self) -> str:
        """See ``Part``."""
        code = self.child.exit_code
        if code is None or (self.to_its_end and code == 0):
            return ""
        return _why(self.child)

    def ask_to_stop(self) -> None:
        """See ``Part``."""
        self.child.ask_to_stop()

    def stop(self) -> None:
        """See ``Part``."""
        self.child.stop()


@dataclass(slots=True, kw_only=True)
class Database:
    """The embedded Postgres as a part, with the cluster's databases in it."""

    postgres: Postgres
    name: str = "postgres"
    start_timeout_s: float = 60.0
    begun: bool = field(default=False, init=False)

    @property
    def pid(self) -> int | None:
        """Of its process, if it runs."""
        return self.postgres.child.pid if self.ready() and self.postgres.child else None

    def start(self) -> None:
        """See ``Part``; returns when it is ready."""
        self.begun = True
        self.postgres.start()
        create_databases(self.postgres.url(), DATABASES)

    def ready(self) -> bool:
        """See ``Part``."""
        return self.postgres.child is not None and self.postgres.child.running

    def ended(self) -> str:
        """See ``Part``."""
        if not self.begun or self.ready():
            return ""
        child = self.postgres.child
        return _why(child) if child is not None else "it could not be started"

    def ask_to_stop(self) -> None:
        """See ``Part``."""

    def stop(self) -> None:
        """See ``Part``."""
        self.postgres.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that a cluster needs, and the setting that chooses it."""

    host: str
    port: int
    setting: str


def ports(settings: Settings, *, embedded: bool) -> list[Port]:
    """Return every port that a cluster listens on, with or without a Postgres of its own."""
    gateway, replica = settings.gateway, settings.replica
    return [
        *([Port(host="127.0.0.1", port=settings.postgres_port, setting="COLLM_POSTGRES_PORT")] if embedded else []),
        Port(host=gateway.host, port=gateway.port, setting="COLLM_GATEWAY__PORT"),
        *(
            Port(host=replica.host, port=replica.port + i, setting=f"COLLM_REPLICA__PORT + {i}")
            for i in range(settings.replicas)
        ),
        _local(settings.prefect_api_url, "COLLM_PREFECT_API_URL"),
        _local(settings.mlflow_url, "COLLM_MLFLOW_URL"),
    ]


def programs(settings: Settings, shards: Sequence[Path], environ: Mapping[str, str]) -> list[list[Part]]:
    """Return the groups of a cluster on a Postgres that runs.

    ``settings`` name the database, the token and absolute folders; ``shards[i]`` is replica i's data (replicas
    beyond them are no clients); ``environ`` is what every process inherits.
    """
    common = {
        **{k: v for k, v in environ.items() if not k.startswith((PREFIX, "PREFECT_", "MLFLOW_"))},
        **_threads(1),
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), f"127.0.0.1,localhost,{environ.get('no_proxy', '')}".rstrip(",")),
    }
    ours = {**common, **to_environ(settings)}
    flows = {
        **ours,
        "PREFECT_HOME": str(settings.state_dir / "prefect"),
        "PREFECT_API_URL": settings.prefect_api_url,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "MLFLOW_TRACKING_URI": settings.mlflow_url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }

    def program(
        name: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str],
        *,
        health: str = "",
        nice: int = 0,
        to_its_end: bool = False,
    ) -> Program:
        log = settings.state_dir / "logs" / f"{name}.log"
        child = Child(name=name, argv=argv, environ=env, nice=nice, log=log)
        return Program(name=name, child=child, health=health, to_its_end=to_its_end)

    def collm(name: str, env: Mapping[str, str], **more: Any) -> Program:
        return program(name, [_collm(), name], env, **more)

    return [
        [collm("migrate", ours, to_its_end=True)],
        [
            program(
                "prefect", *_prefect(settings, common), health=f"{settings.prefect_api_url}/health", nice=BACKGROUND
            ),
            program("mlflow", *_mlflow(settings, common), health=f"{settings.mlflow_url}/health", nice=BACKGROUND),
        ],
        [collm("bootstrap", flows, to_its_end=True)],
        [
            *(
                program(replica.id, [_collm(), "replica"], env, health=_health(replica.host, replica.port))
                for replica, env in _replicas(settings, shards, common)
            ),
            collm("gateway", ours, health=_health(settings.gateway.host, settings.gateway.port)),
            collm("controller", ours),
        ],
        [collm("worker", flows, nice=BACKGROUND)],
    ]


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Return whether a GET of ``url`` on this machine gives 200; no proxy is asked."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def reachable(host: str) -> str:
    """Return an address of this machine for one that a server listens on."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _health(host: str, port: int) -> str:
    return f"http://{reachable(host)}:{port}/health"


def _why(child: Child) -> str:
    code = child.exit_code
    what = "it runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return "; ".join(filter(None, [what, child.complaint(), f"log: {child.log}"]))


def _prefect(settings: Settings, common: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    where = _local(settings.prefect_api_url, "COLLM_PREFECT_API_URL")
    home = settings.state_dir / "prefect"
    argv = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", where.host, "--port", str(where.port)]
    return argv, {
        **common,
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": sibling_url(settings.required_database_url(), "prefect", "asyncpg"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_UI_API_URL": settings.prefect_api_url,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        # In memory, a slot whose holder died while the server restarted would never come free.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }


def _mlflow(settings: Settings, common: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    where = _local(settings.mlflow_url, "COLLM_MLFLOW_URL")
    artifacts = (settings.state_dir / "mlflow").as_uri()
    argv = [sys.executable, "-P", "-m", "mlflow", "server", "--host", where.host, "--port", str(where.port)]
    return [*argv, "--workers", "1", "--artifacts-destination", artifacts], {
        **common,
        "MLFLOW_BACKEND_STORE_URI": sibling_url(settings.required_database_url(), "mlflow", "psycopg"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Eight processes and a gigabyte less.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _replicas(
    settings: Settings, shards: Sequence[Path], common: Mapping[str, str]
) -> Iterator[tuple[ReplicaSettings, dict[str, str]]]:
    share = settings.replica.memory_bytes
    if share is None and settings.model.device == "cpu":
        share = ByteSize(MEMORY_PART * memory_bytes() // settings.replicas)
    for i in range(settings.replicas):
        replica = settings.replica.model_copy(
            update={
                "memory_bytes": share,
                "id": f"replica-{i}",
                "port": settings.replica.port + i,
                "public_url": None,
                "shard": shards[i] if i < len(shards) else None,
            }
        )
        yield (
            replica,
            {
                # Weights in huge pages are read some percent faster; a setting of one's own stays.
                "GLIBC_TUNABLES": HUGE_PAGES,
                **common,
                **to_environ(settings.model_copy(update={"replica": replica})),
                **_threads(settings.model.threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(count))


def _collm() -> Path:
    """The console script of the environment that runs."""
    return Path(sys.executable).with_name("collm")


def _local(url: str, setting: str) -> Port:
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost") or parts.port is None:
        raise ConfigError(f"{setting}: a local cluster needs http://127.0.0.1:PORT, not {url}")
    return Port(host="127.0.0.1", port=parts.port, setting=setting)
