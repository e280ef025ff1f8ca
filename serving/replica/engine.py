"""The torch engine: carries out step plans on the shared backbone.

One step is one forward over all its tokens: first one for each decoding row, then the prefill chunks. Weights are
read once for all of them.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from adapters.model import Array, LoraWeights
from infra.errors import ConfigError, EngineDead, IncompatibleAdapter, StepFailed
from serving.model import BASE, CopyPrefix, Decode, Draw, EngineShape, Prefill, RowResult, StepPlan, StepResult, Token
from serving.ports import Trainer
from serving.replica import invariant
from serving.replica.backbone import Backbone
from serving.replica.layout import Layout, lay_out
from serving.replica.lora import lazy_zeros, low_rank
from serving.replica.modes import ServingMode, Sorted, Worn
from serving.replica.sampling import draw_tokens

WIDTH_STEP = 32
"""Decode attention looks at a multiple of this many positions, so that few shapes occur."""
ROW_COST = 64
"""Attending to one row alone costs about as much more as this many cached positions."""
MOST_SLOTS = 2
"""Slots per token up to which versions are computed each for its own tokens, rather than each for all."""
LOGPROB_ROWS = 64
"""Positions whose logits are held at once for prompt logprobs: a vocabulary is wide."""
NOT_FINITE = "the model's output is not finite"


class TorchEngine:
    """Implements ``serving.ports.Engine``; one thread only."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        rows: int,
        max_total_tokens: int,
        places: int,
        max_rank: int,
        versions: int = 512,
        batch_invariant: bool = False,
        make_trainer: Callable[[Backbone], Trainer] | None = None,
    ) -> None:
        longest = getattr(backbone.config, "max_position_embeddings", max_total_tokens)
        if max_total_tokens > longest:
            raise ConfigError(f"COLLM_REPLICA__MAX_TOTAL_TOKENS: {max_total_tokens}, but the model allows {longest}")
        short = _short_context(backbone.config)
        if short is not None and max_total_tokens > short:
            raise ConfigError(
                f"COLLM_REPLICA__MAX_TOTAL_TOKENS: {max_total_tokens}, but beyond {short} this model's positions would "
                "depend on what else is in the batch"
            )
        self.backbone = backbone
        self._max_rank = max_rank
        self._make_trainer = make_trainer
        self._shape = EngineShape(
            model_id=backbone.name,
            backbone=backbone.sha256,
            dtype=str(backbone.dtype).removeprefix("torch."),
            rows=rows,
            max_total_tokens=max_total_tokens,
            places=places,
            versions=versions,
            eos_ids=backbone.eos_ids,
            vocab=backbone.config.vocab_size,
            chunk_multiple=invariant.PREFILL_TILE if batch_invariant else 1,
        )
        for group in backbone.groups:
            group.allot(places=places, rank=max_rank)
        # Zeros, not empty: what a mask hides is still multiplied, and 0 · NaN would come through.
        sizes = [(rows, heads, max_total_tokens, dim) for heads, dim in backbone.kv_sizes]
        self._keys = tuple(lazy_zeros(s, backbone.dtype, backbone.device) for s in sizes)
        self._values = tuple(lazy_zeros(s, backbone.dtype, backbone.device) for s in sizes)
        self._last_hidden: dict[int, Tensor] = {}
        """By row: final hidden state of the last prompt position so far, where logprobs are wanted."""
        self.decode_tile = self._find_decode_tile() if batch_invariant else 0
        """Tokens of a decode forward in the batch-invariant mode (``invariant``); 0: as many as there are."""

    @property
    def shape(self) -> EngineShape:
        """See ``Engine``."""
        return self._shape

    def trainer(self) -> Trainer:
        """See ``Engine``."""
        if self._make_trainer is None:
            raise ConfigError("this engine was built without a trainer")
        return self._make_trainer(self.backbone)

    def step(self, plan: StepPlan) -> StepResult:
        """See ``Engine``."""
        began = time.perf_counter()
        self._check(plan)
        try:
            # Nothing that is made in here may reach training: inference tensors cannot be saved for backward.
            with torch.inference_mode():
                self._copy(plan.copies)
                if self.decode_tile:
                    rows = invariant.joined(row for layout in self._tiles(plan) for row in self._run(layout))
                else:
                    rows = self._run(lay_out(plan))
        except (RuntimeError, NotImplementedError, MemoryError) as e:
            self._clean_up(plan)
            if "CUDA error" in str(e):
                raise EngineDead(str(e).splitlines()[0]) from e
            raise StepFailed(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
        by_row = {r.row: r for r in rows}
        order = [*(p.row for p in plan.prefills), *(d.row for d in plan.decodes)]
        return StepResult(rows=tuple(by_row[row] for row in order), seconds=time.perf_counter() - began)

    @torch.no_grad()
    def write(self, place: int, weights: LoraWeights) -> None:
        """See ``Engine``. Touches that place alone. Raises ``IncompatibleAdapter`` before it has changed anything."""
        if not 0 <= place < self._shape.places:
            raise ValueError(f"no place {place}")
        factors = self._factors(weights)
        for group in self.backbone.groups:
            group.write(place, factors, weights.spec.scale)

    def check(self, weights: LoraWeights) -> None:
        """See ``Engine``."""
        self._factors(weights)

    def _factors(self, weights: LoraWeights) -> dict[str, tuple[Tensor, Tensor]]:
        rank = weights.spec.rank
        limit = torch.finfo(self.backbone.dtype).max
        if rank > self._max_rank:
            raise IncompatibleAdapter(f"rank {rank} is above this engine's {self._max_rank}")
        names = {name.rsplit(".lora_", 1)[0] for name in weights.tensors}
        factors = {}
        for name in sorted(names):
            linear = self.backbone.linears.get(name)
            a = weights.tensors.get(f"{name}.lora_A.weight")
            b = weights.tensors.get(f"{name}.lora_B.weight")
            if linear is None or a is None or b is None:
                raise IncompatibleAdapter(f"{name}: no such linear here, or one factor without the other")
            d_out, d_in = linear.shape
            if a.shape != (rank, d_in) or b.shape != (d_out, rank):
                raise IncompatibleAdapter(f"{name}: shapes {a.shape} and {b.shape} do not fit {d_out} by {d_in}")
            # What is not finite in B would reach every row: masked columns are zero, and 0 · NaN is NaN.
            if not (_within(a, limit) and _within(b, limit / max(1.0, abs(weights.spec.scale)))):
                raise IncompatibleAdapter(f"{name}: its factors are not finite")
            factors[name] = _tensor(a), _tensor(b)
        return factors

    def _check(self, plan: StepPlan) -> None:
        """Raise ``StepFailed`` for a plan that would write outside a row or a place: a bug of the caller."""
        shape = self._shape
        spans = [(p.row, p.place, p.start, p.start + len(p.tokens)) for p in plan.prefills]
        spans += [(d.row, d.place, d.position, d.position + 1) for d in plan.decodes]
        rows = [row for row, *_ in spans]
        if len(set(rows)) < len(rows):
            raise StepFailed("a row stands twice in the plan")
        for row, place, start, stop in spans:
            inside = 0 <= row < shape.rows and 0 <= start < stop <= shape.max_total_tokens
            if not inside or not BASE <= place < shape.places:
                raise StepFailed(f"row {row}, place {place}, positions {start} to {stop} are outside the engine")
        for c in plan.copies:
            apart = c.source != c.target and 0 <= c.source < shape.rows and c.target in rows
            if not apart or not 0 < c.tokens <= shape.max_total_tokens:
                raise StepFailed(f"{c.tokens} positions cannot be copied from row {c.source} to row {c.target}")
        tokens = itertools.chain((d.token for d in plan.decodes), *(p.tokens for p in plan.prefills))
        if not all(0 <= token < shape.vocab for token in tokens):
            raise StepFailed("a token is outside the vocabulary")

    def _copy(self, copies: Sequence[CopyPrefix]) -> None:
        for c in copies:
            for tensor in (*self._keys, *self._values):
                tensor[c.target, :, : c.tokens] = tensor[c.source, :, : c.tokens]

    def _run(self, layout: Layout) -> tuple[RowResult, ...]:
        if not layout.ids:
            return ()
        with self.backbone.mode_set(self._mode(layout)):
            hidden = self._hidden(layout)
            tokens = self._draw(layout, hidden)
            logprobs = [
                self._prompt_logprobs(p, hidden[c.begin : c.end]) if p.logprobs else ()
                for p, c in zip(layout.prefills, layout.chunks, strict=True)
            ]
        items: list[Decode | Prefill] = [*layout.decodes, *layout.prefills]
        scores: list[tuple[float, ...]] = [()] * len(layout.decodes)
        scores += logprobs
        return tuple(
            self._result(item, token, logprobs=given) for item, token, given in zip(items, tokens, scores, strict=True)
        )

    def _hidden(self, layout: Layout) -> Tensor:
        device = self.backbone.device
        ids, positions = torch.tensor(layout.ids, device=device), torch.tensor(layout.positions, device=device)
        return self.backbone.hidden(ids, positions)

    def _draw(self, layout: Layout, hidden: Tensor) -> list[Token | bool | None]:
        """Return for each row its token, None if not finite; True for a finite row without draw. ``hidden`` [T, d]."""
        draws: list[Draw | None] = [d.draw for d in layout.decodes]
        if layout.tile and draws:
            filled = [*(d.draw for d in layout.decodes), *[invariant.FILLING] * (layout.tile - len(draws))]
            return list(draw_tokens(self.backbone.head(hidden), filled)[: len(draws)])
        draws += [p.draw for p in layout.prefills]
        ends = [*range(len(layout.decodes)), *(c.end - 1 for c in layout.chunks)]
        last = hidden if len(ends) == len(hidden) else hidden[torch.tensor(ends, device=hidden.device)]
        if all(draws):
            return list(draw_tokens(self.backbone.head(last), [d for d in draws if d is not None]))
        wanted = [i for i, d in enumerate(draws) if d is not None]
        out: list[Token | bool | None] = [bool(ok) or None for ok in torch.isfinite(last).all(-1).tolist()]
        if wanted:
            logits = self.backbone.head(last[torch.tensor(wanted, device=last.device)])
            for i, token in zip(wanted, draw_tokens(logits, [d for d in draws if d is not None]), strict=True):
                out[i] = token
        return out

    def _result(self, item: Prefill | Decode, token: Token | bool | None, *, logprobs: tuple[float, ...]) -> RowResult:
        if token is None:
            self._scrub(item)
            return RowResult(row=item.row, token=None, failed=NOT_FINITE)
        return RowResult(row=item.row, token=token if isinstance(token, Token) else None, prompt_logprobs=logprobs)

    def _prompt_logprobs(self, prefill: Prefill, hidden: Tensor) -> tuple[float, ...]:
        """Return the logprob of each of the chunk's tokens but the prompt's first; ``hidden`` [T, d] are theirs."""
        before = self._last_hidden.pop(prefill.row, None) if prefill.start else None
        if prefill.draw is None:
            self._last_hidden[prefill.row] = hidden[-1:].clone()
        sources, targets = hidden[:-1], prefill.tokens[1:]
        if before is not None:
            sources, targets = torch.cat([before, sources]), prefill.tokens
        out: list[float] = []
        for at in range(0, len(targets), LOGPROB_ROWS):
            logits = self._logits(sources[at : at + LOGPROB_ROWS], prefill.start - (before is not None) + at).float()
            wanted = torch.tensor(targets[at : at + LOGPROB_ROWS], device=logits.device)
            chosen = logits.gather(-1, wanted[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
            out += chosen.tolist()
        return tuple(out)

    def _logits(self, sources: Tensor, start: int) -> Tensor:
        """Return logits [n, V] of the hidden states [n, d] of a prompt's positions from ``start`` on."""
        if not self.decode_tile:
            return self.backbone.head(sources)
        logits = self.backbone.head(invariant.spread(sources, start))
        return invariant.gathered(logits, start, len(sources))

    def _tiles(self, plan: StepPlan) -> list[Layout]:
        return invariant.tiles(plan, decode_tile=self.decode_tile, max_total_tokens=self._shape.max_total_tokens)

    @torch.inference_mode()
    def _find_decode_tile(self) -> int:
        """Return how many tokens a decode forward may have so that none of them changes another's bits."""
        tile, backbone = invariant.DECODE_TILE, self.backbone
        count = min(tile, self._shape.rows)
        self.decode_tile = tile

        def compute(ids: Tensor) -> Tensor:
            """[count, 1] tokens, each in a row of its own → its logits."""
            decodes = [
                Decode(row=i, place=BASE, token=int(token), position=0, draw=invariant.FILLING)
                for i, token in enumerate(ids)
            ]
            (layout,) = self._tiles(StepPlan(decodes=tuple(decodes)))
            with backbone.mode_set(self._mode(layout)):
                return backbone.head(self._hidden(layout))[:count]

        ids = torch.arange(count)[:, None] * 7919 % self._shape.vocab
        alone = invariant.rows_are_alone(compute, ids)
        for tensor in (*self._keys, *self._values):
            tensor[:count, :, :1].zero_()
        shapes = {(group.a.shape[1:], group.b.shape[1:]) for group in backbone.groups}
        alone = alone and all(self._low_rank_is_alone(a, b) for a, b in shapes)
        return tile if alone else 1

    def _low_rank_is_alone(self, shape_a: Sequence[int], shape_b: Sequence[int]) -> bool:
        dtype, device = self.backbone.groups[0].a.dtype, self.backbone.device
        chance = torch.Generator().manual_seed(0)
        x, a, b = (
            torch.randn(shape, generator=chance).to(device, dtype)
            for shape in ((invariant.DECODE_TILE, shape_a[1]), shape_a, shape_b)
        )
        return invariant.rows_are_alone(lambda rows: low_rank(rows, a, b), x)

    def _mode(self, layout: Layout) -> ServingMode:
        device = self.backbone.device
        rows = [d.row for d in layout.decodes]
        span = rows[-1] + 1 if rows else 0
        stops = [d.position + 1 for d in layout.decodes]
        width = min(-(-max(stops, default=0) // WIDTH_STEP) * WIDTH_STEP, self._shape.max_total_tokens)
        alone = layout.tile or len(rows) == 1 or sum(stops) + ROW_COST * len(rows) < span * width
        return ServingMode(
            keys=self._keys,
            values=self._values,
            rows=torch.tensor(rows, dtype=torch.long, device=device),
            positions=torch.tensor([d.position for d in layout.decodes], dtype=torch.long, device=device),
            span=span,
            width=width,
            dense=span == len(rows),
            one_by_one=tuple(zip(rows, stops, strict=True)) if alone else (),
            chunks=layout.chunks,
            worn=_worn(layout.places, device),
            tile=layout.tile,
        )

    def _clean_up(self, plan: StepPlan) -> None:
        self.backbone.forget()
        items: list[Prefill | Decode] = [*plan.prefills, *plan.decodes]
        for item in items:
            self._scrub(item)

    def _scrub(self, item: Prefill | Decode) -> None:
        """Zero what a row holds up to here, not finite perhaps: its next owner's mask hides, but 0 · NaN is NaN."""
        self._last_hidden.pop(item.row, None)
        stop = item.start + len(item.tokens) if isinstance(item, Prefill) else item.position + 1
        for tensor in (*self._keys, *self._values):
            tensor[item.row, :, :stop].zero_()


def _within(values: Array, limit: float) -> bool:
    """Whether all are finite and at most ``limit`` large."""
    return bool(-limit <= values.min() and values.max() <= limit)  # NaN is neither


def _tensor(values: Array) -> Tensor:
    """Return a tensor to read from, without a copy where torch allows."""
    return torch.from_numpy(values) if values.flags.writeable else torch.tensor(values)


def _worn(places: Sequence[int], device: torch.device) -> Worn | None:
    """Return what the tokens wear; nothing to choose by where all wear the same."""
    used = set(places)
    low, high = min(used - {BASE}, default=0), max(used) + 1
    if used == {BASE}:
        return None
    worn = tuple(sorted(used - {BASE}))
    if len(used) == 1:
        return Worn(low=low, high=high, place_of=None, used=worn)
    by_place = _sorted(places, low, high, device)
    return Worn(low=low, high=high, place_of=torch.tensor(places, device=device), used=worn, by_place=by_place)


def _sorted(places: Sequence[int], low: int, high: int, device: torch.device) -> Sorted | None:
    """Return the tokens by place; None where that would leave most slots empty."""
    members: list[list[int]] = [[] for _ in range(low, high)]
    for token, place in enumerate(places):
        if place != BASE:
            members[place - low].append(token)
    count = max(len(m) for m in members)
    if count * len(members) > MOST_SLOTS * len(places):
        return None
    slots = [0] * len(places)
    for i, mine in enumerate(members):
        for j, token in enumerate(mine):
            slots[token] = i * count + j
    wears = None
    if BASE in places:
        wears = torch.tensor([[place != BASE] for place in places], device=device)
    tokens = [token for mine in members for token in (*mine, *[0] * (count - len(mine)))]
    return Sorted(
        count=count, tokens=torch.tensor(tokens, device=device), slots=torch.tensor(slots, device=device), wears=wears
    )


def _short_context(config: PreTrainedConfig) -> int | None:
    """Return up to how many positions a model of the LongRoPE kind has one set of frequencies; None for other kinds.

    Beyond them transformers takes the other set for all rows of a step, by the longest of them.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # By kind of layer where they differ.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    short = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(short, default=None)
