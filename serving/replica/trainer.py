"""Fine-tuning of a shadow beside serving: AdamW on its fp32 factors, in slices."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from adapters.model import LoraWeights
from adapters.weights import of_factor
from db.records import Factor
from infra.clock import Clock, SystemClock
from serving.ports import SliceReport, TrainState, TrainTask
from serving.replica.activations import ActivationCosts, measure_activations
from serving.replica.backbone import Backbone
from serving.replica.modes import PackedMode
from serving.replica.optimizer import FlatAdamW, Moments
from serving.replica.packing import RowEncoder, even_batches, pack
from serving.replica.score import TorchScoreWork, pair_factors
from serving.replica.segments import Kind, Piece, Pieces, Segments
from serving.replica.text import Tokenizer
from serving.replica.work import Slices, SliceTimes, WorkFailed
from serving.rows import Row

MICRO_TOKENS, SCORE_TOKENS = 224, 256
"""Tokens of a micro-batch for each CPU thread, in training and in scoring: what keeps a layer's slice short."""
MICRO_TOKENS_FP32, SCORE_TOKENS_FP32 = 144, 192
"""The same in float32, in which a CPU takes about twice as long."""
MOST_MICRO_TOKENS = 512
"""However many threads there are: more only takes memory."""
LOSS_POSITIONS = 32
"""Supervised positions of a loss chunk."""
MOMENTS = ("values", "mean", "square")
"""Arrays of a saved state."""


class TorchTrainer:
    """Implements ``ports.Trainer`` on the backbone that the engine serves from.

    The sizes of a micro-batch and of a loss chunk are fixed, not adapted to the load: they change rounding, and
    training is deterministic.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: Tokenizer,
        row_tokens: int,
        *,
        clock: Clock | None = None,
        micro_tokens: int | None = None,
        score_tokens: int | None = None,
        loss_positions: int = LOSS_POSITIONS,
        checkpoint_layers: bool = False,
    ) -> None:
        """Sizes of micro-batches are chosen by the backbone's type and torch's threads where none are given.

        ``checkpoint_layers``: keep only each layer's input and compute the layer again in its backward.
        """
        fp32 = backbone.dtype == torch.float32
        self._backbone = backbone
        self._encoder = RowEncoder(tokenizer, eos_id=eos_id(backbone), row_tokens=row_tokens)
        self._segments = Segments(backbone, loss_positions=loss_positions, checkpoint=checkpoint_layers)
        self._loss_positions = loss_positions
        self._row_tokens = row_tokens
        self._clock = clock or SystemClock()
        threads = torch.get_num_threads() if backbone.device.type == "cpu" else MOST_MICRO_TOKENS
        self._micro_tokens = micro_tokens or _for_threads(MICRO_TOKENS_FP32 if fp32 else MICRO_TOKENS, threads)
        self._score_tokens = score_tokens or _for_threads(SCORE_TOKENS_FP32 if fp32 else SCORE_TOKENS, threads)
        self.times = SliceTimes()
        """Shared by all work, so that new work is predicted from old."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest training micro-batch."""
        return max(self._micro_tokens, self._row_tokens)

    @cached_property
    def activations(self) -> ActivationCosts:
        """What a micro-batch keeps in memory; the first call measures it."""
        return measure_activations(self._backbone, self._segments, loss_positions=self._loss_positions)

    def activation_bytes(self, tokens: int, *, checkpointed: bool) -> int:
        """Return an upper bound of what a micro-batch of that many tokens takes beside weights and optimizer.

        ``most_tokens`` is the largest there will be.
        """
        return self.activations.bytes(tokens, checkpointed=checkpointed)

    def train(
        self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
    ) -> "TorchTrainWork":
        """See ``ports.Trainer``."""
        return TorchTrainWork(
            self._backbone,
            self._segments,
            self._encoder,
            task,
            base,
            rows,
            state,
            micro_tokens=self._micro_tokens,
            times=self.times,
            clock=self._clock,
        )

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> TorchScoreWork:
        """See ``ports.Trainer``."""
        return TorchScoreWork(
            self._backbone,
            self._segments,
            self._encoder,
            rows,
            weights,
            micro_tokens=self._score_tokens,
            times=self.times,
            clock=self._clock,
        )


