"""The decoder of the Llama kind in a serving step: what transformers computes, in fewer operations and calls.

A decode step of a small model is some two thousand small operations, views included, whose fixed cost on a CPU comes
near that of reading the weights. Here queries and keys are rotated together, residuals are added within the products,
and nothing is passed through layers of modules. A model is served by it only where both compute the same, see
``Backbone``; training, and every other family, stays with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from serving.replica.attention import serve
from serving.replica.lora import LinearGroup
from serving.replica.modes import ServingMode

if TYPE_CHECKING:
    from serving.replica.backbone import Backbone

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Named, not found by trying alone: a short trial would not see what begins at a far position."""
CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
MEMBERS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Of a layer's groups of linears, in order."""

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: x += o(attend(qkv(norm x))); x += down(act(gate) · up) of norm x."""

    before: Norm
    qkv: LinearGroup
    query_norm: Norm | None
    key_norm: Norm | None
    out: LinearGroup
    between: Norm
    gate_up: LinearGroup
    act: Norm
    down: LinearGroup
    kv_heads: int
    dim: int
    scale: float | None
    window: int | None


class LeanDecoder:
    """Computes a backbone's final hidden states."""

    def __init__(self, layers: Sequence[Layer], embed: nn.Module, rotary: nn.Module, norm: Norm) -> None:
        self._layers = tuple(layers)
        self._embed = embed
        self._rotary = rotary
        self._norm = norm

    @classmethod
    def of(cls, backbone: Backbone, attention: dict[int, tuple[float | None, int | None]]) -> LeanDecoder | None:
        """Take what it needs out of ``backbone``; None if that is not of the kind. ``attention``: see ``TraceMode``."""
        decoder = backbone.decoder
        if backbone.model.config.model_type not in FAMILIES or len(backbone.groups) != 4 * len(backbone.layers):
            return None
        layers = []
        for i, module in enumerate(backbone.layers):
            groups = backbone.groups[4 * i : 4 * i + 4]
            names = tuple(
                tuple(member.name.partition(f"layers.{i}.")[2] for member in group.members) for group in groups
            )
            if {name for name, _ in module.named_children()} != CHILDREN or names != MEMBERS:
                return None
            qkv, out, gate_up, down = groups
            kv_heads, dim = backbone.kv_sizes[i]
            scale, window = attention[i]
            layers.append(
                Layer(
                    before=module.get_submodule("input_layernorm"),
                    qkv=qkv,
                    query_norm=getattr(module.self_attn, "q_norm", None),
                    key_norm=getattr(module.self_attn, "k_norm", None),
                    out=out,
                    between=module.get_submodule("post_attention_layernorm"),
                    gate_up=gate_up,
                    act=module.get_submodule("mlp.act_fn"),
                    down=down,
                    kv_heads=kv_heads,
                    dim=dim,
                    scale=scale,
                    window=window,
                )
            )
        children = dict(decoder.named_children())
        return cls(layers, children["embed_tokens"], children["rotary_emb"], children["norm"])

    def __call__(self, ids: Tensor, positions: Tensor, mode: ServingMode) -> Tensor:
        """Run one step: ids and positions [T] → final hidden states [T, d]."""
        x: Tensor = self._embed(ids)
        cos, sin = self._rotary(x, position_ids=positions[None])
        cos, sin = cos[0, :, None], _half_negated(sin[0, :, None])
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv.serve(layer.before(x), mode).view(len(x), -1, layer.dim)
            x = layer.out.serve(_attend(layer, i, qkv, cos, sin, mode), mode, plus=x)
            gate, up = layer.gate_up.serve(layer.between(x), mode).chunk(2, -1)
            x = layer.down.serve(layer.act(gate) * up, mode, plus=x)
        return self._norm(x)


def _attend(layer: Layer, index: int, qkv: Tensor, cos: Tensor, sin: Tensor, mode: ServingMode) -> Tensor:
    """qkv [T, H + 2·Hkv, D] → [T, H·D]."""
    both, v = qkv.split_with_sizes([qkv.shape[1] - layer.kv_heads, layer.kv_heads], 1)
    if layer.query_norm is not None and layer.key_norm is not None:
        q, k = both.split_with_sizes([both.shape[1] - layer.kv_heads, layer.kv_heads], 1)
        both = torch.cat([layer.query_norm(q), layer.key_norm(k)], 1)
    turned = torch.addcmul(both * cos, both.roll(layer.dim // 2, -1), sin)
    q, k = turned.split_with_sizes([both.shape[1] - layer.kv_heads, layer.kv_heads], 1)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return serve(q, k, v, mode, index, layer.scale, layer.window).reshape(len(qkv), -1)


def _half_negated(sin: Tensor) -> Tensor:
    """Return ``sin`` with its first half negated: rotation takes -x₂ there and x₁ in the second half."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], -1)
