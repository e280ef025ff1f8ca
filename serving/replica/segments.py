"""Forward and backward in pieces: each decoder layer its own autograd segment, the loss in chunks.

Nothing here knows an architecture. A dry pass with the layers stubbed out records the arguments of every layer's
call; then the layers are called one by one, and the final norm and the head directly. The generators announce each
piece before they do it, and hold no context across a yield: between two pieces the shared model is as serving left
it.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.errors import ConfigError
from serving.replica.backbone import Backbone
from serving.replica.modes import PackedMode
from serving.replica.packing import Batch


class Kind(StrEnum):
    """What a piece of work does; pieces of one kind cost alike per token."""

    PREPARE = "prepare"
    FORWARD = "forward"
    LOSS = "loss"
    LOSS_BACKWARD = "loss_backward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SCORE_FORWARD = "score_forward"
    SCORE_LOSS = "score_loss"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of work, announced before it is done."""

    kind: Kind
    tokens: int
    """Positions that it computes."""


Pieces = Generator[Piece, None, None]
LayerCall = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Calls:
    """What the dry pass recorded."""

    first: Tensor
    """[1, T, d]: what the first layer is given."""
    layers: list[LayerCall]
    """Each layer with its arguments bound."""


@dataclass(slots=True)
class Segment:
    """A layer between its forward and its backward."""

    layer: LayerCall
    given: Tensor
    """[1, T, d] leaf: its input."""
    made: Tensor | None
    """Its output with the graph that made it; None: to be made again."""


