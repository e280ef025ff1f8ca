"""What a training micro-batch holds in memory between its forward and its backward, from one small probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from serving.replica.attention import MATMUL_TOKENS
from serving.replica.backbone import Backbone
from serving.replica.modes import PackedMode
from serving.replica.packing import TokenRow, pack
from serving.replica.segments import Segments

PROBE_TOKENS = (8, 24)
BACKWARD_FACTOR = 2
"""While a layer is computed, forward or backward, it holds about as much again as it keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCosts:
    """Bytes that training keeps, as functions of a micro-batch's tokens."""

    layers: tuple[tuple[float, float], ...]
    """Of each layer: bytes per token, and bytes per token and token of its row (attention weights)."""
    hidden: int
    """Bytes of one token's hidden state."""
    loss: int
    """Bytes of one loss chunk: logits and their gradients."""

    def bytes(self, tokens: int, *, checkpointed: bool) -> int:
        """Return an upper bound for a micro-batch of that many tokens, with or without checkpointing by layer."""
        # Whatever the rows' lengths, squares add up to less than this; longer ones keep no attention weights.
        pairs = tokens * min(tokens, MATMUL_TOKENS)
        kept = [linear * tokens + square * pairs for linear, square in self.layers]
        most = BACKWARD_FACTOR * max(kept)
        inputs = self.hidden * tokens * len(kept)
        ends = 6 * self.hidden * tokens  # embeddings, normed states, their gradients
        return int((inputs if checkpointed else sum(kept)) + most + ends) + self.loss


def measure_activations(backbone: Backbone, segments: Segments, *, loss_positions: int) -> ActivationCosts:
    """Run a layer of each make twice on a few tokens, with all factors trained, and see what autograd keeps."""
    rank = max((group.rank for group in backbone.groups), default=1)
    factors = {
        name: (
            torch.zeros(rank, linear.shape[1], device=backbone.device, requires_grad=True),
            torch.zeros(linear.shape[0], rank, device=backbone.device, requires_grad=True),
        )
        for name, linear in backbone.linears.items()
    }
    few, many = (_kept(backbone, segments, factors, tokens) for tokens in PROBE_TOKENS)
    low, high = PROBE_TOKENS
    layers = []
    for a, b in zip(few, many, strict=True):
        square = max(0.0, (b / high - a / low) / (high - low))
        layers.append((max(a / low, b / high - square * high), square))
    width = 3 * 4 if backbone.dtype == torch.float32 else 3 * 4 + 2 * backbone.dtype.itemsize
    return ActivationCosts(
        layers=tuple(layers),
        hidden=backbone.config.hidden_size * backbone.dtype.itemsize,
        loss=loss_positions * backbone.config.vocab_size * width,
    )


def _kept(
    backbone: Backbone, segments: Segments, factors: dict[str, tuple[Tensor, Tensor]], tokens: int
) -> Sequence[int]:
    """Return the bytes that autograd keeps for each layer's backward, weights and factors not counted."""
    batch = pack([TokenRow((0,) * tokens, 1)], backbone.device)
    mode = PackedMode(lengths=batch.lengths, factors=factors)
    frozen = chain(backbone.model.parameters(), backbone.model.buffers(), chain.from_iterable(factors.values()))
    known = {tensor.untyped_storage().data_ptr() for tensor in frozen}
    calls = segments.dry_pass(batch, mode)
    alike: dict[tuple[object, ...], int] = {}
    found = []
    for module, layer in zip(backbone.layers, calls.layers, strict=True):
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        if shapes in alike:
            found.append(alike[shapes])
            continue
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep the graph alive

        given = calls.first.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = segments.run(layer, given, mode, grad=True)
        found.append(sum(saved.values()))
        alike[shapes] = found[-1]
        del made
    return found
