"""A deterministic engine and trainer without weights, for tests of everything around them.

Tokens depend on the prompt, on the weights that each position was computed under, and on the token's index, so that
a mixed-up row, place or version shows in the answer. Training moves every ``B A`` towards one target, so that losses
fall, updates aggregate and a gate has something to measure. Time passes only as told.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from adapters.model import Array, LoraWeights
from db.records import Factor
from infra.clock import Clock
from infra.errors import IncompatibleAdapter
from serving.model import BASE, Draw, EngineShape, Prefill, RowResult, StepPlan, StepResult, Token
from serving.ports import ScoreResult, SliceReport, TrainState, TrainTask, WorkState
from serving.rows import Row

FAKE_MODEL_ID = "collm/fake"
FAKE_BACKBONE = hashlib.sha256(b"collm fake backbone").hexdigest()
FAKE_SHAPES: Mapping[str, tuple[int, int]] = {
    "model.layers.0.mlp.down_proj": (8, 16),
    "model.layers.0.self_attn.q_proj": (8, 8),
}
"""Linear → [out, in], as ``adapters.weights.linear_shapes`` gives them for a real model."""
EOS = 256
VOCAB = 257
TARGET = 0.05
"""What every entry of every product ``scale · B A`` is trained towards."""
STEP_PER_LR = 50.0
SLICES_PER_STEP = 4

_MASK = (1 << 64) - 1


class FakeTokenizer:
    """Bytes are tokens; 256 ends an answer. Implements ``text.Tokenizer``."""

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``text.Tokenizer``."""
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See ``text.Tokenizer``."""
        return bytes(i for i in ids if i < EOS).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """See ``text.Tokenizer``."""
        return "</s>" if token == EOS else self.decode([token])

    def is_special(self, token: int) -> bool:
        """See ``text.Tokenizer``."""
        return token == EOS


class FakeEngine:
    """Implements ``ports.Engine``."""

    def __init__(
        self,
        clock: Clock,
        *,
        rows: int = 4,
        max_total_tokens: int = 256,
        places: int = 4,
        versions: int = 512,
        step_s: float = 0.0,
        slice_s: float = 0.0,
    ) -> None:
        self.shape = EngineShape(
            model_id=FAKE_MODEL_ID,
            backbone=FAKE_BACKBONE,
            dtype="float32",
            rows=rows,
            max_total_tokens=max_total_tokens,
            places=places,
            versions=versions,
            eos_ids=frozenset({EOS}),
            vocab=VOCAB,
        )
        self.step_s = step_s
        self.slice_s = slice_s
        self.fail_next: Exception | None = None
        """Raised by the next step, once."""
        self.nan_loss_at: int | None = None
        """Training steps from this one on have no finite loss."""
        self._clock = clock
        self._prints = dict.fromkeys(range(places), 0)
        self._broken: set[int] = set()
        self._state: dict[int, list[int]] = {}
        """Row → by position: digest of the tokens so far and of the weights that they were computed under."""

    def step(self, plan: StepPlan) -> StepResult:
        """See ``ports.Engine``."""
        begin_s = self._clock.monotonic()
        if self.step_s:
            self._clock.sleep(self.step_s)
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error
        for c in plan.copies:
            held = self._state.get(c.source, [])
            assert 0 < c.tokens <= len(held), f"row {c.source} holds {len(held)} positions, not {c.tokens}"
            self._state[c.target] = held[: c.tokens]
        rows = [self._prefill(p) for p in plan.prefills]
        for d in plan.decodes:
            self._extend(d.row, d.place, (d.token,), d.position)
            rows.append(self._answer(d.row, d.place, d.draw, ()))
        return StepResult(rows=tuple(rows), seconds=self._clock.monotonic() - begin_s)

    def write(self, place: int, weights: LoraWeights) -> None:
        """See ``ports.Engine``."""
        check_shapes(weights)
        self._prints[place] = fingerprint(weights)
        finite = all(np.isfinite(t).all() for t in weights.tensors.values())
        (self._broken.discard if finite else self._broken.add)(place)

    def check(self, weights: LoraWeights) -> None:
        """See ``ports.Engine``."""
        check_shapes(weights)

    def trainer(self) -> "FakeTrainer":
        """See ``ports.Engine``."""
        return FakeTrainer(self._clock, slice_s=self.slice_s, nan_loss_at=lambda: self.nan_loss_at)

    def _prefill(self, prefill: Prefill) -> RowResult:
        logprobs: list[float] = []
        for i, token in enumerate(prefill.tokens):
            if prefill.logprobs and prefill.start + i > 0:
                logprobs.append(_logprob(_mix(self._state[prefill.row][-1], token)))
            self._extend(prefill.row, prefill.place, (token,), prefill.start + i)
        return self._answer(prefill.row, prefill.place, prefill.draw, tuple(logprobs))

    def _extend(self, row: int, place: int, tokens: Sequence[int], position: int) -> None:
        assert 0 <= row < self.shape.rows, "no such row"
        digests = self._state.setdefault(row, [])
        assert position <= len(digests), f"row {row} holds {len(digests)} positions, not {position}"
        del digests[position:]
        worn = 0 if place == BASE else self._prints[place]
        for token in tokens:
            digests.append(_mix(_mix(digests[-1] if digests else 0, token), worn))

    def _answer(self, row: int, place: int, draw: Draw | None, logprobs: tuple[float, ...]) -> RowResult:
        if place in self._broken:
            return RowResult(row=row, token=None, failed="non-finite logits")
        if draw is None:
            return RowResult(row=row, token=None, prompt_logprobs=logprobs)
        digest = _mix(self._state[row][-1], draw.index)
        if draw.params.do_sample:
            digest = _mix(digest, draw.params.seed)
        token = _token(digest)
        top = tuple(
            (_token(_mix(digest, i)) if i else token, _logprob(digest) - i) for i in range(draw.params.top_n_tokens)
        )
        return RowResult(row=row, token=Token(id=token, logprob=_logprob(digest), top=top), prompt_logprobs=logprobs)


def expected_tokens(prompt: Sequence[int], weights: LoraWeights | None, count: int) -> list[int]:
    """Return the greedy answer of one version alone, ``count`` tokens or up to and including EOS."""
    worn, digest = 0 if weights is None else fingerprint(weights), 0
    for token in prompt:
        digest = _mix(_mix(digest, token), worn)
    answer: list[int] = []
    while len(answer) < count and EOS not in answer:
        answer.append(_token(_mix(digest, len(answer))))
        digest = _mix(_mix(digest, answer[-1]), worn)
    return answer


def fingerprint(weights: LoraWeights) -> int:
    """Return a number that names the weights."""
    digest = hashlib.sha256(repr(weights.spec).encode())
    for name in sorted(weights.tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights.tensors[name]).tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


def check_shapes(weights: LoraWeights) -> None:
    """Raise ``IncompatibleAdapter`` unless the tensors are those of an adapter of ``FAKE_SHAPES``."""
    rank = weights.spec.rank
    want: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in FAKE_SHAPES.items():
        if name.rsplit(".", 1)[-1] in weights.spec.targets:
            want |= {f"{name}.lora_A.weight": (rank, columns), f"{name}.lora_B.weight": (rows, rank)}
    got = {name: tensor.shape for name, tensor in weights.tensors.items()}
    if got != want:
        raise IncompatibleAdapter(f"tensors {sorted(got.items())} are not {sorted(want.items())}")


def _mix(state: int, value: int) -> int:
    state = ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 29)


def _token(digest: int) -> int:
    """A lower-case letter or a space; now and then the end."""
    value = _mix(digest, 1) >> 20
    return EOS if value % 101 == 0 else (32, *range(97, 123))[value % 27]


def _logprob(digest: int) -> float:
    return -(_mix(digest, 2) >> 44) / 2**20


class FakeTrainer:
    """Implements ``ports.Trainer``."""

    def __init__(self, clock: Clock, *, slice_s: float, nan_loss_at: Callable[[], int | None]) -> None:
        self._clock = clock
        self._slice_s = slice_s
        self._nan_loss_at = nan_loss_at

    def train(
        self, task: TrainTask, base: LoraWeights, rows: Sequence[Row], state: TrainState | None = None
    ) -> "FakeTrainWork":
        """See ``ports.Trainer``."""
        return FakeTrainWork(self._clock, self._slice_s, self._nan_loss_at, task, base, rows, state)

    def score(self, rows: Sequence[Row], weights: LoraWeights | None) -> "FakeScoreWork":
        """See ``ports.Trainer``."""
        return FakeScoreWork(self._clock, self._slice_s, rows, weights)


class FakeTrainWork:
    """Implements ``ports.TrainWork``."""

    def __init__(
        self,
        clock: Clock,
        slice_s: float,
        nan_loss_at: Callable[[], int | None],
        task: TrainTask,
        base: LoraWeights,
        rows: Sequence[Row],
        state: TrainState | None,
    ) -> None:
        assert rows, "nothing to train on"
        check_shapes(base)
        if state is not None and state.arrays.keys() != base.tensors.keys():
            raise ValueError("the state is of another adapter")
        self.steps = 0 if state is None else state.steps
        self.tokens = 0 if state is None else state.tokens
        self._clock = clock
        self._slice_s = slice_s
        self._nan_loss_at = nan_loss_at
        self._task = task
        self._spec = base.spec
        start = base.tensors if state is None else state.arrays
        self._tensors: dict[str, Array] = {name: tensor.copy() for name, tensor in start.items()}
        self._rows = rows
        self._slices = 0
        self._state = WorkState.RUNNING

    def next_slice_s(self) -> float:
        """See ``ports.Work``."""
        return self._slice_s

    def slice(self) -> SliceReport:
        """See ``ports.Work``."""
        assert self._state is WorkState.RUNNING, "the work has ended"
        if self._slice_s:
            self._clock.sleep(self._slice_s)
        self._slices += 1
        if self.tokens >= self._task.tokens:
            self._state = WorkState.DONE
            return SliceReport(seconds=self._slice_s, state=self._state)
        if self._slices % SLICES_PER_STEP:
            return SliceReport(seconds=self._slice_s, state=self._state)
        return self._step()

    def close(self) -> None:
        """See ``ports.Work``."""
        self._state = WorkState.FAILED

    def shadow(self) -> LoraWeights:
        """See ``ports.TrainWork``."""
        return LoraWeights(spec=self._spec, tensors={name: t.copy() for name, t in self._tensors.items()})

    def state(self) -> TrainState:
        """See ``ports.TrainWork``."""
        return TrainState(steps=self.steps, tokens=self.tokens, arrays=self.shadow().tensors)

    def _step(self) -> SliceReport:
        nan_at = self._nan_loss_at()
        loss = math.nan if nan_at is not None and self.steps >= nan_at else fake_loss(self.shadow())
        if not math.isfinite(loss):
            self._state = WorkState.FAILED
            return SliceReport(seconds=self._slice_s, state=self._state, reason="the loss is not finite")
        self._descend()
        first = self.steps * self._task.rows_per_step + self._task.seed
        batch = [self._rows[(first + i) % len(self._rows)] for i in range(self._task.rows_per_step)]
        tokens = sum(fake_tokens(row) for row in batch)
        self.steps += 1
        self.tokens += tokens
        if self.tokens >= self._task.tokens:
            self._state = WorkState.DONE
        return SliceReport(seconds=self._slice_s, state=self._state, step_ended=True, tokens=tokens, loss=loss)

    def _descend(self) -> None:
        rate, scale = min(1.0, STEP_PER_LR * self._task.lr), self._spec.scale
        for name in [n.removesuffix(".lora_A.weight") for n in self._tensors if n.endswith(".lora_A.weight")]:
            a, b = self._tensors[f"{name}.lora_A.weight"], self._tensors[f"{name}.lora_B.weight"]
            way = rate / scale * (TARGET - scale * (b @ a))
            # Least squares, which converge from anywhere.
            if self._task.factor in (Factor.B, Factor.BOTH):
                self._tensors[f"{name}.lora_B.weight"] = (b + way @ np.linalg.pinv(a)).astype(np.float32)
            if self._task.factor in (Factor.A, Factor.BOTH):
                self._tensors[f"{name}.lora_A.weight"] = (a + np.linalg.pinv(b) @ way).astype(np.float32)


class FakeScoreWork:
    """Implements ``ports.ScoreWork``: one row per slice."""

    def __init__(self, clock: Clock, slice_s: float, rows: Sequence[Row], weights: LoraWeights | None) -> None:
        assert rows, "nothing to score"
        if weights is not None:
            check_shapes(weights)
        self._clock = clock
        self._slice_s = slice_s
        self._rows = rows
        self._ce = fake_loss(weights)
        self._done = 0

    def next_slice_s(self) -> float:
        """See ``ports.Work``."""
        return self._slice_s

    def slice(self) -> SliceReport:
        """See ``ports.Work``."""
        assert self._done < len(self._rows), "the work has ended"
        if self._slice_s:
            self._clock.sleep(self._slice_s)
        self._done += 1
        state = WorkState.DONE if self._done == len(self._rows) else WorkState.RUNNING
        return SliceReport(seconds=self._slice_s, state=state)

    def close(self) -> None:
        """See ``ports.Work``."""
        self._done = len(self._rows)

    def result(self) -> ScoreResult:
        """See ``ports.ScoreWork``."""
        tokens = tuple(fake_tokens(row) for row in self._rows)
        return ScoreResult(nll_by_row=tuple(n * self._ce for n in tokens), tokens_by_row=tokens)


def fake_tokens(row: Row) -> int:
    """Return a row's supervised tokens, the end included."""
    return len(row.completion.encode()) + 1


def fake_loss(weights: LoraWeights | None) -> float:
    """Return the cross-entropy of a version: 1.5 for the backbone alone and for ``B = 0``, 0.5 at the target."""
    if weights is None:
        return 1.5
    error = want = 0.0
    for name, (rows, columns) in FAKE_SHAPES.items():
        if name.rsplit(".", 1)[-1] in weights.spec.targets:
            product = weights.tensors[f"{name}.lora_B.weight"] @ weights.tensors[f"{name}.lora_A.weight"]
            error += float(((TARGET - weights.spec.scale * product) ** 2).sum())
            want += rows * columns * TARGET**2
    return 0.5 + error / want
