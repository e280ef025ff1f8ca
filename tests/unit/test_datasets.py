"""The shipped sample is whole, small, licensed and large enough for its splits."""

import csv
import gzip
import hashlib
import json
from pathlib import Path

import pytest

from db.records import Split
from infra.errors import ConfigError
from serving import datasets
from serving.datasets import Cut, Source, cut_rows, cut_trace, full_rows, read_source, sample_shards, trace_path
from serving.rows import Row, prompt_key, split_rows


def shipped(shard: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in shard.read_text(encoding="utf-8").splitlines()]


def test_shipped_files_are_small() -> None:
    sizes = [f.stat().st_size for f in datasets.DATA_DIR.rglob("*") if f.is_file()]
    assert max(sizes) < 1_000_000
    assert sum(sizes) < 1_500_000


def test_licences_lie_beside_the_data() -> None:
    folder = datasets.DATA_DIR / "licenses"
    assert {f.name for f in folder.iterdir()} == {"CC-BY-4.0.md", "MIT-GPTeacher.txt", "MIT-nl2bash-data.txt"}
    assert all("MIT License" in f.read_text() for f in folder.glob("MIT-*"))
    notice = (folder / "CC-BY-4.0.md").read_text()
    assert "creativecommons.org/licenses/by/4.0" in notice
    assert "Athiwaratkun" in notice
    assert "Patel" in notice


@pytest.mark.parametrize("shard", sample_shards(), ids=lambda p: p.stem)
def test_each_shard_has_enough_distinct_prompts(shard: Path) -> None:
    rows = shipped(shard)
    splits = split_rows(rows, gate=48, report=100)
    assert len({prompt_key(r.prompt) for r in rows}) == len(rows)
    assert len(splits[Split.GATE]) == 48
    assert len(splits[Split.REPORT]) >= 100
    assert len(splits[Split.TRAIN]) >= 450
    assert all(r.prompt.strip() and r.completion.strip() for r in rows)


def test_no_prompt_is_in_two_shards() -> None:
    a, b = ({prompt_key(r.prompt) for r in shipped(p)} for p in sample_shards())
    assert not a & b


def test_trace_is_ordered_and_holds_a_busy_spell_at_the_offset() -> None:
    with trace_path().open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    arrivals = [datasets.arrival_s(r["TIMESTAMP"]) for r in rows]
    assert arrivals == sorted(arrivals)
    after = [a - arrivals[0] for a in arrivals if a - arrivals[0] >= datasets.TRACE_OFFSET_S]
    assert len(after) >= 190
    assert after[100] - after[0] < 15


def test_cut_takes_rows_of_fitting_length_once_per_prompt_and_ignores_order() -> None:
    rows = [Row(f"prompt {i}", "x" * (i + 1)) for i in range(40)] + [Row("Prompt, 10!", "y" * 12)]
    cut = Cut(rows=8, most=30, least_completion=4)
    chosen = cut_rows(rows, cut)
    assert len(chosen) == 8
    assert all(len(r.completion) >= 4 and len(r.prompt) + len(r.completion) <= 30 for r in chosen)
    assert len({prompt_key(r.prompt) for r in chosen}) == 8
    assert cut_rows(rows[:40][::-1], cut) == cut_rows(rows[:40], cut)


def test_trace_cut_is_by_seconds_from_the_first_arrival() -> None:
    lines = [f"2023-11-16 18:15:{s:02}.5000000,10,{s}" for s in range(10)]
    text = "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    assert cut_trace(text, 2, 5).splitlines()[1:] == lines[2:5]


def test_a_source_may_be_packed_and_must_be_the_published_one(tmp_path: Path) -> None:
    data = json.dumps(["row"]).encode()
    source = Source(suffix="codegen-instruct.json", sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(ConfigError, match="codegen-instruct"):
        read_source(tmp_path, source)
    (tmp_path / "any_codegen-instruct.json.gz").write_bytes(gzip.compress(data))
    assert read_source(tmp_path, source) == data.decode()
    with pytest.raises(ConfigError, match="sha256"):
        full_rows(tmp_path, 0)
    with pytest.raises(ConfigError, match="client 2"):
        full_rows(tmp_path, 2)
