"""A replica's own rows, read from its shard file and split by distinct prompt."""

import json
from pathlib import Path

from db.records import Split
from infra.errors import ConfigError
from serving.rows import Row, split_rows


def load_shard(path: Path, *, gate: int, report: int) -> dict[Split, tuple[Row, ...]]:
    """Read JSONL of ``{"prompt", "completion"}`` and split it. Raises ``ConfigError`` that names file and line.

    Further keys are ignored, blank lines skipped. There must be a distinct prompt for each gate and report row, and
    at least one row left to train on.
    """
    try:
        # Not ``splitlines``: JSON allows U+2028 and its like within a string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"shard {path}: {e}") from e
    rows = [parse_row(line, f"shard {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    splits = split_rows(rows, gate=gate, report=report)
    if len(splits[Split.GATE]) < gate or len(splits[Split.REPORT]) < report or not splits[Split.TRAIN]:
        raise ConfigError(
            f"shard {path}: {len(rows)} rows are too few distinct prompts for {gate} gate rows, {report} report rows "
            "and any to train on"
        )
    return splits


def parse_row(line: str, where: str) -> Row:
    """Return one row. Raises ``ConfigError`` that starts with ``where``."""
    try:
        value = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: not an object")
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str) or not value[key].strip():
            raise ConfigError(f"{where}: {key!r} is not a text, or empty")
    return Row(value["prompt"], value["completion"])
