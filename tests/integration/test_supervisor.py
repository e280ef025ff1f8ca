"""The supervisor on small real processes: order, failures, restarts, stop."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.process import Child
from infra.services import Program
from infra.supervisor import StartFailed, Supervisor

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLEEP = "import time; time.sleep(60)"


def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def program(folder: Path, name: str, code: str, *arguments: str, health: str = "", to_its_end: bool = False) -> Program:
    child = Child(name=name, argv=[sys.executable, "-c", code, *arguments], log=folder / name)
    return Program(name=name, child=child, health=health, to_its_end=to_its_end, start_timeout_s=10.0)


def pid(part: Program) -> int:
    assert part.pid is not None
    return part.pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_groups_start_in_order_and_all_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    server = program(tmp_path, "server", HEALTHY, str(port), health=f"http://127.0.0.1:{port}/health")
    first = program(
        tmp_path, "first", f"import os; print(os.path.exists({str(tmp_path / 'server')!r}))", to_its_end=True
    )
    last = program(tmp_path, "last", SLEEP)
    said: list[str] = []
    supervisor = Supervisor([[first], [server], [last]], report=said.append)
    supervisor.start()
    assert first.child.last_lines() == "False"
    assert [line.split(":")[0] for line in said] == ["first", "server", "last"]
    pids = [pid(server), pid(last)]
    supervisor.stop()
    supervisor.stop()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("code", "to_its_end", "reason"),
    [
        ("print('no such table'); raise SystemExit(3)", True, r"bad did not start: exit code 3; no such table; log: "),
        ("raise SystemExit(0)", False, r"bad did not start: exit code 0"),
    ],
)
def test_a_part_that_does_not_start_stops_the_others(tmp_path: Path, code: str, to_its_end: bool, reason: str) -> None:
    good = program(tmp_path, "good", SLEEP)
    bad = program(tmp_path, "bad", code, health="http://127.0.0.1:1/", to_its_end=to_its_end)
    never = program(tmp_path, "never", SLEEP)
    pids: list[int] = []

    def changed() -> None:
        pids.extend(part.pid for part in (good, never) if part.pid is not None)

    with pytest.raises(StartFailed, match=reason):
        Supervisor([[good], [bad], [never]], report=lambda line: None, changed=changed).start()
    assert len(set(pids)) == 1
    assert not psutil.pid_exists(pids[0])


def test_one_that_never_gets_ready(tmp_path: Path) -> None:
    slow = program(tmp_path, "slow", SLEEP, health="http://127.0.0.1:1/")
    slow.start_timeout_s = 0.3
    with pytest.raises(StartFailed, match=r"slow did not become ready within 0.3 s"):
        Supervisor([[slow]], report=lambda line: None).start()
    assert slow.pid is None


def test_what_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    part = program(tmp_path, "part", SLEEP)
    other = program(tmp_path, "other", SLEEP)
    said: list[str] = []
    supervisor = Supervisor([[part, other]], report=said.append)
    supervisor.start()
    before, untouched = pid(part), pid(other)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: part.pid not in (None, before))
    assert pid(other) == untouched
    assert any(line.startswith("part ended (signal 9; log: ") for line in said)
    assert supervisor.restarts == {"part": 1}
    supervisor.stop()
    assert part.pid is None


def test_it_gives_up_on_one_that_keeps_dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.supervisor.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("infra.supervisor.MAX_RESTARTS", 2)
    part = program(tmp_path, "part", "import time; time.sleep(0.3)")
    said: list[str] = []
    supervisor = Supervisor([[part]], report=said.append)
    supervisor.start()
    eventually(lambda: any("2 times in a row: it is not started again" in line for line in said))
    supervisor.stop()


def test_stopping_while_starting(tmp_path: Path) -> None:
    slow = program(tmp_path, "slow", SLEEP, health="http://127.0.0.1:1/")
    supervisor = Supervisor([[slow]], report=lambda line: None)

    def stop() -> None:
        eventually(lambda: slow.pid is not None)
        supervisor.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(StartFailed, match="stopped while starting"):
        supervisor.start()
    stopper.join()
    assert slow.pid is None


def test_a_supervisor_whose_thread_never_started_stops_at_once() -> None:
    supervisor = Supervisor([], report=lambda line: None)
    supervisor._thread = threading.Thread(target=lambda: None)  # as when the machine has no more threads
    begin = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - begin < 10
