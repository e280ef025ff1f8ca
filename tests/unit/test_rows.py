"""Rows are split by distinct prompt, the same way in every process."""

from db.records import Split
from serving.rows import Row, prompt_key, set_sha256, split_rows


def test_no_prompt_is_on_two_sides() -> None:
    rows = [Row(f"Say {i % 40}!", f"{i}") for i in range(100)] + [Row("say 3", "again")]
    split = split_rows(rows, gate=5, report=10)
    keys = {name: {prompt_key(row.prompt) for row in part} for name, part in split.items()}
    assert len(split[Split.GATE]) == 5
    assert len(split[Split.REPORT]) == 10
    assert not keys[Split.GATE] & keys[Split.REPORT]
    assert not keys[Split.TRAIN] & (keys[Split.GATE] | keys[Split.REPORT])


def test_the_split_does_not_depend_on_order() -> None:
    rows = [Row(f"Say {i}", f"{i}") for i in range(50)]
    forward, backward = split_rows(rows, gate=5, report=10), split_rows(rows[::-1], gate=5, report=10)
    assert set_sha256(forward[Split.GATE]) == set_sha256(backward[Split.GATE])
    assert set_sha256(forward[Split.GATE]) != set_sha256(forward[Split.REPORT])
