"""Children: stopped within bounds, never left behind, whoever dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.errors import ConfigError
from infra.process import Account, Child, require_free_port, run

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_GRANDCHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def python(folder: Path, code: str, **more: float) -> Child:
    return Child(name="child", argv=[sys.executable, "-c", code], log=folder / "log", **more)  # type: ignore[arg-type]


def test_output_goes_to_the_log_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    child = python(tmp_path, "import os; print('a'); print(os.nice(0)); raise SystemExit(3)", nice=5)
    child.start()
    eventually(lambda: child.exit_code is not None)
    assert (child.exit_code, child.last_lines()) == (3, f"a\n{os.nice(0) + 5}")
    child.stop()


def test_one_that_does_not_listen_is_ended(tmp_path: Path) -> None:
    child = python(tmp_path, STUBBORN, stop_timeout_s=0.2)
    child.start()
    eventually(lambda: child.last_lines() == "up")
    child.stop()
    assert child.exit_code == -signal.SIGKILL


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    child = python(tmp_path, WITH_GRANDCHILD)
    child.start()
    eventually(lambda: child.last_lines().isdigit())
    grandchild = int(child.last_lines())
    child.stop()
    eventually(lambda: gone(grandchild))


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from infra.process import Child
child = Child(name="child", argv=["sleep", "60"], log=Path({str(tmp_path / "log")!r}))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: gone(pid))


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        Child(name="child", argv=["no-such-program"], log=tmp_path / "log").start()


def test_a_taken_port_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken .COLLM_GATEWAY__PORT."):
            require_free_port("127.0.0.1", port, "COLLM_GATEWAY__PORT")
    require_free_port("127.0.0.1", port, "COLLM_GATEWAY__PORT")


def test_an_account() -> None:
    own = Account(os.getuid(), os.getgid())
    account = Account.named("no-such-account", "nobody") if own.uid == 0 else own
    # Its groups too: those of the one who started it would open more than the account may see.
    if own.uid == 0:
        assert run(["id", "-G"], account=account) == (0, f"{account.gid}\n")
        assert run(["id", "-u"], account=account) == (0, f"{account.uid}\n")
    with pytest.raises(ConfigError, match="no-such-account"):
        Account.named("no-such-account")
