"""How fast the engine is, beside vLLM and transformers + PEFT: ``make bench-engine`` writes bench-engine.json.

``figures`` holds each name's value (the median of the paired repeats, or what ``inputs`` says), its interval (``low``
and ``high``: with seven repeats the smallest and the largest, which hold the median in 98 of 100 cases) and the number
of repeats. Ratios are peer over ours for times, ours over peer for rates: above 1 we are faster. Adapters are r=8 on
every linear, prompts 40 tokens long where nothing else is said. ``invariant_…`` is how many times as long our own step
takes in the batch-invariant mode. ``flags`` says how each peer ran, ``inputs`` what figures were computed from,
``missing`` which could not be measured, and why.

Each part runs in a process of its own and hands in what it has after every figure; the rest goes on without it if it
fails. With ``--only`` the other parts' figures stay as they are in the file.
"""

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import structlog

from infra.process import command
from infra.services import HUGE_PAGES
from tests.bench.engine.figures import AT_LEAST, AT_MOST, Report
from tests.bench.engine.options import Options

PARTS = {
    "decode": ("decode_", "prefill_"),
    "training": ("train_idle", "slice_", "step_"),
    "load": ("attain_", "train_30", "train_60", "train_90"),
    "swap": ("swap_",),
    "memory": ("memory_", "leak"),
}
"""Modules in ``tests.bench.engine``, and how the names of their figures begin."""


def main() -> int:
    """Run the parts. 0: every figure was measured, whether or not it meets its bar."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-engine.json"))
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    Options.add_to(parser)
    arguments = parser.parse_args()
    options = Options.of(arguments)
    if arguments.part:
        # A line for each of some thousand swaps would drown the figures, and so do the peers' deprecations.
        warnings.simplefilter("ignore", FutureWarning)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        importlib.import_module(f"tests.bench.engine.{arguments.part}").measure(Report.read(arguments.out), options)
        return 0
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if set(wanted) == set(PARTS):
        arguments.out.unlink(missing_ok=True)
    begun = time.monotonic()
    for part in PARTS:
        if part in wanted:
            run(part, arguments.out, options)
    report = Report.read(arguments.out)
    absent = [name for name in (*AT_LEAST, *AT_MOST) if name not in report.figures]
    print(f"{len(report.figures)} figures in {arguments.out}, {time.monotonic() - begun:.0f} s")
    print(f"absent: {', '.join(absent) or 'none'}")
    return 1 if absent else 0


def run(part: str, out: Path, options: Options) -> None:
    """Run a part in a process of its own, which writes its figures into the file as it has them."""
    print(f"── {part}", flush=True)
    mine = [name for name in (*AT_LEAST, *AT_MOST) if name.startswith(PARTS[part])]
    before = Report.read(out)
    for name in mine:
        before.figures.pop(name, None)
    before.write()
    argv: list[str | Path] = [sys.executable, "-m", __spec__.name, "--part", part, "--out", out, *options.argv()]
    environ = {"GLIBC_TUNABLES": HUGE_PAGES, **os.environ}  # as a cluster's replicas
    code = subprocess.run(command(argv, on_parent_death=signal.SIGTERM), env=environ, check=False).returncode
    if code:
        found = Report.read(out)
        found.miss([name for name in mine if name not in found.figures], f"{part!r} ended with exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
