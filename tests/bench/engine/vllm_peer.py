"""vLLM in a process of its own, asked over a pipe, and stopped whenever it is not asked."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.process import command
from tests.bench.engine.figures import Inputs

CHILD = Path(__file__).with_name("vllm_child.py")
CORES = "0-1"
SYSTEM_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
PRELOADED = (("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"), ("libiomp5.so",))
"""Of each group the first that is found."""


class VllmFailed(Exception):
    """It cannot be measured; the message is its own."""


@dataclass(slots=True, kw_only=True)
class VllmPeer:
    """One vLLM, as a context manager. The process is stopped (SIGSTOP) between questions."""

    python: Path
    model: Path
    dtype: str
    eager: bool
    adapters: Mapping[str, Path]
    rows: int
    log: Path
    told: dict[str, Any] = field(default_factory=dict)
    """What it said of itself."""
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start it. Raises ``VllmFailed``."""
        if not self.python.exists():
            raise VllmFailed(f"no {self.python}")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command([self.python, CHILD], on_parent_death=signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | self.environ(),
                process_group=0,
                text=True,
            )
        try:
            self.told = self._asked(
                {
                    "model": str(self.model),
                    "dtype": self.dtype,
                    "eager": self.eager,
                    "adapters": {name: str(path) for name, path in self.adapters.items()},
                    "rows": self.rows,
                }
            )
        except VllmFailed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def decode(self, rows: Sequence[str | None], prompt: int, lengths: tuple[int, int]) -> float:
        """Return the seconds of a decode step of rows that wear these adapters."""
        return self._timed({"decode": list(rows), "prompt": prompt, "lengths": lengths})

    def prefill(self, adapter: str | None, tokens: int) -> float:
        """Return the seconds of one prompt."""
        return self._timed({"prefill": adapter, "tokens": tokens})

    def close(self) -> None:
        """End it and all that it started."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def environ(self) -> dict[str, str]:
        """Return the variables that it is given."""
        return {
            "LD_PRELOAD": ":".join(map(str, self.preload())),
            "VLLM_CPU_OMP_THREADS_BIND": CORES,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # All in one process, else three of them share two cores: measured to be no slower.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def preload(self) -> list[Path]:
        """Return the libraries that go before its own, where they are found."""
        folders = (self.python.parent.parent / "lib", SYSTEM_LIBRARIES)
        found = []
        for names in PRELOADED:
            paths = [folder / name for folder in folders for name in names]
            found += [path for path in paths if path.exists()][:1]
        return found

    @property
    def mode(self) -> str:
        """How it computes."""
        return "eager" if self.eager else "compiled"

    @property
    def compiles(self) -> bool:
        """Whether it does compile: asked to, it may have found that it can't, as with LoRA."""
        return bool(self.told.get("compiles"))

    def flags(self) -> Inputs:
        """Return how it runs."""
        return {
            **self.told,
            "dtype": self.dtype,
            "environment": self.environ(),
            "lora": bool(self.adapters),
            "mode": self.mode,
            "greedy": True,
            "ignore_eos": True,
        }

    def _timed(self, question: Mapping[str, Any]) -> float:
        self._signal(signal.SIGCONT)
        try:
            return float(self._asked(question)["s"])
        finally:
            self._signal(signal.SIGSTOP)

    def _asked(self, question: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended: {self._last_words()}"}
        if "error" in answer:
            raise VllmFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "without a word"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)