class TorchTrainWork:
    """Implements ``ports.TrainWork``."""

    def __init__(
        self,
        backbone: Backbone,
        segments: Segments,
        encoder: RowEncoder,
        task: TrainTask,
        base: LoraWeights,
        rows: Sequence[Row],
        state: TrainState | None,
        *,
        micro_tokens: int,
        times: SliceTimes,
        clock: Clock,
    ) -> None:
        """Raises ``ValueError`` if ``state`` is of other factors."""
        self.steps = 0 if state is None else state.steps
        self.tokens = 0 if state is None else state.tokens
        self._backbone = backbone
        self._segments = segments
        self._encoder = encoder
        self._task = task
        self._base = base
        self._rows = tuple(rows)
        self._micro_tokens = micro_tokens
        self._ended: tuple[int, float] | None = None
        """Supervised tokens and mean loss of a step that the current slice ended."""
        self._groups = [
            {name: base.tensors[name] for name in of_factor(base.tensors, factor)}
            for factor in (Factor.A, Factor.B)
            if task.factor in (factor, Factor.BOTH)
        ]
        self._moments = None if state is None else self._read(state)
        self._optimizer: FlatAdamW | None = None
        """Made in the first slice."""
        self._slices = Slices(self._pieces(), times, clock)

    def next_slice_s(self) -> float:
        """See ``ports.Work``."""
        return self._slices.next_slice_s()

    def slice(self) -> SliceReport:
        """See ``ports.Work``."""
        self._ended = None
        report = self._slices.slice()
        if self._ended is None:
            return report
        tokens, loss = self._ended
        return replace(report, step_ended=True, tokens=tokens, loss=loss)

    def close(self) -> None:
        """See ``ports.Work``."""
        self._slices.close()
        self._optimizer = None

    def shadow(self) -> LoraWeights:
        """See ``ports.TrainWork``."""
        assert self._optimizer is not None, "closed, or not begun"
        trained = self._optimizer.snapshot()
        tensors = {name: trained.get(name, array) for name, array in self._base.tensors.items()}
        return LoraWeights(spec=self._base.spec, tensors=tensors)

    def state(self) -> TrainState:
        """See ``ports.TrainWork``."""
        assert self._optimizer is not None, "closed, or not begun"
        moments = self._optimizer.moments()
        arrays = {"values": moments.values, "mean": moments.mean, "square": moments.square}
        return TrainState(steps=self.steps, tokens=self.tokens, arrays=arrays)

    def _read(self, state: TrainState) -> Moments:
        """Return a state's arrays. Raises ``ValueError`` unless they are those of this work's factors."""
        size = sum(array.size for group in self._groups for array in group.values())
        if {name: array.shape for name, array in state.arrays.items()} != dict.fromkeys(MOMENTS, (size,)):
            raise ValueError(f"the state is not one of {size} trained numbers")
        return Moments(**state.arrays)

    def _begin(self) -> FlatAdamW:
        optimizer = self._optimizer = FlatAdamW(self._groups, self._backbone.device)
        if self._moments is not None:
            optimizer.restore(self._moments, self.steps)
        self._groups, self._moments = [], None
        return optimizer

    def _pieces(self) -> Pieces:
        task = self._task
        yield Piece(Kind.PREPARE, sum(array.size for array in self._base.tensors.values()))
        optimizer = self._begin()
        factors = self._factors(optimizer)
        order = endless_order(len(self._rows), task.seed, start=self.steps * task.rows_per_step)
        while self.tokens < task.tokens:
            rows = [self._encoder.encode(self._rows[next(order)]) for _ in range(task.rows_per_step)]
            supervised = sum(row.supervised for row in rows)
            total = 0.0
            for run in even_batches(rows, self._micro_tokens):
                batch = pack(run, self._backbone.device)
                mode = PackedMode(lengths=batch.lengths, factors=factors, scale=self._base.spec.scale)
                total += yield from self._segments.gradients(batch, mode, 1 / supervised)
                if not math.isfinite(total):
                    raise WorkFailed(f"non-finite loss in step {self.steps + 1}")
            yield Piece(Kind.OPTIMIZER, optimizer.size)
            norm = optimizer.step(rates(task, self.steps), task.max_grad_norm)
            if not math.isfinite(norm):
                raise WorkFailed(f"non-finite gradient in step {self.steps + 1}")
            self.steps += 1
            self.tokens += supervised
            self._ended = (supervised, total / supervised)

    def _factors(self, optimizer: FlatAdamW) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the factors by linear: leaves where trained, else constants in the model's type."""
        tensors = {
            name: optimizer.leaves[name]
            if name in optimizer.leaves
            else torch.tensor(array, dtype=self._backbone.dtype, device=self._backbone.device)
            for name, array in self._base.tensors.items()
        }
        return pair_factors(tensors)


def rates(task: TrainTask, steps: int) -> list[float]:
    """Return the learning rate of each trained factor, A before B, in the step after ``steps``."""
    lr = task.lr * min(1.0, (steps + 1) / max(1, task.warmup_steps))
    by_factor = {Factor.A: lr, Factor.B: lr * task.lr_ratio}
    return [rate for factor, rate in by_factor.items() if task.factor in (factor, Factor.BOTH)]


def endless_order(count: int, seed: int, *, start: int = 0) -> Iterator[int]:
    """Yield row numbers from position ``start`` on, each epoch in its own order. Raises ``WorkFailed`` without rows."""
    epoch, begin = divmod(start, count) if count else (0, 0)
    while count:
        numbers = list(range(count))
        random.Random(f"{seed}:{epoch}").shuffle(numbers)
        yield from numbers[begin:]
        epoch, begin = epoch + 1, 0
    raise WorkFailed("there are no rows to train on")


def eos_id(backbone: Backbone) -> int | None:
    """Return the token that ends a training row."""
    eos: int | list[int] | None = backbone.config.eos_token_id
    return eos[0] if isinstance(eos, list) else eos


def _for_threads(tokens: int, threads: int) -> int:
    return min(tokens * threads, MOST_MICRO_TOKENS)
