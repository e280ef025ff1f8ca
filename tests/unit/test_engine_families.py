"""Every family that must be served, small and random, in fp32: its tokens are those of transformers and PEFT."""

from collections.abc import Iterator

import pytest
import torch

from adapters.model import LoraWeights
from infra.errors import ConfigError
from serving.model import BASE, StepPlan
from serving.replica.attention import NAME
from serving.replica.backbone import Backbone
from tests.small_models import (
    FAMILIES,
    WINDOW,
    Answer,
    build,
    engine_of,
    finish,
    generated,
    prompt_of,
    run,
    shapes_of,
    weights_for,
    worn,
)

NEW = 12
LEAN = ("llama", "mistral", "qwen2", "qwen3")
PROMPTS = (prompt_of(1, WINDOW - 4), prompt_of(2, 2 * WINDOW + 5))
"""The answer to the first leads out of the sliding windows; the second is longer than they are."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_and_peft(family: str) -> None:
    """Alone and mixed, in whole and chunked prompts, across windows and across swaps in mid-flight."""
    shapes = shapes_of(build(family))
    versions: dict[int, LoraWeights | None] = {BASE: None, 0: weights_for(shapes, 1), 2: weights_for(shapes, 2)}
    third = weights_for(shapes, 3)
    want = {
        (place, i): generated(worn(build(family), weights), prompt, NEW)
        for place, weights in (*versions.items(), (3, third))
        for i, prompt in enumerate(PROMPTS)
        if (place, i) != (3, 0)
    }
    assert len({tuple(tokens) for tokens in want.values()}) == len(want), "versions and prompts must differ"
    engine = engine_of(build(family))
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
    for place in versions:
        one = [Answer(5 * i, place, prompt) for i, prompt in enumerate(PROMPTS)]
        finish(engine, one, NEW)
        assert [a.tokens for a in one] == [want[place, i] for i in range(2)]
    mixed = [Answer(row, place, PROMPTS[row % 2]) for row, place in enumerate((2, BASE, 0, 2, BASE, 0))]
    late = Answer(7, 3, PROMPTS[1])

    def swap(step: int) -> None:
        """A new version comes into place 3, and a request begins with it while the others go on with theirs."""
        if step == 2:
            engine.write(3, third)
        if 2 <= step <= 6:
            run(engine, [late], StepPlan(prefills=(late.prefill(5),)))

    finish(engine, mixed, NEW, chunk=7, between=swap)
    assert [a.tokens for a in mixed] == [want[a.place, a.row % 2] for a in mixed]
    engine.write(0, third)
    engine.write(2, third)
    finish(engine, [late], NEW)
    assert late.tokens == want[3, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lean_decoder_serves_the_kind_that_it_is_made_for(family: str) -> None:
    """That it computes what transformers does is checked at load, and by every other test here."""
    assert Backbone(build(family), sha256="0" * 64, packed=False).lean == (family in LEAN)


def test_a_decoder_that_computes_something_else_is_not_served_by_the_lean_one() -> None:
    model = build("llama")
    for layer in model.get_decoder().layers:
        layer.self_attn.register_forward_hook(lambda module, inputs, output: (1.01 * output[0], output[1]))
    assert not Backbone(model, sha256="0" * 64, packed=False).lean


def test_a_step_can_hold_prompts_and_answers_of_all_kinds() -> None:
    """Gemma 3: prefills and decodes of three versions in one step, on both sides of the windows."""
    shapes = shapes_of(build("gemma3_text"))
    versions = {BASE: None, 0: weights_for(shapes, 1), 1: weights_for(shapes, 2)}
    engine = engine_of(build("gemma3_text"))
    alone: dict[tuple[int, int], list[int]] = {}
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
        for i, prompt in enumerate(PROMPTS):
            one = Answer(0, place, prompt)
            finish(engine, [one], NEW)
            alone[place, i] = one.tokens
    answers = [Answer(row, row % 3 - 1, PROMPTS[row % 2]) for row in range(6)]
    started: list[Answer] = []
    while any(len(a.drawn) < NEW for a in answers):
        decoding = [a for a in started if not a.prefilling and len(a.drawn) < NEW]
        started += answers[len(started) : len(started) + 1]
        prefills = tuple(a.prefill(6) for a in started if a.prefilling)
        run(engine, answers, StepPlan(prefills=prefills, decodes=tuple(a.decode() for a in decoding)))
    assert [a.tokens for a in answers] == [alone[a.place, a.row % 2] for a in answers]


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),  # attention sinks
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 0.1}),
        ("bloom", {"n_layer": 3, "n_head": 4}),  # ALiBi
        ("mamba", {}),
    ],
)
def test_a_family_that_would_not_be_exact_is_refused_by_name(family: str, extra: dict[str, object]) -> None:
    model = build(family, **extra)
    with pytest.raises(ConfigError, match=family):
        engine_of(model)


@pytest.mark.parametrize(("family", "extra"), [("starcoder2", {}), ("qwen2", {}), ("granite", {"logits_scaling": 1.5})])
def test_a_family_that_nobody_listed_is_served_if_its_check_passes(family: str, extra: dict[str, object]) -> None:
    want = [generated(build(family, **extra), prompt, NEW) for prompt in PROMPTS]
    engine = engine_of(build(family, **extra))
    assert engine.backbone.model.config._attn_implementation == NAME
    answers = [Answer(row, BASE, prompt) for row, prompt in zip((3, 1), PROMPTS, strict=True)]
    finish(engine, answers, NEW, chunk=7)
    assert [a.tokens for a in answers] == want
