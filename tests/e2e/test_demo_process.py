"""``collm demo`` as a user runs it, with a stand-in for the engine: everything else is real."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from serving.load.schema import Report

pytestmark = pytest.mark.e2e

COLLM = Path(sys.executable).with_name("collm")
PATIENCE_S = 180.0


@pytest.fixture
def environ(tmp_path: Path, model_dir: Path) -> dict[str, str]:
    """Settings of a cluster on free ports."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(6)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        gateway, prefect, mlflow, postgres, *replica = [probe.getsockname()[1] for probe in probes]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("COLLM_")},
        "COLLM_STATE_DIR": str(tmp_path / "state"),
        "COLLM_MODEL__PATH": str(model_dir),
        "COLLM_GATEWAY__PORT": str(gateway),
        "COLLM_PREFECT_API_URL": f"http://127.0.0.1:{prefect}/api",
        "COLLM_MLFLOW_URL": f"http://127.0.0.1:{mlflow}",
        "COLLM_POSTGRES_PORT": str(postgres),
        "COLLM_REPLICA__PORT": str(min(replica)),
        "COLLM_REPLICA__FAKE_ENGINE": "true",
        "COLLM_SLO__TTFT_S": "20",
        "COLLM_SLO__TPOT_S": "5",
        "COLLM_CONTROLLER__DEAD_AFTER_S": "20",
    }


class Demo:
    """The running command, and what it has said."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []

    def until(self, words: str) -> None:
        """Read its output up to a line with ``words``; killed if that takes too long."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line)
                if words in line:
                    return
        finally:
            timer.cancel()
        raise AssertionError(f"it ended without {words!r}:\n{''.join(self.lines)}")

    def family(self) -> list[psutil.Process]:
        """Every process that it has started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def end(self) -> int:
        """Send Ctrl-C, return the exit code."""
        self.process.send_signal(signal.SIGINT)
        self.lines.append(self.process.communicate(timeout=60)[0])
        return self.process.returncode


@contextmanager
def demo(environ: dict[str, str], *arguments: str) -> Iterator[Demo]:
    command = [str(COLLM), "demo", "--windows", "SC", "--window-s", "6", "--load", "0.1"]
    command += ["--measure-s", "0.5", *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Demo(process)
        finally:
            process.kill()


def test_it_reports_and_keeps_the_cluster_until_ctrl_c(environ: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with demo(environ, "--keep", "--out", str(out)) as running:
        running.until("the cluster stays up")
        report = Report.model_validate_json((out / "report.json").read_text())
        assert [window.kind for window in report.windows] == ["static", "collm"]
        assert sum(window.failed for window in report.windows) == 0
        assert report.windows[0].arrivals == report.windows[1].arrivals > 0
        assert report.windows[0].train_tokens == 0
        assert report.rounds
        assert report.ce.end <= report.ce.start
        assert "<svg" in (out / "report.html").read_text()

        answer = httpx.post(
            f"{report.addresses['gateway']}/generate", json={"inputs": "print", "parameters": {"max_new_tokens": 4}}
        )
        assert answer.status_code == 200
        assert answer.headers["x-adapter-uid"] == report.ce.end_uid
        for name, path in (("Prefect", "/api/health"), ("MLflow", "/health")):
            assert httpx.get(report.addresses[name] + path).status_code == 200
        status = subprocess.run([COLLM, "status"], env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert status.returncode == 0, status.stderr
        assert "replica-1" in status.stdout
        replayed = subprocess.run(
            [COLLM, "replay", "--seconds", "2", "--rate", "3", "--max-context-tokens", "60", "--out", out / "r.json"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert json.loads((out / "r.json").read_text())["load"]["arrivals"] == 6

        family = running.family()
        assert running.end() == 0
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_ctrl_c_in_the_middle_stops_everything(environ: dict[str, str], tmp_path: Path) -> None:
    with demo(environ, "--out", str(tmp_path)) as running:
        running.until("cross-entropy at the start")
        family = running.family()
        assert len(family) > 6
        assert running.end() == 130
        assert "Traceback" not in "".join(running.lines)
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert not (tmp_path / "report.json").exists()


def test_wrong_windows_are_refused_before_anything_starts(environ: dict[str, str], tmp_path: Path) -> None:
    found = subprocess.run(
        [COLLM, "demo", "--windows", "SXC", "--out", tmp_path], env=environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr.startswith("collm demo: --windows:")
    assert not (tmp_path / "state").exists()
