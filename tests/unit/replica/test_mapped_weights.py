"""Replicas on one host share the pages of the frozen weights: they are mapped from the file, and never written."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from db.records import Factor
from infra.settings import ModelSettings
from serving.ports import TrainTask, WorkState
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.trainer import TorchTrainer
from serving.rows import Row
from tests.small_models import Answer, build, finish, prompt_of, weights_for

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path
from tests.unit.replica.test_mapped_weights import FILE, load, pages, use

folder = Path(sys.argv[1])
backbone = load(folder, sys.argv[2])
use(backbone)
found = pages(folder / FILE)
print(found["Rss"], found["Shared_Clean"] + found["Shared_Dirty"], found["Anonymous"])
"""
FILE = "model.safetensors"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is mapped")


def load(folder: Path, dtype: str) -> Backbone:
    return Backbone.load(folder, ModelSettings.model_validate({"dtype": dtype, "packed": True}))


def use(backbone: Backbone) -> None:
    """Answer a request under a version, and take an optimizer step."""
    engine = TorchEngine(backbone, rows=2, max_total_tokens=96, places=2, max_rank=4)
    version = weights_for({name: linear.shape for name, linear in backbone.linears.items()}, 1)
    engine.write(0, version)
    answer = Answer(0, 0, prompt_of(1, 9))
    finish(engine, [answer], 3)
    assert len(answer.drawn) == 3
    trainer = TorchTrainer(backbone, FakeTokenizer(), 64)
    task = TrainTask(factor=Factor.BOTH, tokens=1, rows_per_step=2, lr=0.01, seed=0)
    work = trainer.train(task, version, [Row("say", "something"), Row("and", "more")])
    while (report := work.slice()).state is WorkState.RUNNING:
        pass
    assert (report.state, work.steps) == (WorkState.DONE, 1), report.reason


def spans(file: Path) -> list[tuple[int, int]]:
    """Return the addresses at which this process has mapped a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [line[0].split("-") for line in lines if line[-1] == str(file)]
    return [(int(begin, 16), int(end, 16)) for begin, end in found]


def pages(file: Path) -> Counter[str]:
    """Return what the kernel says of a file's mappings in this process, in kB. ``Anonymous``: copied on a write."""
    found: Counter[str] = Counter()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = rest[-1] == str(file)
        elif inside and rest[-1] == "kB":
            found[first.removesuffix(":")] += int(rest[0])
    return found


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
def test_two_processes_hold_the_weights_once(tmp_path: Path, dtype: str, tied: bool) -> None:
    build(vocab_size=270, tie_word_embeddings=tied).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    file = tmp_path / FILE
    backbone = load(tmp_path, dtype)
    use(backbone)
    mapped = spans(file)
    assert len(mapped) == 1
    for name, parameter in backbone.model.named_parameters():
        begin = parameter.data_ptr()
        assert mapped[0][0] <= begin < begin + parameter.nbytes <= mapped[0][1], f"{name} is a copy"
    assert backbone.dtype == getattr(torch, dtype)
    here = pages(file)
    assert here["Rss"] * 1024 >= backbone.weight_bytes
    assert here["Anonymous"] == 0, "somebody has written to the weights"
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, dtype], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert other.returncode == 0, other.stderr[-2000:]
    resident, shared, copied = map(int, other.stdout.split())
    assert (shared, copied) == (resident, 0)
    assert resident * 1024 >= backbone.weight_bytes
