"""What a process costs, and what it says of itself at ``/metrics``."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")

GAUGES = (
    "tgi_queue_size",
    "tgi_batch_current_size",
    "collm_queue_requests",
    "collm_queue_age_seconds",
    "collm_kv_used_ratio",
    "collm_pinned_requests",
    "collm_adapters_waiting",
)
"""Zero when nobody is served."""
GONE = ("collm_kv_tokens",)
"""The same, and shown only where there is something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """A process at one moment."""

    at_s: float
    pss_bytes: int
    """Memory of its own, and its part of what it shares."""
    threads: int
    fds: int


def vitals(pid: int, start_s: float) -> Vitals:
    """Measure a process now. Linux only."""
    proc = Path(f"/proc/{pid}")
    rollup = (proc / "smaps_rollup").read_text()
    pss = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert pss is not None
    return Vitals(
        at_s=time.monotonic() - start_s,
        pss_bytes=1024 * int(pss[1]),
        threads=sum(1 for _ in (proc / "task").iterdir()),
        fds=sum(1 for _ in (proc / "fd").iterdir()),
    )


def samples(exposition: str) -> dict[str, dict[str, float]]:
    """Return name → labels as they stand there → value."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for line in exposition.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            found[match["name"]][match["labels"] or ""] = float(match["value"])
    return dict(found)


def busy_gauges(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return every gauge that should be zero and is not, or is not there."""
    busy = [f"{name} is missing" for name in GAUGES if name not in metrics]
    for name in (*GAUGES, *GONE):
        busy += [f"{name}{{{labels}}} = {value:g}" for labels, value in metrics.get(name, {}).items() if value != 0]
    return busy


def errors_logged(lines: Iterable[str]) -> Counter[str]:
    """Return what a JSON log says at level error or worse, and lines that are no JSON: tracebacks, crashes."""
    found: Counter[str] = Counter()
    for line in lines:
        if not line.startswith("{"):
            found[line[:160]] += bool(line.strip())
        elif '"level": "error"' in line or '"level": "critical"' in line:
            found[line[:400]] += 1
    return +found
