"""Real models: a mixed-version batch answers as each version alone and as transformers + PEFT."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adapters.model import LoraWeights
from db.records import LoraSpec
from infra.settings import ModelSettings
from serving.model import BASE, Decode, Draw, Prefill, SamplingParams, StepPlan
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.rows import render_prompt
from tests.small_models import forced_logprobs, plain_logprobs, worn

TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SPEC = LoraSpec(rank=8, alpha=16, targets=TARGETS)
NEW = 12
GREEDY = SamplingParams()
TEXTS = (
    "Write a short Python function that adds two numbers.",
    "List all files in the current folder that are larger than one megabyte, newest first, with a shell command.",
)


def weights_for(shapes: Mapping[str, tuple[int, int]], seed: int) -> LoraWeights:
    chance = np.random.default_rng(seed)
    tensors = {}
    for name, (d_out, d_in) in shapes.items():
        tensors[f"{name}.lora_A.weight"] = chance.normal(0, 0.02, (8, d_in)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = chance.normal(0, 0.05, (d_out, 8)).astype(np.float32)
    return LoraWeights(spec=SPEC, tensors=tensors)


def answers(engine: TorchEngine, rows: list[tuple[int, list[int]]], *, chunk: int, gap: int = 1) -> list[list[int]]:
    """Greedy tokens of (place, prompt): prefilled in chunks side by side, decoded together.

    With a gap above 1 they stand in KV rows far apart, so that decoding attends to one row at a time.
    """
    tokens: list[list[int]] = [[] for _ in rows]
    for start in range(0, max(len(ids) for _, ids in rows), chunk):
        prefills = tuple(
            Prefill(
                row=i * gap,
                place=place,
                tokens=tuple(ids[start : start + chunk]),
                start=start,
                draw=Draw(params=GREEDY, index=0) if start + chunk >= len(ids) else None,
            )
            for i, (place, ids) in enumerate(rows)
            if start < len(ids)
        )
        for result in engine.step(StepPlan(prefills=prefills)).rows:
            if result.token is not None:
                tokens[result.row // gap].append(result.token.id)
    for index in range(1, NEW):
        decodes = tuple(
            Decode(
                row=i * gap,
                place=place,
                token=tokens[i][-1],
                position=len(ids) + index - 1,
                draw=Draw(params=GREEDY, index=index),
            )
            for i, (place, ids) in enumerate(rows)
        )
        for result in engine.step(StepPlan(decodes=decodes)).rows:
            assert result.token is not None, result.failed
            tokens[result.row // gap].append(result.token.id)
    return tokens


def references(
    model: PreTrainedModel, versions: Mapping[int, LoraWeights | None], asked: Sequence[tuple[int, list[int]]]
) -> list[list[int]]:
    """What transformers and PEFT generate for each (place, prompt)."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=set(TARGETS)))
    wrapped.eval().generation_config.eos_token_id = None
    out = []
    for place, ids in asked:
        weights = versions[place]
        if weights is not None:
            state = {f"base_model.model.{name}": torch.tensor(t) for name, t in weights.tensors.items()}
            assert not peft.set_peft_model_state_dict(wrapped, state).unexpected_keys
        with nullcontext() if weights else wrapped.disable_adapter():
            out.append(generated(wrapped, ids))
    return out


def generated(model: PreTrainedModel, ids: list[int]) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(ids) :]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a replica does by default
    yield
    torch.set_num_threads(before)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
