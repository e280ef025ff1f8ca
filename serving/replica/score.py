"""Teacher-forced scoring of rows under one version, beside serving and without a resident place."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adapters.model import LoraWeights
from infra.clock import Clock
from serving.ports import ScoreResult, SliceReport, WorkState
from serving.replica.backbone import Backbone
from serving.replica.modes import PackedMode
from serving.replica.packing import RowEncoder, micro_batches, pack
from serving.replica.segments import Kind, Piece, Pieces, Segments
from serving.replica.work import Slices, SliceTimes
from serving.rows import Row


class TorchScoreWork:
    """Implements ``ports.ScoreWork``."""

    def __init__(
        self,
        backbone: Backbone,
        segments: Segments,
        encoder: RowEncoder,
        rows: Sequence[Row],
        weights: LoraWeights | None,
        *,
        micro_tokens: int,
        times: SliceTimes,
        clock: Clock,
    ) -> None:
        self._backbone = backbone
        self._segments = segments
        self._encoder = encoder
        self._rows = tuple(rows)
        self._weights = weights
        self._micro_tokens = micro_tokens
        self._nll: list[float] = []
        self._tokens: list[int] = []
        self._slices = Slices(self._pieces(), times, clock)

    def next_slice_s(self) -> float:
        """See ``ports.Work``."""
        return self._slices.next_slice_s()

    def slice(self) -> SliceReport:
        """See ``ports.Work``."""
        return self._slices.slice()

    def close(self) -> None:
        """See ``ports.Work``."""
        self._slices.close()

    def result(self) -> ScoreResult:
        """See ``ports.ScoreWork``."""
        assert self._slices.state is WorkState.DONE, "scoring is not done"
        return ScoreResult(nll_by_row=tuple(self._nll), tokens_by_row=tuple(self._tokens))

    def _pieces(self) -> Pieces:
        if not self._rows:
            return
        factors, scale = {}, 1.0
        if self._weights is not None:
            yield Piece(Kind.PREPARE, sum(array.size for array in self._weights.tensors.values()))
            scale = self._weights.spec.scale
            tensors = {
                name: torch.tensor(array, dtype=self._backbone.dtype, device=self._backbone.device)
                for name, array in self._weights.tensors.items()
            }
            factors = pair_factors(tensors)
        self._weights = None
        for run in micro_batches(map(self._encoder.encode, self._rows), self._micro_tokens):
            batch = pack(run, self._backbone.device)
            mode = PackedMode(lengths=batch.lengths, factors=factors, scale=scale)
            nll = yield from self._segments.nll(batch, mode)
            self._nll.extend(nll)
            self._tokens.extend(batch.supervised)


def pair_factors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return factors by linear (A, B), as ``PackedMode`` wants them, from tensors by PEFT's names."""
    suffix_a, suffix_b = ".lora_A.weight", ".lora_B.weight"
    return {
        name.removesuffix(suffix_a): (a, tensors[name.removesuffix(suffix_a) + suffix_b])
        for name, a in tensors.items()
        if name.endswith(suffix_a)
    }
