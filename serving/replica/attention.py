"""The attention function that transformers calls: plain, packed sequences, or one engine step on the KV rows.

Registered under ``NAME`` in transformers' attention interface, so that no model is forked. Every attention
module carries the ``switch`` of its backbone.
"""

import torch.nn.functional as F
from torch import Tensor, arange, bmm, cat, float32, inf, is_grad_enabled, nn, softmax
from transformers import AttentionInterface

from serving.replica.modes import Chunk, PackedMode, ServingMode, Switch, TraceMode

NAME = "collm"
MATMUL_TOKENS = 256
"""Longest training row for which all attention weights are kept."""


def register() -> None:
    """Make the function known to transformers; again changes nothing."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as the mode says.

    Shapes: query [B, H, T, D], key and value [B, Hkv, T, D] → [B, T, H, D]; B = 1 in the packed and serving
    modes. Raises ``NotImplementedError`` for features that would silently change the result.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a mask of its own, a soft cap or sinks")
    switch, index = module.switch, module.layer_idx
    assert isinstance(switch, Switch)
    assert isinstance(index, int)
    mode = switch.mode
    if isinstance(mode, ServingMode):
        return serve(query, key, value, mode, index, scaling, sliding_window), None
    if isinstance(mode, PackedMode):
        spans = zip(_starts(mode.lengths), mode.lengths, strict=True)
        one = _causal_trained if is_grad_enabled() else _causal
        parts = [
            one(query[:, :, s : s + n], key[:, :, s : s + n], value[:, :, s : s + n], scaling, sliding_window)
            for s, n in spans
        ]
        return (cat(parts, dim=2) if len(parts) > 1 else parts[0]).transpose(1, 2), None
    if isinstance(mode, TraceMode):
        mode.kv_sizes[index] = (key.shape[1], key.shape[3])
        mode.attention[index] = (scaling, sliding_window)
    return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None


def _starts(lengths: tuple[int, ...]) -> list[int]:
    starts, total = [], 0
    for n in lengths:
        starts.append(total)
        total += n
    return starts


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Attend causally where the queries are the last positions of the keys.

    Shapes: q [B, H, T, D], k and v [B, Hkv, S, D] with S ≥ T → [B, H, T, D].
    """
    t, s = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if t == s and (window is None or window >= s):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    at = arange(s - t, s, device=q.device)[:, None]
    seen = arange(s, device=q.device)[None]
    mask = seen <= at
    if window is not None and window < s:
        mask &= seen > at - window
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _causal_trained(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """``_causal`` for training rows: two products, whose backward costs a CPU a third of the fused kernel's.

    Shapes: q [1, H, T, D], k and v [1, Hkv, T, D] → [1, H, T, D].
    """
    _, heads, t, dim = q.shape
    kv_heads = k.shape[1]
    if t > MATMUL_TOKENS or q.device.type != "cpu":
        return _causal(q, k, v, scale, window)
    at = arange(t, device=q.device)
    unseen = at[None] > at[:, None]
    if window is not None and window < t:
        unseen |= at[None] <= at[:, None] - window
    # The queries of a group stand in one sequence, so that keys are not repeated.
    scores = bmm(q[0].reshape(kv_heads, -1, dim), k[0].transpose(1, 2)) * (dim**-0.5 if scale is None else scale)
    scores = scores.view(kv_heads, -1, t, t).masked_fill(unseen, -inf)
    weights = softmax(scores, dim=-1, dtype=float32).to(v.dtype)
    return bmm(weights.view(kv_heads, -1, t), v[0]).view(1, heads, t, -1)


def serve(
    q: Tensor, k: Tensor, v: Tensor, mode: ServingMode, layer: int, scale: float | None, window: int | None
) -> Tensor:
    """Write a step's keys and values to their rows and attend to these.

    Shapes: q [1, H, T, D], k and v [1, Hkv, T, D] → [1, T, H, D].
    """
    keys, values = mode.keys[layer], mode.values[layer]
    if mode.tile:
        return _tile(q, k, v, keys, values, mode, scale, window)
    parts = []
    n = len(mode.rows)
    if n:
        parts.append(_decode(q[0, :, :n], k[0, :, :n], v[0, :, :n], keys, values, mode, scale, window))
    for chunk in mode.chunks:
        parts.append(_prefill(q, k, v, keys, values, chunk, scale, window))
    return parts[0] if len(parts) == 1 else cat(parts, dim=1)


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mode: ServingMode,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """A batch-invariant forward: shapes depend on where its tokens stand in their sequence alone → [1, T, H, D]."""
    if not mode.chunks:
        n = len(mode.rows)
        out = _decode_one_by_one(q[0, :, :n], k[0, :, :n], v[0, :, :n], keys, values, mode, scale, window)
    else:
        (chunk,) = mode.chunks
        here, first = slice(chunk.begin, chunk.end), chunk.start - chunk.begin
        stop = min(first + mode.tile, keys.shape[2])
        keys[chunk.row, :, chunk.start : first + chunk.end] = k[0, :, here]
        values[chunk.row, :, chunk.start : first + chunk.end] = v[0, :, here]
        row_k, row_v = keys[chunk.row, :, :stop][None], values[chunk.row, :, :stop][None]
        out = _causal(q[:, :, : stop - first], row_k, row_v, scale, window).transpose(1, 2)
    return F.pad(out, (0, 0, 0, 0, 0, mode.tile - out.shape[1]))


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float | None, window: int | None
) -> Tensor:
    """Write one chunk to its row and attend to all of the row so far → [1, chunk, H, D]."""
    here = slice(chunk.begin, chunk.end)
    stop = chunk.start + chunk.end - chunk.begin
    keys[chunk.row, :, chunk.start : stop] = k[0, :, here]
    values[chunk.row, :, chunk.start : stop] = v[0, :, here]
    row_k, row_v = k[:, :, here], v[:, :, here]
    if chunk.start:
        row_k, row_v = keys[chunk.row, :, :stop][None], values[chunk.row, :, :stop][None]
    return _causal(q[:, :, here], row_k, row_v, scale, window).transpose(1, 2)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mode: ServingMode,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Write one token to each decoding row and attend to the rows → [1, N, H, D].

    The queries of a group stand in the place of a sequence, several times faster than repeating keys. Rows that
    don't decode in this step are computed along if they lie between, and dropped.
    """
    heads, n, dim = q.shape
    kv_heads = k.shape[0]
    if mode.one_by_one:
        return _decode_one_by_one(q, k, v, keys, values, mode, scale, window)
    keys[mode.rows, :, mode.positions] = k.transpose(0, 1)
    values[mode.rows, :, mode.positions] = v.transpose(0, 1)
    folded = q.transpose(0, 1).reshape(n, kv_heads, heads // kv_heads, dim)
    if not mode.dense:
        spread = folded.new_zeros(mode.span, *folded.shape[1:])
        spread[mode.rows] = folded
        folded = spread
    out = F.scaled_dot_product_attention(
        folded,
        keys[: mode.span, :, : mode.width],
        values[: mode.span, :, : mode.width],
        attn_mask=mode.hidden(window, q.dtype),
        scale=scale,
    )
    if not mode.dense:
        out = out[mode.rows]
    return out.reshape(1, n, heads, dim)


def _decode_one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mode: ServingMode,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """As ``_decode``, without mask and padding: for few rows, or rows of very different lengths."""
    heads, n, dim = q.shape
    out = q.new_empty(1, n, heads, dim)
    for i, (row, stop) in enumerate(mode.one_by_one):
        keys[row, :, stop - 1] = k[:, i]
        values[row, :, stop - 1] = v[:, i]
        start = 0 if window is None else max(0, stop - window)
        seen_k, seen_v = keys[row : row + 1, :, start:stop], values[row : row + 1, :, start:stop]
        folded = q[:, i].reshape(1, k.shape[0], -1, dim)
        out[0, i] = F.scaled_dot_product_attention(folded, seen_k, seen_v, scale=scale).view(heads, dim)
    return out
