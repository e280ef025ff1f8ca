"""bf16: our logits are about as far from fp32's as those of transformers + PEFT in bf16, teacher-forced."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from adapters.model import LoraWeights
from serving.model import BASE
from tests.small_models import (
    FAMILIES,
    build,
    engine_of,
    forced_logprobs,
    plain_logprobs,
    prompt_of,
    shapes_of,
    weights_for,
    worn,
)

PROMPT = 5
TEXTS = tuple(prompt_of(seed, PROMPT + 22) for seed in range(4))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose weights bf16 represents, in that type."""
    return build(family).bfloat16().to(dtype)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft reads it
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_no_further_from_fp32_than_twice_those_of_transformers(family: str) -> None:
    shapes = shapes_of(build(family))
    versions: dict[int, LoraWeights | None] = {BASE: None, 0: weights_for(shapes, 1), 2: weights_for(shapes, 2)}
    engine = engine_of(small(family, torch.bfloat16))
    for place, weights in versions.items():
        if weights is not None:
            engine.write(place, weights)
    asked = list(zip((0, BASE, 2, 0), TEXTS, strict=True))
    clear = 0
    for (place, text), got in zip(asked, forced_logprobs(engine, asked, PROMPT), strict=True):
        exact = plain_logprobs(worn(small(family, torch.float32), versions[place]), text, PROMPT)
        rounded = plain_logprobs(worn(small(family, torch.bfloat16), versions[place]), text, PROMPT)
        assert (rounded - exact).norm() > 0
        assert (got - exact).norm() <= 2 * (rounded - exact).norm()
        # Twice, for both the best and the next may have moved.
        sure = exact.topk(2).values.diff().abs()[:, 0] > 2 * (rounded - exact).abs().max()
        assert torch.equal(got.argmax(-1)[sure], exact.argmax(-1)[sure])
        clear += int(sure.sum())
    assert clear >= 20, "the tokens must be clear somewhere to show anything"
