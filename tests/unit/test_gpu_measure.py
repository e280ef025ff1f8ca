"""The GPU check's figures, on a CPU and a tiny model: the script works before it meets a GPU."""

import json
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.measure import main


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_figure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--size", "tiny", "--repeats", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["device", *["decode"] * 5, "prefill", "swap", "training"]
    assert all(line["ms"] > 0 for line in lines[1:6])
    assert lines[6]["tokens_per_s"] > 0
    assert lines[7]["writes"] > 0
    assert lines[8]["supervised_tokens_per_s"] > 0
    assert 0 < lines[8]["share"] < 1
