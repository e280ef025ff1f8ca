"""What the engine computes on a device, against transformers (and PEFT) on the CPU in fp32. Run by ``check.sh``."""

import os
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from adapters.model import LoraWeights
from db.records import Factor
from serving.model import BASE
from serving.ports import TrainTask, WorkState
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.trainer import TorchTrainer
from serving.rows import Row
from tests.small_models import (
    FAMILIES,
    Answer,
    build,
    finish,
    forced_logprobs,
    generated,
    plain_logprobs,
    prompt_of,
    shapes_of,
    weights_for,
    worn,
)

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("COLLM_CHECK_DEVICE", "cuda")
PROMPT, NEW = 5, 12
TEXTS = tuple(prompt_of(seed, PROMPT + 20) for seed in range(3))


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """fp32 means fp32, no TF32; and models as small as these are fastest on one thread."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


def engine_on(model: PreTrainedModel, *, batch_invariant: bool = False) -> TorchEngine:
    backbone = Backbone(model.to(DEVICE), sha256="0" * 64, packed=False)
    return TorchEngine(
        backbone, rows=8, max_total_tokens=96, places=4, max_rank=6, batch_invariant=batch_invariant,
        make_trainer=lambda b: TorchTrainer(b, FakeTokenizer(), 64),
    )  # fmt: skip


def versions_of(family: str) -> dict[int, LoraWeights | None]:
    shapes = shapes_of(build(family))
    return {BASE: None, 0: weights_for(shapes, 1), 2: weights_for(shapes, 2)}


def load(engine: TorchEngine, versions: dict[int, LoraWeights | None]) -> None:
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gives_the_tokens_of_the_cpu(family: str) -> None:
    versions = versions_of(family)
    prompts = [text[: 7 + 9 * (i % 2)] for i, text in enumerate(TEXTS)]
    asked = list(zip((0, BASE, 2, 0), (*prompts, prompts[1]), strict=True))
    want = [generated(worn(build(family), versions[place]), prompt, NEW) for place, prompt in asked]
    engine = engine_on(build(family))
    load(engine, versions)
    for chunk in (None, 6):
        answers = [Answer(row, place, prompt) for row, (place, prompt) in enumerate(asked)]
        finish(engine, answers, NEW, chunk=chunk)
        assert [a.tokens for a in answers] == want


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_bf16_is_no_further_from_fp32_than_twice_peft_is(family: str) -> None:
    versions = versions_of(family)
    engine = engine_on(build(family).bfloat16())
    load(engine, versions)
    asked = list(zip(versions, TEXTS, strict=True))
    for (place, text), got in zip(asked, forced_logprobs(engine, asked, PROMPT), strict=True):
        exact = plain_logprobs(worn(build(family).bfloat16().float(), versions[place]), text, PROMPT)
        rounded = plain_logprobs(worn(build(family).bfloat16(), versions[place]).to(DEVICE), text, PROMPT)
        assert (got - exact).norm() <= 2 * (rounded - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_invariant_mode_keeps_every_bit(dtype: torch.dtype) -> None:
    versions = versions_of("llama")
    engine = engine_on(build().to(dtype), batch_invariant=True)
    load(engine, versions)
    alone = Answer(0, 0, TEXTS[0])
    finish(engine, [alone], NEW)
    for count in (1, 4, 7):
        mine = Answer(count, 0, TEXTS[0])
        finish(
            engine, [mine, *(Answer(i, i % 3 - 1, TEXTS[i % 3][: 9 + i]) for i in range(count))], NEW, chunk=count + 3
        )
        assert mine.drawn == alone.drawn


def test_training_gives_the_losses_of_the_cpu() -> None:
    rows = [Row(prompt=f"add {i}", completion=f"{i} and {i}") for i in range(6)]
    task = TrainTask(factor=Factor.BOTH, tokens=60, rows_per_step=2, lr=1e-3, seed=1)
    losses: list[list[float]] = []
    for device in ("cpu", DEVICE):
        model = build(vocab_size=300).to(device)
        trainer = TorchTrainer(Backbone(model, sha256="0" * 64, packed=False), FakeTokenizer(), 64)
        work = trainer.train(task, weights_for(shapes_of(build(vocab_size=300)), 1), rows)
        found, report = [], None
        while report is None or report.state is WorkState.RUNNING:
            report = work.slice()
            if report.loss is not None:
                found.append(report.loss)
        assert report.state is WorkState.DONE, report.reason
        losses.append(found)
    assert len(losses[0]) >= 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
