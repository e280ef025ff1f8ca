"""From logits to tokens. Pure: a draw depends on its own row, its parameters, seed and index alone.

The order of the rules is that of transformers and TGI: repetition penalty, frequency penalty, temperature, top-k,
top-p, typical-p. Without ``do_sample`` the penalties still apply and the likeliest token is taken.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from serving.model import Draw, SamplingParams, Token

LEADING = 512
"""Candidates that the nucleus rules look at before they sort the whole vocabulary."""


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[Token | None]:
    """Draw one token for each row of ``logits`` [N, V]; None for a row that is not finite before or after its rules."""
    scores = logits.to(torch.float32, copy=True)
    peaks, chosen = scores.max(dim=-1)
    plain = not any(d.params.do_sample or d.params.needs_context or d.params.top_n_tokens for d in draws)
    # In place where nobody reads the scores again: a batch of wide rows is slow to allocate.
    powers = (scores if plain else scores.clone()).sub_(peaks[:, None]).exp_()
    totals = peaks + powers.sum(dim=-1).log()
    finite = torch.isfinite(totals).tolist()
    if plain:
        logprobs = peaks - totals
    else:
        for i, draw in enumerate(draws):
            if (draw.params.do_sample or draw.params.needs_context) and finite[i]:
                token = _draw(scores[i], draw)
                finite[i] = token is not None
                if token is not None:
                    chosen[i] = token
        logprobs = scores.gather(-1, chosen[:, None])[:, 0] - totals
    tops = _tops(scores, totals, draws)
    rows = zip(chosen.tolist(), logprobs.tolist(), finite, tops, strict=True)
    return [Token(id=token, logprob=logprob, top=top) if ok else None for token, logprob, ok, top in rows]


def key(seed: int, index: int) -> int:
    """Return the number of 63 bits that belongs to a request's seed and a token's index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def apply_penalties(scores: Tensor, params: SamplingParams, context: Sequence[int]) -> Tensor:
    """Return ``scores`` [V] with the tokens of ``context`` made less likely.

    Repetition: a positive score is divided, a negative one multiplied, once per distinct token. Frequency: minus
    the penalty for each occurrence.
    """
    if not params.needs_context or not context:
        return scores
    tokens, counts = torch.unique(torch.tensor(context, device=scores.device), return_counts=True)
    before = seen = scores[tokens]
    if params.repetition_penalty != 1.0:
        penalty = _representable(params.repetition_penalty)
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
    seen = seen - params.frequency_penalty * counts
    # What overflows stays the likeliest, or the least likely, and comparable; what was masked stays so.
    limit = torch.finfo(seen.dtype).max / 2
    return scores.index_copy(0, tokens, torch.where(before.isneginf(), before, seen.clamp(-limit, limit)))


def filter_scores(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return ``scores`` [V] after temperature, with -inf for each token that top-k, top-p or typical-p leaves out.

    They are relative to the largest, which leaves every probability as it is: no temperature makes them overflow.
    """
    scores = (scores - scores.max()) / _representable(params.temperature)
    if 0 < params.top_k < scores.shape[0]:
        least = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1.0:
        probs = torch.softmax(scores, dim=-1)
        scores = _keep(scores, _leading(probs, probs, params.top_p))
    if params.typical_p < 1.0:
        logs = torch.log_softmax(scores, dim=-1)
        probs = logs.exp()
        entropy = -torch.where(probs > 0, probs * logs, 0.0).sum()
        surprise = (logs + entropy).abs()
        scores = _keep(scores, _leading(-surprise, probs, params.typical_p))
    return scores


def _representable(value: float) -> float:
    """Return ``value`` where fp32 has neither it nor its reciprocal as 0 or infinity."""
    return min(max(value, 1e-37), 1e37)


def _draw(scores: Tensor, draw: Draw) -> Tensor | None:
    """Return the token; None if the rules have left nothing that can be drawn from."""
    scores = apply_penalties(scores, draw.params, draw.context)
    if not draw.params.do_sample:
        return scores.argmax()
    scores = filter_scores(scores, draw.params)
    best, token = (scores - _waits(draw, len(scores)).to(scores.device).log_()).max(dim=-1)
    return token if bool(torch.isfinite(best)) else None


def _waits(draw: Draw, vocab: int) -> Tensor:
    """Return for each token [V] a draw from the exponential distribution: the smallest wait / probability wins.

    By this "Gumbel trick" a token wins with its probability, and by a margin: what another batch does to the last bits
    of the scores changes no draw. A point in the cumulated distribution would often lie as near to the next token.
    """
    generator = torch.Generator().manual_seed(key(draw.params.seed, draw.index))
    # In (0, 1): a wait of 0 would win against anything, one without end lose even where nothing else is left.
    points = torch.rand(vocab, generator=generator).add_(2.0**-25).clamp_(max=1 - 2.0**-24)
    return points.neg_().log1p_().neg_()


def _leading(keys: Tensor, probs: Tensor, mass: float) -> Tensor:
    """Return the tokens with the largest ``keys`` whose ``probs`` reach ``mass``, at least one."""
    for count in (min(LEADING, len(keys)), len(keys)):
        order = torch.topk(keys, count).indices
        before = probs[order].double().cumsum(dim=-1) - probs[order]
        kept = order[before < mass]
        if len(kept) < count:
            break
    return kept


def _keep(scores: Tensor, tokens: Tensor) -> Tensor:
    return torch.full_like(scores, -torch.inf).index_copy(0, tokens, scores[tokens])


def _tops(scores: Tensor, totals: Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[int, float], ...]]:
    most = max((d.params.top_n_tokens for d in draws), default=0)
    if most == 0:
        return [()] * len(draws)
    values, tokens = torch.topk(scores, min(most, scores.shape[-1]))
    logprobs = (values - totals[:, None]).tolist()
    return [
        tuple(zip(ids, logs, strict=True))[: draw.params.top_n_tokens]
        for draw, ids, logs in zip(draws, tokens.tolist(), logprobs, strict=True)
    ]