def test_versions_mixed_alone_and_in_peft_agree(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [tokenizer(render_prompt(text)).input_ids for text in TEXTS]
    backbone = Backbone.load(model_dir, ModelSettings(dtype="float32", packed=False))
    engine = TorchEngine(backbone, rows=8, max_total_tokens=128, places=3, max_rank=8)
    shapes = {name: linear.shape for name, linear in backbone.linears.items()}
    versions: dict[int, LoraWeights | None] = {BASE: None, 0: weights_for(shapes, 1), 2: weights_for(shapes, 2)}
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
    asked = [(place, ids) for ids in prompts for place in (2, BASE, 0)]
    want = references(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), versions, asked)
    assert len({tuple(tokens) for tokens in want[:3]}) == 3, "the versions must differ to show anything"
    for i in range(3):
        assert answers(engine, asked[i::3], chunk=512) == want[i::3]
    assert answers(engine, asked, chunk=11) == want


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
def test_bf16_is_no_further_from_fp32_than_twice_peft_is(model_dir: Path) -> None:
    """The first layers alone: bf16 may be emulated here."""

    def load(dtype: torch.dtype) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, num_hidden_layers=6, attn_implementation="eager"
        )
        return model.eval()

    start = 6
    text = tuple(AutoTokenizer.from_pretrained(model_dir)(TEXTS[1]).input_ids[: start + 10])
    engine = TorchEngine(
        Backbone(load(torch.bfloat16), sha256="0" * 64, packed=True), rows=2, max_total_tokens=64, places=1, max_rank=8
    )
    weights = weights_for({name: linear.shape for name, linear in engine.backbone.linears.items()}, 1)
    engine.write(0, weights)
    got = forced_logprobs(engine, [(0, text), (BASE, text)], start)
    for ours, version in zip(got, (weights, None), strict=True):
        exact = plain_logprobs(worn(load(torch.float32), version), text, start)
        rounded = plain_logprobs(worn(load(torch.bfloat16), version), text, start)
        assert 0 < (ours - exact).norm() <= 2 * (rounded - exact).norm()
        sure = exact.topk(2).values.diff().abs()[:, 0] > 2 * (rounded - exact).abs().max()
        assert torch.equal(ours.argmax(-1)[sure], exact.argmax(-1)[sure])


def gemma(folder: Path, window: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, sliding_window=window, attn_implementation="eager"
    )
    assert model.config.sliding_window == window
    return model


def words(seed: int, count: int) -> list[int]:
    """A prompt of frequent tokens."""
    chance = random.Random(seed)
    return [2, *(chance.randrange(500, 5000) for _ in range(count - 1))]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
def test_gemma_agrees_on_both_sides_of_its_sliding_windows(gemma_dir: Path) -> None:
    """A prompt within the window, one that the answer leads out of it, and one that is longer."""
    window = 24
    prompts = [words(1, 9), words(2, window - 4), words(3, 2 * window + 13)]
    model = gemma(gemma_dir, window)
    # "The capital of France is Paris, and the capital of Germany is"
    known = torch.tensor([[2, 818, 5279, 529, 7001, 563, 9079, 236764, 532, 506, 5279, 529, 9405, 563]])
    with torch.no_grad():
        assert float(model(known, labels=known).loss) < 3, "the weights must be put together right"
    engine = TorchEngine(
        Backbone(model, sha256="0" * 64, packed=False), rows=16, max_total_tokens=128, places=2, max_rank=8
    )
    shapes = {name: linear.shape for name, linear in engine.backbone.linears.items()}
    versions: dict[int, LoraWeights | None] = {BASE: None, 0: weights_for(shapes, 1), 1: weights_for(shapes, 2)}
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
    asked = [(1, prompts[0]), (BASE, prompts[2]), (0, prompts[1]), (1, prompts[2]), (BASE, prompts[0])]
    other = gemma(gemma_dir, window)
    want = references(other, versions, asked)
    assert want[0] != want[4], "the versions must differ to show anything"
    assert want[1] != want[3], "the versions must differ to show anything"
    for chunk, gap, some in ((512, 7, slice(1, 4, 2)), (512, 1, slice(2, 4)), (7, 1, slice(5))):
        assert answers(engine, asked[some], chunk=chunk, gap=gap) == want[some]
    with torch.no_grad():
        narrow = other(torch.tensor([prompts[2]]), logits_to_keep=1).logits
        other.config.sliding_window = 512
        wide = other(torch.tensor([prompts[2]]), logits_to_keep=1).logits
    assert (narrow - wide).norm() > 0.1 * wide.norm(), "the window must matter to show anything"


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
def test_gemma_agrees_across_its_own_window(gemma_dir: Path) -> None:
    within, beyond = words(4, 512 - 5), words(5, 540)
    engine = TorchEngine(
        Backbone(gemma(gemma_dir, 512), sha256="0" * 64, packed=False),
        rows=2, max_total_tokens=640, places=1, max_rank=8,
    )  # fmt: skip
    weights = weights_for({name: linear.shape for name, linear in engine.backbone.linears.items()}, 1)
    engine.write(0, weights)
    asked = [(0, within), (BASE, beyond)]
    assert answers(engine, asked, chunk=128) == references(gemma(gemma_dir, 512), {BASE: None, 0: weights}, asked)
