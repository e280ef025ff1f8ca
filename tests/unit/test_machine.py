"""How much memory there is."""

from pathlib import Path

import psutil

from infra.machine import memory_bytes


def test_the_containers_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    limit, absent = tmp_path / "memory.max", tmp_path / "none"
    whole = psutil.virtual_memory().total
    limit.write_text("2000000000\n")
    assert memory_bytes((absent, limit)) == 2_000_000_000
    limit.write_text("max\n")
    assert memory_bytes((absent, limit)) == whole
    limit.write_text(str(2**63 - 1))
    assert memory_bytes((limit,)) == whole
