"""AdamW on one flat fp32 vector that the trained factors are views of, and snapshots of it that copy nothing."""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.model import Array

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
CHUNK = 2**18
"""Numbers that a step works on at a time: smaller chunks were no faster, and each call gives other threads a turn."""
BYTES_PER_NUMBER = 28
"""Most memory per trained number: values, two moments and gradients, and what a snapshot holds of the first three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """An optimizer after a step; the arrays never change."""

    values: Array
    """[n] the trained numbers."""
    mean: Array
    """[n] running mean of the gradients."""
    square: Array
    """[n] running mean of their squares."""


class FlatAdamW:
    """Leaves for autograd and their optimizer; a step is a few operations, however many leaves there are.

    Written out because importing torch's own costs seconds of the engine's thread at its first step. No weight
    decay: a low-rank update is small as it is.

    A snapshot is the very buffers that are in use. The next step leaves them alone: it writes what it makes into new
    ones, to which it points the leaves. So a snapshot costs the engine nothing at the moment of a swap. Buffers whose
    readers have all gone are written again: giving their pages back and taking new ones would cost milliseconds.
    """

    def __init__(self, groups: Sequence[Mapping[str, Array]], device: torch.device) -> None:
        """``groups``: initial values by name; each group has a learning rate of its own."""
        self._shapes = {name: array.shape for group in groups for name, array in group.items()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._group_sizes = [sum(array.size for array in group.values()) for group in groups]
        size = sum(self._sizes)
        self._values = torch.empty(size, device=device)
        self._grads = torch.zeros(size, device=device)
        self._mean = torch.zeros(size, device=device)
        self._square = torch.zeros(size, device=device)
        self._steps = 0
        self._on_host = device.type == "cpu"
        self._values_taken = self._moments_taken = False
        """Whether somebody else reads the buffers."""
        self.leaves: dict[str, Tensor] = {}
        """By name; fp32, require gradients, which are added up until ``step``."""
        self._retired: list[tuple[Tensor, weakref.ref[Array]]] = []
        """Buffers that are no longer in use here, and the array by which readers hold them."""
        self._roots: dict[int, Array] = {}
        """By address: the array of each buffer in use; all that readers get are it or views of it."""
        self._views: dict[str, Array] = {}
        """The same in numpy, where the device's memory is the host's."""
        initial = [array for group in groups for array in group.values()]
        parts, grads = torch.split(self._values, self._sizes), torch.split(self._grads, self._sizes)
        for (name, shape), array, part, grad in zip(self._shapes.items(), initial, parts, grads, strict=True):
            leaf = part.view(shape)
            leaf.copy_(torch.tensor(array))
            leaf.requires_grad_()
            leaf.grad = grad.view(shape)
            self.leaves[name] = leaf
        self._point(self._values)

    @property
    def size(self) -> int:
        """Trained numbers."""
        return self._values.numel()

    @torch.no_grad()
    def step(self, rates: Sequence[float], max_norm: float) -> float:
        """Clip the gradients, take a step, clear them; return their norm. If it is not finite, do nothing else.

        ``rates``: the learning rate of each group.
        """
        norm = float(torch.linalg.vector_norm(self._grads))
        if not math.isfinite(norm):
            return norm
        self._steps += 1
        values = self._replaced(self._values) if self._values_taken else self._values
        mean = self._replaced(self._mean) if self._moments_taken else self._mean
        square = self._replaced(self._square) if self._moments_taken else self._square
        begin = 0
        for rate, size in zip(rates, self._group_sizes, strict=True):
            span = slice(begin, begin + size)
            old = (self._grads, self._values, self._mean, self._square)
            self._update([t[span] for t in (*old, values, mean, square)], rate, min(1.0, max_norm / (norm + 1e-6)))
            begin += size
        if values is not self._values:
            self._point(values)
        self._values, self._mean, self._square = values, mean, square
        self._values_taken = self._moments_taken = False
        return norm

    def snapshot(self) -> dict[str, Array]:
        """Return the leaves' values by name; they never change afterwards."""
        if not self._on_host:
            return self._as_arrays(self._values.cpu())
        self._values_taken = True
        return dict(self._views)

    def moments(self) -> Moments:
        """Return what ``restore`` needs, flat; it never changes afterwards."""
        self._values_taken = self._moments_taken = self._on_host
        values, mean, square = (self._array(buffer) for buffer in (self._values, self._mean, self._square))
        return Moments(values=values, mean=mean, square=square)

    @torch.no_grad()
    def restore(self, moments: Moments, steps: int) -> None:
        """Go on from ``moments`` after that many steps; before the first one only."""
        saved = (moments.values, moments.mean, moments.square)
        assert self._steps == 0
        assert not self._values_taken
        for buffer, array in zip((self._values, self._mean, self._square), saved, strict=True):
            buffer.copy_(torch.tensor(array))
        self._steps = steps

    def _array(self, buffer: Tensor) -> Array:
        """Return a buffer as readers get it."""
        if not self._on_host:
            copied: Array = buffer.cpu().numpy()
            return copied
        return self._roots.setdefault(buffer.data_ptr(), buffer.numpy())

    def _replaced(self, buffer: Tensor) -> Tensor:
        """Leave a buffer to its readers; return one that nobody reads."""
        free = next((i for i, (_, root) in enumerate(self._retired) if root() is None), None)
        fresh = torch.empty_like(buffer) if free is None else self._retired.pop(free)[0]
        root = self._roots.pop(buffer.data_ptr(), None)
        if root is not None:
            self._retired.append((buffer, weakref.ref(root)))
        return fresh

    def _update(self, spans: Sequence[Tensor], rate: float, clip: float) -> None:
        """AdamW in chunks: gradients, values, mean, square, and where the new three go."""
        first, second = 1 - BETA_1**self._steps, 1 - BETA_2**self._steps
        size = CHUNK if self._on_host else max(1, spans[0].numel())
        for grad, value, mean, square, new_value, new_mean, new_square in zip(
            *(torch.split(span, size) for span in spans), strict=True
        ):
            grad.mul_(clip)
            torch.lerp(mean, grad, 1 - BETA_1, out=new_mean)
            torch.mul(square, BETA_2, out=new_square).addcmul_(grad, grad, value=1 - BETA_2)
            # The gradient is done with: its room takes the denominator, then is cleared.
            torch.div(new_square, second, out=grad).sqrt_().add_(EPSILON)
            torch.addcdiv(value, new_mean, grad, value=-rate / first, out=new_value)
            grad.zero_()

    def _point(self, values: Tensor) -> None:
        """Make the leaves, and what a snapshot returns, views of ``values``."""
        parts = torch.split(values, self._sizes)
        for leaf, part, shape in zip(self.leaves.values(), parts, self._shapes.values(), strict=True):
            leaf.data = part.view(shape)
        if self._on_host:
            self._views = self._as_arrays(values)

    def _as_arrays(self, values: Tensor) -> dict[str, Array]:
        """Return the parts of a host tensor by name, without a copy."""
        flat = self._array(values)
        arrays, start = {}, 0
        for (name, shape), size in zip(self._shapes.items(), self._sizes, strict=True):
            arrays[name] = flat[start : start + size].reshape(shape)
            start += size
        return arrays
