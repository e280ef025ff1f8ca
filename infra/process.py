"""Processes that belong to this one: started, watched, stopped within bounded time, never left behind.

A child is its own process group, so that a Ctrl-C at the terminal reaches this process alone, which stops the
children in order. The kernel ends a child when the *thread* that started it ends: start children from one that
outlives them.
"""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from infra import child
from infra.errors import ConfigError

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed)\b.*:")


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a process runs as."""

    uid: int
    gid: int

    @classmethod
    def named(cls, *names: str) -> "Account":
        """Return the first account that exists. Raises ``ConfigError``."""
        for name in names:
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(entry.pw_uid, entry.pw_gid)
        raise ConfigError(f"none of these accounts exists: {', '.join(names)}")


def command(
    argv: Sequence[str | Path], *, on_parent_death: signal.Signals, nice: int = 0, account: Account | None = None
) -> list[str]:
    """Return the command line that runs ``argv`` as a child of this process (see ``infra.child``)."""
    who = "-" if account is None else f"{account.uid}:{account.gid}"
    prefix = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(int(on_parent_death)), str(nice), who]
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"no program {argv[0]}")
    return [*prefix, program, *map(str, argv[1:])]


def run(argv: Sequence[str | Path], *, account: Account | None = None, timeout_s: float = 60.0) -> tuple[int, str]:
    """Run to its end; return exit code and output."""
    done = subprocess.run(
        command(argv, on_parent_death=signal.SIGKILL, account=account),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout


@dataclass(slots=True, kw_only=True)
class Child:
    """One long-lived child."""

    name: str
    argv: Sequence[str | Path]
    log: Path
    """Its output is appended here."""
    environ: Mapping[str, str] | None = None
    nice: int = 0
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 15.0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    group_ended: bool = field(default=True, init=False)

    def start(self) -> None:
        """Start it; its output goes to the log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(self.argv, on_parent_death=self.stop_signal, nice=self.nice, account=self.account),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environ,
                start_new_session=True,
            )
        self.group_ended = False

    @property
    def pid(self) -> int | None:
        """Its process id; None before the start."""
        return None if self.process is None else self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs or before the start; negative: the signal that ended it."""
        return None if self.process is None else self.process.poll()

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def ask_to_stop(self) -> None:
        """Send the stop signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.stop_signal)

    def stop(self) -> None:
        """Ask, wait, insist; then end whatever it left in its process group. Idempotent."""
        if self.process is None or self.group_ended:
            return
        self.ask_to_stop()
        try:
            self.process.wait(self.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.group_ended = True  # never again: the number may come to name another group

    def complaint(self) -> str:
        """Return the line of its log that most likely says why it ended: the last exception's, else the last."""
        lines = self.last_lines(40).splitlines() or [""]
        return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])

    def last_lines(self, count: int = 5) -> str:
        """Return the end of its log, for an error message."""
        with contextlib.suppress(OSError):
            lines = self.log.read_bytes()[-8192:].decode(errors="replace").splitlines()
            return "\n".join(lines[-count:])
        return ""


def require_free_port(host: str, port: int, setting: str) -> None:
    """Raise ``ConfigError`` that names port and setting if nobody can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            raise ConfigError(f"{setting}: there is no port {port}") from None
        except OSError as error:
            raise ConfigError(f"port {port} on {host} is taken ({setting}): {error.strerror}") from None


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait for a process that is not a child of this one; return whether it has ended."""
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
