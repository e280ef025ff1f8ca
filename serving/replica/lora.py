"""Unmerged multi-version LoRA on frozen linears.

Linears that are called with the very same input (q, k, v; gate, up) form a ``LinearGroup``: in the serving mode
they are one product, and the low-rank factors of all resident versions lie side by side.

    y = W x + where(mask, x A[low:high]ᵀ, 0) B[low:high]

``where``, not a product, so that what one version makes of another's row, NaN included, cannot reach it. Rows
without an adapter are masked like any other. A step computes the places between the lowest and the highest one in use.
Where tokens are spread evenly enough over these, they are gathered by place instead, and one batched product computes
each place for its own tokens alone.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serving.replica.modes import PackedMode, ServingMode, Sorted, Switch, TraceMode, Worn

PACK_HINT_ROWS = 8
"""oneDNN lays packed weights out for about this many rows of input; they stay right for any number."""

FP32_TOKENS = 32
"""Up to so many tokens a low-rank product is faster in fp32 than in a short type, on a CPU."""


CACHE_LINE = 64
"""Bytes at whose multiples torch's own tensors begin."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, pages that nobody writes take no memory (numpy leaves them to the kernel)."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    room = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % CACHE_LINE
    return torch.from_numpy(room[begin : begin + size]).view(dtype).view(*shape)


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x [T, d_in], a [r, d_in], b [r, d_out] → [T, d_out] in the factors' type."""
    return F.linear(x.to(a.dtype), a) @ b


class FrozenProduct:
    """y = W x + b with frozen weights, once packed for oneDNN if asked; not differentiable when packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self.bias = bias
        self.packed = packed
        self.weight: Tensor = weight
        """[d_out, d_in], or oneDNN's own layout of it."""
        if packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_HINT_ROWS)

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """[..., d_in] → [..., d_out], with ``plus`` [..., d_out] added to it."""
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if plus is None else y + plus
        out: Tensor
        if plus is None:
            out = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, plus, self.weight, self.bias, "add")
        return out


