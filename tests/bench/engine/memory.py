"""Memory: what training adds to a replica, beside a PEFT trainer of its own; and whether swaps and requests leak.

``memory_train`` is (PSS of a replica that serves and trains − PSS of the same one that only serves) over the PSS of a
process that trains the same rows with PEFT; each is the largest that is seen. ``leak`` is the growth of a replica's PSS
over ``--leak`` swaps, federated and local ones in turn, and as many requests, after some to warm up.
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.process import command
from tests.bench.engine.figures import Figure, Report
from tests.bench.engine.options import Options

SAMPLE_S = 0.1


def pss_bytes(pid: int) -> int:
    """Return a process's proportional set size: its own pages, and its part of those that it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no Pss of {pid}")


class Watched:
    """A child of ``memory_child`` and the largest PSS that was seen, as a context manager."""

    def __init__(self, role: str, *arguments: str) -> None:
        self._argv = [sys.executable, "-m", "tests.bench.engine.memory_child", role, *arguments]
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            command(self._argv, on_parent_death=signal.SIGKILL),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.process.kill()
        self.process.communicate()

    def hear(self, word: str) -> str:
        """Wait until the child says ``word``; return the rest of its line. Raises ``RuntimeError`` if it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            head, _, rest = line.strip().partition(" ")
            if head == word:
                return rest
        raise RuntimeError(f"{self._argv[-2:]} ended before it said {word!r}")

    def go_on(self) -> None:
        """Let it do what comes next."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            try:
                self.most = max(self.most, pss_bytes(self.process.pid))
            except (OSError, ValueError):
                return


def measure(report: Report, options: Options) -> None:
    """Both figures."""
    added, trainer = [], []
    for _ in range(options.repeats):
        serving, whole = replica(options)
        added.append(whole - serving)
        trainer.append(peft(options))
        report.note(
            "memory_train",
            {"replica_adds_bytes": list(added), "trainer_bytes": list(trainer), "serving_bytes": serving},
        )
    report.add(Figure.of("memory_train", [a / t for a, t in zip(added, trainer, strict=True)]))
    leak(report, options)


def replica(options: Options) -> tuple[int, int]:
    """Return the PSS of a replica that serves, and of the same one when it has trained as well."""
    with Watched("replica", str(options.threads)) as child:
        child.hear("served")
        serving = child.most
        child.go_on()
        child.hear("trained")
        return serving, child.most


def peft(options: Options) -> int:
    """Return the PSS of a trainer."""
    with Watched("peft", str(options.threads)) as child:
        child.hear("trained")
        return child.most


def leak(report: Report, options: Options) -> None:
    """One long run."""
    begun_s = time.monotonic()
    with Watched("leak", str(options.threads), str(options.leak)) as child:
        seen = [int(child.hear("pss")) for _ in range(2)]
    report.note("leak", {"before_bytes": seen[0], "after_bytes": seen[1], "seconds": time.monotonic() - begun_s})
    report.add(Figure.of("leak", [seen[1] / seen[0] - 1], runs=options.leak))