class Segments:
    """Pieces of forward and backward on one backbone."""

    def __init__(self, backbone: Backbone, *, loss_positions: int, checkpoint: bool = False) -> None:
        """``loss_positions``: supervised positions of one loss chunk.

        ``checkpoint``: of a layer only the input is kept until its backward, which computes the layer again (Chen et
        al. 2016, arXiv 1604.06174): the same gradients bit for bit, for less memory and more time. Raises
        ``ConfigError`` that names the family.
        """
        self._backbone = backbone
        self._loss_positions = loss_positions
        self._checkpoint = checkpoint
        self._wraps, self._norm = self._probe()

    def gradients(self, batch: Batch, mode: PackedMode, weight: float) -> Generator[Piece, None, float]:
        """Add the gradient of ``weight`` · (summed loss) to the factors in ``mode`` that require it.

        Returns the summed loss in nats.
        """
        tokens = len(batch.ids)
        yield Piece(Kind.FORWARD, tokens)
        calls = self.dry_pass(batch, mode)
        hidden = calls.first
        segments: list[Segment] = []
        for i, layer in enumerate(calls.layers):
            if i:
                yield Piece(Kind.FORWARD, tokens)
            # The first layer's input needs no gradient, nor does any before the first layer that is trained.
            given = hidden.detach().requires_grad_(hidden.requires_grad)
            # With gradients also where the graph is dropped: attention without them rounds another way.
            hidden = self.run(layer, given, mode, grad=True)
            if not hidden.requires_grad:
                continue
            segments.append(Segment(layer, given, None if self._checkpoint else hidden))
            if self._checkpoint:
                hidden = hidden.detach().requires_grad_()
        chunks = self._chunks(len(batch.labels))
        yield Piece(Kind.LOSS, chunks[0].stop)
        last = hidden.detach().requires_grad_()
        normed = self.run(self._norm, last[:, batch.predicts], mode, grad=True)[0]
        total, pulls = 0.0, []
        for i, chunk in enumerate(chunks):
            if i:
                yield Piece(Kind.LOSS, chunk.stop - chunk.start)
            leaf = normed[chunk].detach().requires_grad_()
            loss = F.cross_entropy(self._backbone.head(leaf).float(), batch.labels[chunk], reduction="sum")
            total += float(loss.detach())
            # A slice of its own: the head is by far the largest product, and reading its weights what it costs.
            yield Piece(Kind.LOSS_BACKWARD, chunk.stop - chunk.start)
            (pull,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, weight))
            pulls.append(pull)
            del leaf, loss, pull
        (grad,) = torch.autograd.grad(normed, last, torch.cat(pulls))
        del normed, last, hidden, given, calls, layer
        while segments:
            segment = segments.pop()
            if segment.made is None:
                yield Piece(Kind.RECOMPUTE, tokens)
                segment.made = self.run(segment.layer, segment.given, mode, grad=True)
            yield Piece(Kind.BACKWARD, tokens)
            torch.autograd.backward(segment.made, grad)
            if segment.given.grad is not None:
                grad = segment.given.grad
            del segment
        return total

    def nll(self, batch: Batch, mode: PackedMode) -> Generator[Piece, None, tuple[float, ...]]:
        """Return the summed negative log-likelihood of each row's supervised tokens, in nats."""
        tokens = len(batch.ids)
        yield Piece(Kind.SCORE_FORWARD, tokens)
        calls = self.dry_pass(batch, mode)
        hidden = calls.first
        for i, layer in enumerate(calls.layers):
            if i:
                yield Piece(Kind.SCORE_FORWARD, tokens)
            hidden = self.run(layer, hidden, mode, grad=False)
        normed: Tensor | None = None
        parts: list[Tensor] = []
        for chunk in self._chunks(len(batch.labels)):
            yield Piece(Kind.SCORE_LOSS, chunk.stop - chunk.start)
            if normed is None:
                normed = self.run(self._norm, hidden[:, batch.predicts], mode, grad=False)[0]
            with torch.no_grad():
                logits = self._backbone.head(normed[chunk]).float()
                parts.append(F.cross_entropy(logits, batch.labels[chunk], reduction="none"))
        rows = torch.split(torch.cat(parts), list(batch.supervised))
        return tuple(float(row.sum(dtype=torch.float64)) for row in rows)

    def _chunks(self, positions: int) -> list[slice]:
        """Cut into chunks of nearly equal size."""
        count = -(-positions // self._loss_positions)
        edges = [positions * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def run(self, call: LayerCall, hidden: Tensor, mode: PackedMode, *, grad: bool) -> Tensor:
        """Call a layer, or the final norm: [1, T, d] → [1, T, d]."""
        with self._backbone.mode_set(mode), torch.set_grad_enabled(grad):
            return call(hidden)

    def dry_pass(self, batch: Batch, mode: PackedMode) -> Calls:
        """Run the decoder with its layers stubbed out, and return the calls that they would have got."""
        first: list[Tensor] = []
        layers: list[LayerCall] = []

        def record(layer: nn.Module) -> Callable[..., Tensor | tuple[Tensor]]:
            def forward(hidden: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
                if not first:
                    first.append(hidden)
                layers.append(lambda h: plain(layer(h, *args, **kwargs)))
                return (hidden,) if self._wraps else hidden

            return forward

        with torch.no_grad(), self._backbone.mode_set(mode), stubbed(self._backbone.layers, record):
            self._backbone.hidden(batch.ids, batch.positions)
        return Calls(first[0], layers)

    def _probe(self) -> tuple[bool, nn.Module]:
        """Return whether layers return tuples, and the final norm, by watching one call of two tokens."""
        wraps: list[bool] = []
        children: list[tuple[nn.Module, Tensor]] = []

        def watch_layer(_: nn.Module, __: object, output: object) -> None:
            wraps.append(isinstance(output, tuple))

        def watch_child(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Tensor):
                children.append((module, output))

        backbone = self._backbone
        hooks = [backbone.layers[0].register_forward_hook(watch_layer)]
        hooks += [child.register_forward_hook(watch_child) for child in backbone.decoder.children()]
        ids = torch.zeros(1, 2, dtype=torch.long, device=backbone.device)
        with torch.no_grad(), backbone.mode_set(PackedMode(lengths=(2,))):
            out = backbone.decoder(input_ids=ids, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        norm, output = children[-1]
        if output.shape != out.shape or not torch.equal(output, out):
            family = backbone.model.config.model_type
            raise ConfigError(f"model family {family!r}: its decoder does not end in a module that can be called alone")
        return wraps[0], norm


def plain(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return a layer's hidden states."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def stubbed(layers: list[nn.Module], make: Callable[[nn.Module], Callable[..., object]]) -> Iterator[None]:
    """Replace the layers' forward within the body of a ``with``, which must not contain a generator's yield."""
    # An attribute of the instance hides the class's method and leaves no trace when deleted. While recording, the
    # layer's own call must not run into its stub: the recorded calls are made after the stubs are gone.
    try:
        for layer in layers:
            layer.__dict__["forward"] = make(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
