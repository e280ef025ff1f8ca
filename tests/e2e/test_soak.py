"""``make soak`` in small, on the fake engine: a real process and database, a few seconds of everything at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def test_seconds_of_everything_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COLLM_")}
    argv = [sys.executable, "-m", "tests.soak", "--fake", "--minutes", "0.1", "--replay", "150", "--out", str(out)]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["ok"]
    assert report["requests"]["answered"] > 10
    assert report["replayed"]["answers"] > 10
    assert report["replayed"]["mismatches"] == []
