"""Sampling: the laws of each rule, against transformers' own processors where it has one."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from serving.model import Draw, SamplingParams
from serving.replica.sampling import apply_penalties, draw_tokens, filter_scores, key

VOCAB = 3000


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: torch.Tensor, *draws: Draw) -> list[int]:
    tokens = draw_tokens(logits, draws)
    return [-1 if token is None else token.id for token in tokens]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
        (SamplingParams(top_k=7), [TopKLogitsWarper(7)]),
        (SamplingParams(top_k=VOCAB + 1), []),
        (SamplingParams(top_p=0.9), [TopPLogitsWarper(0.9)]),
        (SamplingParams(top_p=1e-6), [TopPLogitsWarper(1e-6)]),
        (SamplingParams(temperature=20.0, top_p=0.9), [TemperatureLogitsWarper(20.0), TopPLogitsWarper(0.9)]),
        (SamplingParams(typical_p=0.5), [TypicalLogitsWarper(0.5)]),
        (
            SamplingParams(temperature=1.7, top_k=50, top_p=0.8, typical_p=0.7),
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(50), TopPLogitsWarper(0.8), TypicalLogitsWarper(0.7)],
        ),
    ],
)
def test_rules_leave_what_transformers_leaves(params: SamplingParams, warpers: list[LogitsProcessor]) -> None:
    for seed in range(5):
        logits = logits_of(seed)
        want = logits.clone()
        for warper in warpers:
            want = warper(torch.zeros(1, 0, dtype=torch.long), want)
        got = filter_scores(logits[0], params)
        assert torch.equal(torch.isinf(got), torch.isinf(want[0]))
        kept = ~torch.isinf(got)
        assert torch.allclose(got[kept] - got[kept].max(), want[0][kept] - want[0][kept].max(), atol=1e-5)


def test_repetition_penalty_is_that_of_transformers_and_needs_no_sampling() -> None:
    logits, context = logits_of(1), [5, 9, 9, int(logits_of(1).argmax())]
    params = SamplingParams(repetition_penalty=1.8)
    want = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([context]), logits.clone())[0]
    assert torch.allclose(apply_penalties(logits[0], params, context), want)
    assert drawn(logits, Draw(params=params, index=4, context=context)) == [int(want.argmax())]


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 1e-20])
def test_the_coldest_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = logits_of(8)
    logits[0, -10:] = -math.inf
    params = SamplingParams(do_sample=True, temperature=temperature, typical_p=0.9, top_p=0.9, seed=4)
    assert {drawn(logits, Draw(params=params, index=i))[0] for i in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e38, 1e300])
def test_the_hottest_temperature_takes_any_that_is_not_masked(temperature: float) -> None:
    logits = logits_of(8)
    logits[0, VOCAB // 2 :] = -math.inf
    params = SamplingParams(do_sample=True, temperature=temperature, seed=4)
    got = [drawn(logits, Draw(params=params, index=i))[0] for i in range(100)]
    assert len(set(got)) > 80
    assert max(got) < VOCAB // 2


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
@pytest.mark.parametrize("do_sample", [True, False])
def test_no_repetition_penalty_overflows(penalty: float, do_sample: bool) -> None:
    logits = logits_of(9)
    best, masked = int(logits.argmax()), 17
    logits[0, masked] = -math.inf
    params = SamplingParams(do_sample=do_sample, repetition_penalty=penalty, frequency_penalty=1.0, seed=4)
    got = drawn(logits, Draw(params=params, index=0, context=[best, masked]))[0]
    assert (got == best) == (penalty < 1)
    assert got not in (-1, masked)


def test_frequency_penalty_counts_occurrences() -> None:
    logits = logits_of(2)[0]
    got = apply_penalties(logits, SamplingParams(frequency_penalty=0.5), [4, 8, 4, 4])
    want = logits.clone()
    want[4] -= 1.5
    want[8] -= 0.5
    assert torch.allclose(got, want)


def test_logprobs_are_of_the_model_whatever_the_rules() -> None:
    logits = logits_of(3, rows=3)
    harsh = SamplingParams(do_sample=True, temperature=0.3, top_k=3, seed=5, top_n_tokens=4)
    draws = [Draw(params=SamplingParams(), index=0), Draw(params=harsh, index=0), Draw(params=harsh, index=1)]
    for row, (token, draw) in enumerate(zip(draw_tokens(logits, draws), draws, strict=True)):
        logs = torch.log_softmax(logits[row].double(), -1)
        assert token is not None
        assert token.logprob == pytest.approx(float(logs[token.id]), abs=1e-4)
        best = torch.topk(logs, draw.params.top_n_tokens)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, math.log(2), math.log(5), -math.inf]])
    params = SamplingParams(do_sample=True, seed=7)
    count = 4000
    seen = [drawn(logits, Draw(params=params, index=i))[0] for i in range(count)]
    assert 3 not in seen
    for token, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(seen.count(token) / count - share) < 4 * deviation


def test_seed_and_index_key_the_draw_and_neighbours_do_not_matter() -> None:
    logits = logits_of(4, rows=4)
    mine = Draw(params=SamplingParams(do_sample=True, temperature=2.0, seed=1), index=3)
    other = Draw(params=SamplingParams(do_sample=True, temperature=2.0, seed=2), index=3)
    greedy = Draw(params=SamplingParams(), index=0)
    alone = drawn(logits[2:3], mine)
    assert drawn(logits, other, greedy, mine, other)[2:3] == alone
    assert drawn(logits[2:3], mine) == alone
    assert len({key(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert all(0 <= key(seed, 1) < 1 << 63 for seed in (0, 1 << 63, (1 << 64) - 1, 12345))


def test_the_last_bits_of_the_logits_change_no_draw() -> None:
    """Another batch, another chunk of the prompt: the logits differ in their last bits, and the answer must not."""
    noise = torch.Generator().manual_seed(1)
    for index in range(1200):
        logits = logits_of(index, vocab=49_152)
        draw = Draw(params=SamplingParams(do_sample=True, temperature=1.3, seed=3), index=index)
        assert drawn(logits, draw) == drawn(logits + 1e-5 * torch.randn(logits.shape, generator=noise), draw)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = logits_of(5, rows=4)
    logits[1, 7] = math.nan
    logits[3, 7] = math.inf
    sample = Draw(params=SamplingParams(do_sample=True, seed=1, top_n_tokens=2), index=0)
    tokens = draw_tokens(logits, [sample] * 4)
    assert [t is None for t in tokens] == [False, True, False, True]
    assert tokens[0] == draw_tokens(logits[:1], [sample])[0]


def test_a_masked_vocabulary_never_gives_a_masked_token() -> None:
    logits = logits_of(6)
    logits[0, : VOCAB // 2] = -math.inf
    params = SamplingParams(do_sample=True, temperature=50.0, typical_p=0.99, top_p=0.999, seed=3)
    assert all(drawn(logits, Draw(params=params, index=i))[0] >= VOCAB // 2 for i in range(200))


def test_the_only_candidate_is_drawn_whatever_its_draw() -> None:
    """One draw in 2**24 is the largest that there is; this is one."""
    seed, token, vocab = 353, 45227, 49152
    points = torch.rand(vocab, generator=torch.Generator().manual_seed(key(seed, 0)))
    assert points[token] == 1 - 2.0**-24
    logits = torch.zeros(1, vocab)
    logits[0, token] = 9.0
    params = SamplingParams(do_sample=True, top_k=1, seed=seed)
    assert drawn(logits, Draw(params=params, index=0)) == [token]
