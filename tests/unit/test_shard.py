"""A shard file is read whole or refused by file and line."""

import json
from pathlib import Path

import pytest

from db.records import Split
from infra.errors import ConfigError
from serving.rows import Row
from serving.shard import load_shard


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def row(i: int) -> str:
    return json.dumps({"prompt": f"prompt {i}", "completion": f"answer {i}", "source": "made up"})


def test_splits_hold_every_row_once(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.jsonl", *(row(i) for i in range(10)), "")
    splits = load_shard(shard, gate=2, report=3)
    assert {split: len(rows) for split, rows in splits.items()} == {Split.GATE: 2, Split.REPORT: 3, Split.TRAIN: 5}
    assert {r for rows in splits.values() for r in rows} == {Row(f"prompt {i}", f"answer {i}") for i in range(10)}


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    odd = "left\u2028right\x85end"
    shard = write(tmp_path / "s.jsonl", json.dumps({"prompt": odd, "completion": odd}, ensure_ascii=False), row(1))
    splits = load_shard(shard, gate=1, report=0)
    assert Row(odd, odd) in splits[Split.GATE] + splits[Split.TRAIN]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2"),
        ("[]", "not an object"),
        ('{"prompt": "p"}', "'completion'"),
        ('{"prompt": 1, "completion": "c"}', "'prompt'"),
        ('{"prompt": "p", "completion": " "}', "'completion'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    shard = write(tmp_path / "s.jsonl", row(0), line)
    with pytest.raises(ConfigError, match="line 2") as caught:
        load_shard(shard, gate=1, report=0)
    assert problem in caught.value.message


def test_too_few_prompts_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.jsonl", *(row(i) for i in range(5)))
    with pytest.raises(ConfigError, match="too few"):
        load_shard(shard, gate=2, report=3)
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_shard(tmp_path / "none.jsonl", gate=1, report=1)
