"""The real model: scores equal plain transformers', and a short training on the shipped rows teaches it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.model import LoraWeights
from db.records import Factor, LoraSpec, Split
from infra.settings import ModelSettings
from serving.datasets import sample_shards
from serving.ports import ScoreResult, SliceReport, TrainTask, Work, WorkState
from serving.replica.backbone import Backbone
from serving.replica.tokenizer import HubTokenizer
from serving.replica.trainer import TorchTrainer
from serving.rows import Row, render_prompt
from serving.shard import load_shard

ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh(backbone: Backbone) -> LoraWeights:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, linear in backbone.linears.items():
        d_out, d_in = linear.shape
        tensors[f"{name}.lora_A.weight"] = (rng.uniform(-1, 1, (8, d_in)) / d_in**0.5).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = np.zeros((d_out, 8), np.float32)
    targets = tuple(sorted({name.rsplit(".", 1)[-1] for name in backbone.linears}))
    return LoraWeights(spec=LoraSpec(rank=8, alpha=16.0, targets=targets), tensors=tensors)


def plain_ce(model_dir: Path, rows: tuple[Row, ...], dtype: torch.dtype) -> float:
    """Cross-entropy over completions and ends of sequence, as transformers alone computes it, row by row."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    nll, tokens = 0.0, 0
    for row in rows:
        prompt = tokenizer(render_prompt(row.prompt)).input_ids
        completion = [*tokenizer(row.completion, add_special_tokens=False).input_ids, model.config.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        nll += float(F.cross_entropy(logits, torch.tensor(completion), reduction="sum"))
        tokens += len(completion)
    return nll / tokens


def finish(work: Work) -> list[SliceReport]:
    reports = [work.slice()]
    while reports[-1].state is WorkState.RUNNING:
        reports.append(work.slice())
    return reports


def ce(result: ScoreResult) -> float:
    return sum(result.nll_by_row) / sum(result.tokens_by_row)


@pytest.mark.e2e
def test_scores_equal_transformers_and_training_teaches(model_dir: Path) -> None:
    splits = load_shard(sample_shards()[1], gate=48, report=100)
    held = splits[Split.GATE][:ROWS]
    backbone = Backbone.load(model_dir, ModelSettings(path=model_dir))
    trainer = TorchTrainer(backbone, HubTokenizer(model_dir), 256)
    base = fresh(backbone)

    before = trainer.score(held, base)
    finish(before)
    assert ce(before.result()) == pytest.approx(plain_ce(model_dir, held, backbone.dtype), rel=0.01)

    task = TrainTask(factor=Factor.B, tokens=350, rows_per_step=2, lr=2e-3, seed=1)
    training = trainer.train(task, base, splits[Split.TRAIN])
    reports = finish(training)
    losses = [r.loss for r in reports if r.loss is not None]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])

    after = trainer.score(held, training.shadow())
    finish(after)
    assert ce(after.result()) < 0.95 * ce(before.result())
