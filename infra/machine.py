"""What this machine, or this container of it, has."""

import contextlib
from pathlib import Path

import psutil

CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container reads its limit: version 2 of control groups, version 1."""

MEMORY_PART = 0.8
"""Of the memory here that replicas take by default: databases, servers and page cache need some too."""


def memory_bytes(limits: tuple[Path, ...] = CGROUPS) -> int:
    """Return the bytes that the processes here may use together: the machine's, or the container's if that is less."""
    found = [int(psutil.virtual_memory().total)]
    for file in limits:
        # Absent, or "max": no limit.
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text()))
    return min(found)
