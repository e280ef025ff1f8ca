"""A replica on a CPU leaves CUDA alone: it neither initialises it nor imports what only a GPU needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.small_models import build

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import torch
import transformers

GPU_ONLY = {{
    "apex", "bitsandbytes", "cuda", "cupy", "deepspeed", "flash_attn", "flashinfer", "numba", "nvidia", "nvidia_smi",
    "pycuda", "pynvml", "triton", "vllm", "xformers",
}}
before = set(sys.modules)  # a CUDA build of torch brings some of its own
wanted, asked = set(), []

class Notes(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in GPU_ONLY and self.by_us():
            wanted.add(name)
    def by_us(self):
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        path = "" if frame is None else frame.f_code.co_filename
        return path.startswith({str(ROOT)!r} + "/") and "site-packages" not in path

def initialise():
    asked.append("torch.cuda")
    raise RuntimeError("CUDA was initialised")

sys.meta_path.insert(0, Notes())
torch.cuda._lazy_init = initialise  # a build without CUDA could not be caught at it otherwise

import serving.replica.main
from db.records import Factor
from infra.settings import Settings
from serving.ports import TrainTask, WorkState
from serving.replica.build import load_engine
from serving.rows import Row
from tests.small_models import Answer, finish, prompt_of, weights_for

folder = Path(sys.argv[1])
replica = {{"max_total_tokens": 64, "row_tokens": 32, "rows": 2, "shard": folder / "never read"}}
settings = Settings.model_validate({{"model": {{"path": folder}}, "replica": replica}})
engine = load_engine(settings)
version = weights_for({{name: linear.shape for name, linear in engine.backbone.linears.items()}}, 1)
engine.write(0, version)
answer = Answer(0, 0, prompt_of(1, 9))
finish(engine, [answer], 3)
task = TrainTask(factor=Factor.BOTH, tokens=1, rows_per_step=1, lr=0.01, seed=0)
work = engine.trainer().train(task, version, [Row("a", "b")])
while (report := work.slice()).state is WorkState.RUNNING:
    pass
new = {{name for name in set(sys.modules) - before if name.partition(".")[0] in GPU_ONLY}}
print(len(answer.drawn), report.state, torch.cuda.is_initialized(), asked, sorted(wanted), sorted(new))
"""
FOLDERS = ("infra", "db", "adapters", "serving", "flows")


def test_a_replica_answers_and_trains_on_a_cpu_without_cuda(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    words = {word: i for i, word in enumerate(("a", "b", "?"))}
    Tokenizer(WordLevel(words, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3 done False [] [] []"


def test_cuda_is_named_only_where_the_device_is_asked_for() -> None:
    """What a CPU never reaches can't fail on one; and what is there for CUDA alone is easy to find."""
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in unguarded(ast.parse(path.read_text()))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("if device.type == 'cuda':\n    torch.cuda.synchronize()", []),
        ("if device.type == 'cuda':\n    pass\nelse:\n    torch.cuda.synchronize()", [4]),
        ("total = torch.cuda.mem_get_info()[1] if device == 'cuda' else 0", []),
        ("torch.cuda.synchronize()", [1]),
        ("import torch.cuda", [1]),
        ("from torch import cuda", [1]),
        ("from torch.cuda import synchronize", [1]),
        ("x = x.cuda()", [1]),
        ("x = x.to('cuda:0')", [1]),
        ("if ready:\n    torch.cuda.synchronize()", [2]),
    ],
)
def test_how_that_is_found(source: str, lines: list[int]) -> None:
    assert unguarded(ast.parse(source)) == lines


def unguarded(node: ast.AST) -> list[int]:
    """Return the lines that use CUDA outside the body of an ``if`` about a device."""
    if isinstance(node, ast.If | ast.IfExp) and "device" in ast.unparse(node.test):
        apart = node.orelse if isinstance(node, ast.If) else [node.orelse]
        return [line for part in apart for line in unguarded(part)]
    if uses_cuda(node):
        assert isinstance(node, ast.stmt | ast.expr)
        return [node.lineno]
    if isinstance(node, ast.Compare):  # asks for the device
        return []
    return [line for child in ast.iter_child_nodes(node) for line in unguarded(child)]


def uses_cuda(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name.startswith("torch.cuda") for name in names)
        case ast.ImportFrom(module="torch", names=names):
            return any(name.name == "cuda" for name in names)
        case ast.ImportFrom(module=str(module)):
            return module.startswith("torch.cuda")
        case ast.Attribute(attr="cuda"):
            return True
        case ast.Constant(value=str(value)):
            return value == "cuda" or value.startswith("cuda:")
    return False
