"""The whole cluster on one machine: ``collm up``, and what the demo and the tests run on."""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import SecretStr

from infra import state
from infra.errors import ConfigError
from infra.models import pull
from infra.postgres import Postgres, create_databases
from infra.process import require_free_port
from infra.services import DATABASES, Database, Program, ports, programs, reachable
from infra.settings import Settings, load_settings
from infra.state import Addresses, Process, State
from infra.supervisor import Part, Supervisor

SHARDS = Path(__file__).parent / "data" / "shards"
"""The sample that is shipped: ``replica-0.jsonl``, …"""
LEFTOVER_S = 15.0
"""How long processes of a cluster that was killed may take to end."""


class LocalCluster:
    """Postgres, Prefect, MLflow, replicas, gateway, controller and worker as children of this process.

    Context manager. Entering returns when all are ready, with ``addresses`` filled; it raises ``ConfigError`` (a port
    is taken, the state folder is in use) before anything is started and ``CollmError`` if a part does not start, with
    everything stopped. What dies later is reported and started again. Leaving stops everything, in reverse order.
    SIGTERM and SIGHUP in between raise ``SystemExit`` in the main thread, so that it is left.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        shards: Sequence[Path] | None = None,
        environ: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
        fresh: bool = False,
    ) -> None:
        """``shards[i]`` is replica i's data; by default the sample that is shipped.

        ``fresh``: throw away what an earlier cluster left in the state folder.
        """
        require_no_shard(settings)
        self.fresh = fresh
        if shards is None:
            shards = [file for i in range(settings.replicas) if (file := SHARDS / f"replica-{i}.jsonl").exists()]
        self.shards = shards
        self.environ = dict(os.environ if environ is None else environ)
        self.report = report or _to_stderr
        state_dir = settings.state_dir.expanduser().resolve()
        token = settings.cluster_token or SecretStr(secrets.token_urlsafe(32))
        self.postgres = Postgres(state_dir / "postgres", port=settings.postgres_port)
        self.embedded = settings.database_url is None
        self.settings = settings.model_copy(
            update={
                "state_dir": state_dir,
                "cache_dir": settings.cache_dir.expanduser().resolve(),
                "cluster_token": token,
                "store_url": settings.store_url or (state_dir / "store").as_uri(),
            }
        )
        self._groups: list[list[Part]] = []
        self._supervisor: Supervisor | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def addresses(self) -> Addresses:
        """Where everything is; complete once started."""
        settings = self.settings
        gateway, replica = settings.gateway, settings.replica
        return Addresses(
            gateway=f"http://{reachable(gateway.host)}:{gateway.port}",
            replicas={
                f"replica-{i}": f"http://{reachable(replica.host)}:{replica.port + i}" for i in range(settings.replicas)
            },
            prefect=settings.prefect_api_url.removesuffix("/api"),
            mlflow=settings.mlflow_url,
            database_url=settings.required_database_url(),
            token=settings.required_token(),
        )

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the parts that have been started and not ended."""
        return {
            part.name: part.pid
            for group in self._groups
            for part in group
            if isinstance(part, Program | Database) and part.pid is not None
        }

    def start(self) -> None:
        """See the class."""
        with contextlib.ExitStack() as opened:
            opened.enter_context(_signals_raise())
            opened.enter_context(state.owned(self.settings.state_dir))
            self._end_leftovers()
            if self.fresh:
                state.clear(self.settings.state_dir)
            self._prepare()
            self._supervisor = supervisor = Supervisor(self._groups, report=self.report, changed=self._write_state)
            opened.callback(state.remove, self.settings.state_dir)
            opened.callback(supervisor.stop)
            supervisor.start()
            self._open = opened.pop_all()

    def stop(self) -> None:
        """Stop everything; a second Ctrl-C does not interrupt it. Idempotent."""
        self._open.close()

    def wait(self) -> None:
        """Wait for a Ctrl-C or a signal, which raise."""
        assert self._supervisor is not None
        self._supervisor.wait()

    def _end_leftovers(self) -> None:
        """See the processes of a cluster off that was killed here: the kernel has told them to end."""
        earlier = state.read(self.settings.state_dir)
        left = []
        for leader in () if earlier is None else earlier.processes.values():
            for process in leader.session():
                if process.pid != leader.pid:
                    with contextlib.suppress(psutil.Error):
                        process.terminate()  # the kernel told only the leader
                left.append(process)
        if left:
            self.report(f"waiting for {len(left)} processes of a cluster that was killed")
        for process in psutil.wait_procs(left, timeout=LEFTOVER_S)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.embedded:
            self.postgres.prepare()

    def _prepare(self) -> None:
        """Find every fault that can be found before anything is started; complete the settings."""
        settings_by_port: dict[int, str] = {}
        for port in ports(self.settings, embedded=self.embedded):
            require_free_port(port.host, port.port, port.setting)
            if port.port in settings_by_port:
                raise ConfigError(f"{port.setting}: port {port.port} is {settings_by_port[port.port]}'s too")
            settings_by_port[port.port] = port.setting
        if not self.settings.replica.fake_engine:
            pull(self.settings)
        for name in state.PRIVATE:
            (self.settings.state_dir / name).mkdir(mode=0o700, exist_ok=True)
        if self.embedded:
            self.postgres.prepare()
            self.settings = self.settings.model_copy(update={"database_url": self.postgres.url()})
        else:
            create_databases(self.settings.required_database_url(), DATABASES[1:])
        self._groups = programs(self.settings, self.shards, self.environ)
        if self.embedded:
            self._groups.insert(0, [Database(postgres=self.postgres)])

    def _write_state(self) -> None:
        processes = {name: process for name, pid in self.pids.items() if (process := Process.of(pid)) is not None}
        owner = Process.of(os.getpid())
        assert owner is not None
        state.write(self.settings.state_dir, State(owner=owner, addresses=self.addresses, processes=processes))


def require_no_shard(settings: Settings) -> None:
    """Raise ``ConfigError`` if a shard is set that only a single replica would read."""
    if settings.replica.shard is not None:
        raise ConfigError(
            "COLLM_REPLICA__SHARD: that is one replica's; give a cluster its shards with `collm up --shard FILE`, or "
            "the demo its data with `collm demo --data DIR`"
        )


def chosen_shards(files: Sequence[Path], replicas: int) -> list[Path] | None:
    """Return the shards named on the command line, whole paths; None: the sample. Raises ``ConfigError``."""
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--shard: {file} is no file")
    if len(files) > replicas:
        raise ConfigError(f"--shard: {len(files)} shards for {replicas} replicas (COLLM_REPLICAS)")
    return [file.resolve() for file in files] or None


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more: no reason to stop
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise ``SystemExit``, where they would end the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    changed = {
        number: signal.signal(number, leave)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    """``collm up``."""
    parser = argparse.ArgumentParser(
        prog="collm up",
        description="Start Postgres, Prefect, MLflow, replicas, gateway, controller and worker on this machine, "
        "with everything they write in COLLM_STATE_DIR. Ctrl-C stops them.",
    )
    parser.add_argument(
        "--shard",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help='JSONL of {"prompt", "completion"} that the next replica fine-tunes on; once for each replica, replicas '
        "beyond them only serve (default: the sample that is shipped)",
    )
    files: list[Path] = parser.parse_args(argv).shard
    settings = load_settings()
    with LocalCluster(settings, shards=chosen_shards(files, settings.replicas)) as cluster:
        print(f"The cluster is up; Ctrl-C stops it.\n{cluster.addresses.lines()}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            cluster.wait()
        print("stopping", flush=True)
    return 0