class AdaptedLinear(nn.Module):
    """Stands where the model had an ``nn.Linear`` or ``Conv1D``; computes as its backbone's mode says."""

    def __init__(self, name: str, base: nn.Module, switch: Switch) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear | Conv1D)
        self.name = name
        self.base = base
        """The model's own module: its frozen weights stay where they were loaded."""
        self.switch = switch
        self._group: list[LinearGroup] = []

    @property
    def weight(self) -> Tensor:
        """Frozen [d_out, d_in]; a view."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight.t() if isinstance(self.base, Conv1D) else weight

    @property
    def bias(self) -> Tensor | None:
        """Frozen [d_out]."""
        bias = self.base.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in)."""
        d_out, d_in = self.weight.shape
        return d_out, d_in

    def join(self, group: "LinearGroup") -> None:
        """Compute as part of ``group`` in the serving mode."""
        # A list, so that torch does not take the group for a child of each of its members.
        self._group = [group]

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_in] → [..., d_out]; differentiable in all modes but serving."""
        mode = self.switch.mode
        if isinstance(mode, ServingMode):
            return self._group[0].product(self, x, mode)
        if isinstance(mode, TraceMode):
            mode.inputs.append((self.name, x))
        y = F.linear(x, self.weight, self.bias)
        if not isinstance(mode, PackedMode) or self.name not in mode.factors:
            return y
        a, b = mode.factors[self.name]
        return y + F.linear(F.linear(x, a.to(x.dtype)) * mode.scale, b.to(x.dtype))


class LinearGroup:
    """Linears with one input: one frozen product, and the factors of every resident version.

    For G members with outputs o_1 … o_G and V places of rank r:
    ``a`` [V, G·r, d_in] holds the members' A one under the other; ``b`` [V, G·r, Σo] has B_g·scale transposed in
    member g's rows and columns and zero elsewhere.
    """

    def __init__(self, members: tuple[AdaptedLinear, ...]) -> None:
        self.members = members
        self.sizes = [m.shape[0] for m in members]
        # Not one product until they are packed: fusing copies the weights.
        self._products = [FrozenProduct(m.weight, m.bias, packed=False) for m in members]
        self._input: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}
        for member in members:
            member.join(self)
        self.allot(places=0, rank=1)

    @property
    def factor_dtype(self) -> torch.dtype:
        """Of the factors in places."""
        weight = self.members[0].weight
        # On a CPU a small product in a short type can take several times as long as in fp32, and is less exact.
        return torch.float32 if weight.device.type == "cpu" else weight.dtype

    def place_bytes(self, rank: int) -> int:
        """Return what one version of ``rank`` takes."""
        d_in = self.members[0].shape[1]
        return rank * len(self.members) * (d_in + sum(self.sizes)) * self.factor_dtype.itemsize

    def allot(self, *, places: int, rank: int) -> None:
        """Make room for ``places`` versions of at most ``rank``; all empty."""
        weight, dtype = self.members[0].weight, self.factor_dtype
        width = rank * len(self.members)
        self.rank = rank
        self.a = lazy_zeros((places, width, weight.shape[1]), dtype, weight.device)
        self.b = lazy_zeros((places, width, sum(self.sizes)), dtype, weight.device)

    def pack(self) -> None:
        """Make the members one product with its weights laid out for oneDNN: a second copy of them."""
        members = self.members
        weight = torch.cat([m.weight for m in members])
        bias = None
        if any(m.bias is not None for m in members):
            bias = torch.cat([weight.new_zeros(m.shape[0]) if m.bias is None else m.bias for m in members])
        self._products = [FrozenProduct(weight, bias, packed=True)]

    def write(self, place: int, factors: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
        """Copy factors (A [r, d_in], B [d_out, r], by name) into a place; what is absent becomes zero."""
        column = 0
        for i, (member, size) in enumerate(zip(self.members, self.sizes, strict=True)):
            a = self.a[place, i * self.rank : (i + 1) * self.rank]
            b = self.b[place, i * self.rank : (i + 1) * self.rank, column : column + size]
            column += size
            rank = 0
            if member.name in factors:
                factor_a, factor_b = factors[member.name]
                rank = factor_a.shape[0]
                a[:rank] = factor_a
                b[:rank] = factor_b.t() * scale
            if rank < self.rank:
                a[rank:] = 0
                b[rank:] = 0

    def product(self, member: AdaptedLinear, x: Tensor, mode: ServingMode) -> Tensor:
        """Return ``member``'s output; the first member called with ``x`` computes all."""
        if len(self.members) == 1:
            return self.serve(x, mode)
        if self._input is not x:
            self._input = x
            parts = self.serve(x, mode).split_with_sizes(self.sizes, -1)
            self._outputs = {m.name: y for m, y in zip(self.members, parts, strict=True)}
        out = self._outputs.pop(member.name)
        if not self._outputs:
            self._input = None
        return out

    def serve(self, x: Tensor, mode: ServingMode, plus: Tensor | None = None) -> Tensor:
        """Return all members' outputs side by side, [..., d_in] → [..., Σo], with ``plus`` [..., Σo] added to them."""
        if len(self._products) == 1:
            y = self._products[0](x, plus)
        else:
            y = torch.cat([product(x) for product in self._products], dim=-1)
            if plus is not None:
                y += plus
        worn = mode.worn
        if worn is None:
            return y
        flat, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if mode.tile:
            self._add_each(flat, out, worn)
            return y
        # Not for many tokens: the results by place are large, and new memory for them costs more than they save.
        if worn.by_place is not None and len(flat) <= FP32_TOKENS:
            out += self._each_for_its_own(flat, worn.low, worn.high, worn.by_place)
            return y
        a, b = self._factors(worn, self.a), self._factors(worn, self.b)
        wide = len(flat) > FP32_TOKENS
        if wide:
            a, b = a.to(y.dtype), b.to(y.dtype)
        low = F.linear(flat.to(a.dtype), a)
        choice = worn.choice(self.rank * len(self.members))
        if choice is not None:
            low = torch.where(choice, low, 0)
        if wide or b.dtype == y.dtype:
            torch.addmm(out, low, b, out=out)
        else:
            out += low @ b
        return y

    def _each_for_its_own(self, x: Tensor, low: int, high: int, by_place: Sorted) -> Tensor:
        """x [T, d_in] → [T, Σo] in the factors' type."""
        a, b = self.a[low:high], self.b[low:high]
        own = x.to(a.dtype).index_select(0, by_place.tokens).view(high - low, by_place.count, -1)
        made = torch.bmm(torch.bmm(own, a.transpose(1, 2)), b)
        found = made.view(-1, made.shape[-1]).index_select(0, by_place.slots)
        return found if by_place.wears is None else torch.where(by_place.wears, found, 0)

    def _add_each(self, x: Tensor, out: Tensor, worn: Worn) -> None:
        """Add each version's product by itself, so that which others are there changes no bit of it."""
        for place in worn.used:
            a, b = self.a[place], self.b[place]
            if len(x) > FP32_TOKENS:
                a, b = a.to(x.dtype), b.to(x.dtype)
            changed, mine = out + low_rank(x, a, b), worn.wearers(place)
            out.copy_(changed if mine is None else torch.where(mine, changed, out))

    @staticmethod
    def _factors(worn: Worn, places: Tensor) -> Tensor:
        one = worn.high == worn.low + 1
        return places[worn.low] if one else places[worn.low : worn.high].flatten(0, 1)

    def forget(self) -> None:
        """Drop what an interrupted step may have left."""
        self._input, self._outputs = None, {}
